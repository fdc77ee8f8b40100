"""Every family on a small real pipeline: equal when it should be, sparse when it should be."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import tiny
import torch
from PIL import Image

import jali
from jali.methods import Entropy, Schedule

IMAGE = Image.new("RGB", (256, 256), (40, 90, 160))
SMALL = {"q_block": 64, "k_block": 64}


@dataclass(frozen=True)
class Case:
    name: str
    build: Callable[[], Any]
    call: Callable[[], dict[str, Any]]
    branches: tuple[str, ...]
    layers: int
    grid: str  # of the first call, in words
    transformers: int = 1


CASES = (
    Case("wan", tiny.wan, lambda: tiny.WAN_CALL, ("cond", "uncond"), 3, "5×16×16"),
    Case(
        "wan-unguided", tiny.wan, lambda: {**tiny.WAN_CALL, "guidance_scale": 1.0}, ("cond",), 3,
        "5×16×16",
    ),
    Case(
        "wan2.2-t2v", lambda: tiny.wan(layers=2, experts=2), lambda: tiny.WAN_CALL,
        ("cond", "uncond"), 2, "5×16×16", 2,
    ),
    Case(
        "wan2.2-i2v", tiny.wan_i2v, lambda: {**tiny.WAN_CALL, "image": IMAGE},
        ("cond", "uncond"), 2, "5×16×16", 2,
    ),
    Case(
        "wan2.1-i2v", tiny.wan21_i2v,
        lambda: {**tiny.WAN_CALL, "image": IMAGE, "max_sequence_length": 512},
        ("cond", "uncond"), 2, "5×16×16",
    ),
    Case(
        "wan2.2-ti2v", tiny.wan_ti2v,
        lambda: {**tiny.WAN_CALL, "image": IMAGE.resize((512, 512)), "height": 512, "width": 512},
        ("cond", "uncond"), 2, "5×16×16",
    ),
    Case("wan-vace", tiny.wan_vace, lambda: tiny.WAN_CALL, ("cond", "uncond"), 5, "5×16×16"),
    Case("cogvideox", tiny.cogvideox, lambda: tiny.COG_CALL, ("batched",), 3, "16 text + 5×16×16"),
    Case(
        "cogvideox1.5", lambda: tiny.cogvideox("1.5"),
        lambda: {**tiny.COG_CALL, "num_frames": 33}, ("batched",), 3, "16 text + 5×16×16",
    ),
    Case(
        "hunyuan-video", tiny.hunyuan, lambda: tiny.HUNYUAN_CALL, ("cond",), 3,
        "5×16×16 + 24 text",
    ),
    Case(
        "hunyuan-video-1.5", tiny.hunyuan15, tiny.hunyuan15_call, ("cond", "uncond"), 2,
        "8×16×16 + 785 text",
    ),
    Case("ltx-video", tiny.ltx, lambda: tiny.LTX_CALL, ("batched",), 3, "5×16×16"),
    Case("flux", tiny.flux, lambda: tiny.FLUX_CALL, ("cond",), 3, "48 text + 1×32×32"),
    Case(
        "flux-kontext", lambda: tiny.flux(kontext=True),
        lambda: {**tiny.FLUX_CALL, "image": IMAGE.resize((64, 32)), "max_area": 64 * 64,
                 "_auto_resize": False},
        ("cond",), 3, "48 text + 1×32×32 + 1×16×32",
    ),
    Case("qwen-image", tiny.qwen, tiny.qwen_call, ("cond", "uncond"), 3, "40 text + 1×32×40"),
)  # fmt: skip
if not tiny.OLD:
    more = {"modality_scale": 3.0}  # a pass without the attention between video and audio
    CASES += (
        Case(
            "ltx-2", tiny.ltx2, lambda: {**tiny.ltx2_call(), **more},
            ("batched", "uncond_modality"), 2, "5×16×16",
        ),
    )  # fmt: skip


@functools.lru_cache(maxsize=2)
def built(name: str) -> Any:
    return tiny.encode_once(next(case for case in CASES if case.name == name).build())


@functools.lru_cache(maxsize=2)
def stock(name: str) -> Any:
    case = next(case for case in CASES if case.name == name)
    return tiny.generate(built(name), case.call())


def processors(pipe: Any) -> list[Any]:
    return [
        p
        for name in ("transformer", "transformer_2")
        if getattr(pipe, name, None) is not None
        for p in getattr(pipe, name).attn_processors.values()
    ]


# One case after another, so that a pipeline is built once.
each = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name, scope="module")


@each
class TestFamily:
    def test_dense_is_stock_bit_for_bit(self, case: Case) -> None:
        pipe = built(case.name)
        expected = stock(case.name)
        with jali.sparse_processor_mode(pipe, method="dense") as run:
            out = tiny.generate(pipe, case.call())
        assert torch.equal(out, expected)
        assert run.stats().cost == 1

    def test_everything_read_is_stock_to_rounding(self, case: Case) -> None:
        pipe = built(case.name)
        expected = stock(case.name)
        with jali.sparse_processor_mode(pipe, 1.0, warmup_frac=0, dense_first_layer=False) as run:
            out = tiny.generate(pipe, case.call())
        assert run.stats().dense == {}
        assert (out - expected).norm() <= 1e-4 * expected.norm()

    def test_sparse_sees_every_place_once(self, case: Case) -> None:
        pipe, steps = built(case.name), 3
        expected, before = stock(case.name), processors(pipe)
        seen: list[str] = []
        with jali.sparse_processor_mode(
            pipe, 0.3, warmup_frac=0, dense_first_layer=False, **SMALL
        ) as run:
            pipe.transformer.register_forward_hook(
                lambda *_: seen.append(str(next(iter(run.run.transformers[0].call.grids.values()))))
            )
            out = tiny.generate(pipe, case.call(), steps)
            pipe.transformer._forward_hooks.popitem()
        stats = run.stats()
        assert torch.isfinite(out).all()
        assert not torch.equal(out, expected)
        assert seen[0] == case.grid
        places = Counter((r.layer, r.step, r.branch) for r in stats.rows)
        assert set(places.values()) == {1}, "a place was seen twice"
        wanted = {
            (layer, step, branch)
            for layer in range(case.layers)
            for step in range(steps)
            for branch in case.branches
        }
        assert set(places) == wanted
        assert {r.transformer for r in stats.rows} == {"transformer", "transformer_2"} or (
            case.transformers == 1
        )
        assert min(r.tokens for r in stats.rows) >= 1024
        assert stats.dense == {}
        assert stats.cost < 0.6
        # Restored: the same objects, and the same numbers.
        assert all(a is b for a, b in zip(before, processors(pipe), strict=True))
        assert torch.equal(tiny.generate(pipe, case.call()), expected)

    def test_first_steps_and_layer_stay_dense(self, case: Case) -> None:
        pipe = built(case.name)
        method = Schedule(Entropy(), dense_steps=1, dense_layers=(0,))
        handle = jali.apply_sparse_attention(pipe, method, finite="off")
        try:
            tiny.generate(pipe, case.call())
            rows = handle.stats().rows
        finally:
            handle.remove()
        assert {r.reason for r in rows} == {None, "first steps", "layer 0"}
        for row in rows:
            assert (row.reason is None) == (row.step > 0 and row.layer > 0)


def test_qwen_edit_references_have_their_own_grid() -> None:
    model = tiny.qwen_transformer()
    target, reference = (1, 32, 32), (1, 16, 24)
    inputs = {
        "hidden_states": torch.randn(1, 32 * 32 + 16 * 24, 16),
        "encoder_hidden_states": torch.randn(1, 40, 16),
        "encoder_hidden_states_mask": torch.ones(1, 40, dtype=torch.bool),
        "timestep": torch.tensor([0.5]),
        "img_shapes": [[target, reference]],
        "return_dict": False,
        **({"txt_seq_lens": [40]} if tiny.OLD else {}),
    }
    with torch.no_grad():
        expected = model(**inputs)[0]
        with jali.sparse_processor_mode(model, 1.0, warmup_frac=0, dense_first_layer=False):
            out = model(**inputs)[0]
        with jali.sparse_processor_mode(model, 0.3, warmup_frac=0, **SMALL) as run:
            model(**inputs)
            grid = next(iter(run.run.transformers[0].call.grids.values()))
    assert str(grid) == "40 text + 1×32×32 + 1×16×24"
    assert (out - expected).norm() <= 1e-4 * expected.norm()
    assert run.stats().sparse_cost < 0.6


def test_a_processor_with_weights_stays_dense_and_is_named() -> None:
    """An IP-Adapter's processor is a module: replacing it would lose its weights."""
    from diffusers.models.transformers.transformer_flux import FluxIPAdapterAttnProcessor

    pipe = tiny.flux()
    theirs = FluxIPAdapterAttnProcessor(hidden_size=32, cross_attention_dim=32, num_tokens=(4,))
    pipe.transformer.transformer_blocks[0].attn.processor = theirs
    with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=0) as run:
        assert pipe.transformer.transformer_blocks[0].attn.processor is theirs
        assert "transformer layer 0: FluxIPAdapterAttnProcessor" in run.summary()
    assert pipe.transformer.transformer_blocks[0].attn.processor is theirs
