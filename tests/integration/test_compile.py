"""Compiled models: one graph, no recompilation from layer to layer, the same numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters

import jali
from jali.integration.models.compilation import compile_blocks
from jali.integration.transformer import AttentionCall
from jali.methods import Entropy, FastestDense, Psa
from jali.planning.budget import Budget

SPARSE: dict[str, Any] = {"warmup_frac": 1, "q_block": 64, "k_block": 64, "steps": 3}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def wan_inputs(t: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(1, 16, 5, 32, 32, generator=g),
        "encoder_hidden_states": torch.randn(1, 16, 32, generator=g),
        "timestep": torch.tensor([t]),
        "return_dict": False,
    }


def flux_inputs(t: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    ids = torch.zeros(32, 32, 3)
    ids[..., 1], ids[..., 2] = torch.arange(32)[:, None], torch.arange(32)
    return {
        "hidden_states": torch.randn(1, 1024, 4, generator=g),
        "encoder_hidden_states": torch.randn(1, 48, 32, generator=g),
        "pooled_projections": torch.randn(1, 32, generator=g),
        "timestep": torch.tensor([t / 1000]),
        "img_ids": ids.reshape(-1, 3), "txt_ids": torch.zeros(48, 3), "return_dict": False,
    }  # fmt: skip


def cog_inputs(t: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(1, 5, 4, 32, 32, generator=g),
        "encoder_hidden_states": torch.randn(1, 16, 32, generator=g),
        "timestep": torch.tensor([int(t)]), "return_dict": False,
    }  # fmt: skip


def qwen_inputs(t: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(1, 1024, 16, generator=g),
        "encoder_hidden_states": torch.randn(1, 40, 16, generator=g),
        "timestep": torch.tensor([t / 1000]), "img_shapes": [[(1, 32, 32)]], "return_dict": False,
        **({"txt_seq_lens": [40]} if tiny.OLD else {}),
        "encoder_hidden_states_mask": torch.ones(1, 40, dtype=torch.bool),
    }  # fmt: skip


def ltx_inputs(t: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(1, 1280, 8, generator=g),
        "encoder_hidden_states": torch.randn(1, 8, 32, generator=g),
        "encoder_attention_mask": torch.ones(1, 8),
        "timestep": torch.tensor([t]), "num_frames": 5, "height": 16, "width": 16,
        "return_dict": False,
    }  # fmt: skip


def hunyuan_inputs(t: float) -> dict[str, Any]:
    g = torch.Generator().manual_seed(2)
    mask = torch.zeros(1, 24)
    mask[:, :11] = 1
    return {
        "hidden_states": torch.randn(1, 4, 5, 16, 16, generator=g),
        "encoder_hidden_states": torch.randn(1, 24, 16, generator=g),
        "encoder_attention_mask": mask,
        "pooled_projections": torch.randn(1, 8, generator=g),
        "timestep": torch.tensor([t]), "guidance": torch.tensor([6000.0]), "return_dict": False,
    }  # fmt: skip


def hunyuan15_inputs(t: float) -> dict[str, Any]:
    """Text to video: the image is all zeros, so its tokens are padding, like some of the text."""
    g = torch.Generator().manual_seed(2)
    masks = torch.zeros(2, 1, 24)
    masks[0, :, :11] = masks[1, :, :7] = 1
    return {
        "hidden_states": torch.randn(1, 65, 5, 16, 16, generator=g),
        "timestep": torch.tensor([t]),
        "encoder_hidden_states": torch.randn(1, 24, 16, generator=g),
        "encoder_attention_mask": masks[0],
        "encoder_hidden_states_2": torch.randn(1, 24, 8, generator=g),
        "encoder_attention_mask_2": masks[1],
        "image_embeds": torch.zeros(1, 32, 8), "return_dict": False,
    }  # fmt: skip


# How to build one of so many layers, its inputs, how many layers show that none adds a graph, and
# how many kinds of block there are.
MODELS: dict[str, tuple[Callable[[int], Any], Callable[[float], dict[str, Any]], int, int]] = {
    "wan": (tiny.wan_transformer, wan_inputs, 12, 1),
    "flux": (lambda _: tiny.flux().transformer, flux_inputs, 2, 2),
    "cogvideox": (lambda n: tiny.cogvideox(layers=n).transformer, cog_inputs, 10, 1),
    "qwen-image": (tiny.qwen_transformer, qwen_inputs, 10, 1),
    "ltx-video": (lambda n: tiny.ltx(n).transformer, ltx_inputs, 10, 1),
    "hunyuan-video": (lambda n: tiny.hunyuan(n // 2, n // 2).transformer, hunyuan_inputs, 6, 2),
    "hunyuan-video-1.5": (lambda n: tiny.hunyuan15(n).transformer, hunyuan15_inputs, 10, 1),
}
if not tiny.OLD:
    MODELS["ltx-2"] = (tiny.ltx2_transformer, tiny.ltx2_inputs, 10, 1)


# HunyuanVideo 1.5 asks whether its image is all zeros, and cuts padding out of its text.
BRANCHING = ("hunyuan-video-1.5",)


def generation(model: Any, inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.stack([model(**inputs(t))[0] for t in (900.0, 600.0, 300.0)])


@pytest.mark.parametrize("name", MODELS)
def test_repeated_blocks_are_one_graph_each(name: str) -> None:
    build, inputs, layers, least = MODELS[name]
    model = build(layers)
    if not getattr(model, "_repeated_blocks", None):
        pytest.skip(f"diffusers names no repeated blocks for {name}")
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    generation(model, inputs)
    kinds = counters["stats"]["unique_graphs"]  # of the stock model: no layer adds one
    assert kinds >= least
    torch.compiler.reset()
    counters.clear()
    model = build(layers)
    handle = jali.apply_sparse_attention(model, "entropy", mean_budget=0.3, **SPARSE)
    expected = generation(model, inputs)
    model.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    handle.run.clock.restart()
    out = generation(model, inputs)
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    assert counters["stats"]["unique_graphs"] == kinds, "one graph for every kind of block"
    assert not counters["graph_break"]
    rows = handle.stats().rows
    layers = handle.run.transformers[0].layers
    assert len({(r.layer, r.step) for r in rows}) == len(rows) == layers * 3
    assert {r.step for r in rows if r.reason is None} == {1, 2}
    handle.remove()


LONGER = {"ltx-2": pytest.mark.slow}  # four streams of attention in every block


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=LONGER.get(name, ())) for name in MODELS]
)
def test_the_whole_model(name: str) -> None:
    build, inputs, _, _ = MODELS[name]
    model = build(2)
    stock = generation(model, inputs)
    handle = jali.apply_sparse_attention(model, "entropy", mean_budget=0.3, **SPARSE)
    expected = generation(model, inputs)
    model.compile(fullgraph=name not in BRANCHING, backend="aot_eager")
    handle.run.clock.restart()
    out = generation(model, inputs)
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    assert not counters["graph_break"]
    rows = handle.stats().rows
    assert len(rows) == handle.run.transformers[0].layers * 3
    assert {r.step for r in rows if r.reason is None} == {1, 2}
    handle.remove()
    assert (generation(model, inputs) - stock).norm() <= 1e-5 * stock.norm()


@pytest.mark.slow
@pytest.mark.parametrize("name", BRANCHING)
def test_a_whole_model_that_is_no_single_graph(name: str) -> None:
    """It asks for numbers in its own forward. Under jali the break is there, and no other."""
    build, inputs, _, _ = MODELS[name]
    pieces = []
    for sparse in (False, True):
        torch.compiler.reset()
        counters.clear()
        model = build(2)
        if sparse:
            jali.apply_sparse_attention(model, "entropy", mean_budget=0.3, **SPARSE)
        else:
            model.compile(fullgraph=True, backend="aot_eager")
            with pytest.raises(torch._dynamo.exc.Unsupported, match="branching"):
                generation(model, inputs)
            torch.compiler.reset()
            counters.clear()
        model.compile(backend="aot_eager")
        generation(model, inputs)
        pieces.append(counters["stats"]["unique_graphs"])
    assert pieces[1] == pieces[0] + 1, "what tells the run of a call is a graph of its own"


def test_a_model_compiled_before_us() -> None:
    pipe = tiny.wan(2)
    expected = tiny.generate(pipe, tiny.WAN_CALL)
    pipe.transformer.compile_repeated_blocks(fullgraph=True, backend="aot_eager")
    tiny.generate(pipe, tiny.WAN_CALL)
    with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=0, q_block=64, k_block=64) as run:
        tiny.generate(pipe, tiny.WAN_CALL)
    assert run.stats().sparse_cost < 0.6
    again = tiny.generate(pipe, tiny.WAN_CALL)
    assert (again - expected).norm() <= 1e-4 * expected.norm()


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


def test_a_second_clip_compiles_nothing() -> None:
    """Nor does another method, another run, nor the pipeline after it."""
    pipe = tiny.wan(2)
    compile_blocks(pipe, backend="eager")

    def clips(prompt: str) -> list[int]:
        begun, made = graphs(), []
        call = tiny.WAN_CALL | {"prompt": prompt, "height": 64, "width": 64, "num_frames": 9}
        tiny.generate(pipe, call)
        made.append(graphs() - begun)
        for method in (Entropy(Budget(0.3), q_block=16, k_block=16), Psa(), FastestDense()):
            with jali.sparse_processor_mode(pipe, method=method) as run:
                for _ in range(2):
                    begun = graphs()
                    tiny.generate(pipe, call)
                    made.append(graphs() - begun)
            assert (run.stats().sums.sparse_calls > 0) == (not isinstance(method, FastestDense))
        return made

    assert clips("a cat") == [1, 1, 0, 0, 0, 0, 0], "one graph without us and one with us"
    assert clips("a dog in the snow, from far away") == [0] * 7


def test_texts_of_other_lengths_are_compiled_once() -> None:
    """The second length makes graphs for all others (two, as in the stock model)."""
    model = tiny.qwen_transformer(2)
    compile_blocks(SimpleNamespace(transformer=model), backend="eager")
    made = []
    with jali.sparse_processor_mode(model, 0.3, **SPARSE):
        for length in (40, 36, 31, 24, 40):
            given, begun = qwen_inputs(600.0), graphs()
            for name in ("encoder_hidden_states", "encoder_hidden_states_mask"):
                given[name] = given[name][:, :length].contiguous()
            if tiny.OLD:
                given["txt_seq_lens"] = [length]
            with torch.no_grad():
                model(**given)
            made.append(graphs() - begun)
    assert made[0] == 1
    assert made[2:] == [0, 0, 0]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_has_blocks_to_compile(name: str) -> None:
    model = MODELS[name][0](2)
    compile_blocks(SimpleNamespace(transformer=model), backend="eager")
    compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
    assert len(compiled) >= 2
    assert not any(isinstance(m, torch.nn.Linear) for m in compiled)


def test_a_wrapped_module() -> None:
    model = tiny.wan_transformer(2)
    compiled = torch.compile(model, backend="aot_eager")
    with jali.sparse_processor_mode(compiled, 0.3, warmup_frac=0, q_block=64, k_block=64) as run:
        with torch.no_grad():
            compiled(**wan_inputs(500.0))
        assert len(run.stats().rows) == 2


@pytest.mark.slow
def test_what_is_kept_of_a_call_is_a_copy() -> None:
    """Inductor uses the memory of q, k and v again once the call is over; aot_eager does not."""
    model = tiny.wan_transformer(3)
    handle = jali.apply_sparse_attention(model, FastestDense())
    model.compile_repeated_blocks(fullgraph=True, backend="inductor")
    kept: list[AttentionCall] = []
    handle.run.watch = lambda seen: kept.append(seen.copied())
    with torch.no_grad():
        model(**wan_inputs(900.0))
    assert len(kept) == 3
    for seen in kept:
        expected = F.scaled_dot_product_attention(seen.q, seen.k, seen.v)
        torch.testing.assert_close(seen.result.out, expected, atol=1e-5, rtol=1e-5)
