"""What one rank does in the tests of several ranks: run as `python ranks.py …`."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import tiny
import torch
import torch.distributed as dist
from test_compile import flux_inputs, ltx_inputs, qwen_inputs, wan_inputs

import jali

MODELS: dict[str, tuple[Callable[[], Any], Callable[[float], dict[str, Any]]]] = {
    "wan": (lambda: tiny.wan_transformer(2, heads=4), wan_inputs),
    "ltx-video": (lambda: tiny.ltx(2, heads=4).transformer, lambda t: unmasked(ltx_inputs(t))),
    "flux": (lambda: flux(), flux_inputs),
    "qwen-image": (lambda: qwen(), qwen_inputs),
}
if not tiny.OLD:
    MODELS["qwen-image, padded text"] = (lambda: qwen(), lambda t: padded(qwen_inputs(t)))


def unmasked(inputs: dict[str, Any]) -> dict[str, Any]:
    """Without masks of text: diffusers' Ulysses keeps those for all heads, and has only some."""
    return {name: None if name.endswith("_mask") else x for name, x in inputs.items()}


def padded(inputs: dict[str, Any]) -> dict[str, Any]:
    """Padding in the middle of the text: a mask of keys, in the order of the ranks."""
    inputs["encoder_hidden_states_mask"][:, 10:15] = False
    return inputs


def flux() -> Any:
    from diffusers import FluxTransformer2DModel

    torch.manual_seed(0)
    return FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8),
    ).eval()  # fmt: skip


def qwen() -> Any:
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16,
        num_attention_heads=4, joint_attention_dim=16, guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    ).eval()  # fmt: skip


def book_of_rd() -> Any:
    """A replayed book for wan, with larger errors in some heads: ranks must agree on a price."""
    from jali.maskbook import Fingerprint, Header, write_book
    from jali.maskbook.cached import Cached
    from jali.maskbook.header import Errors
    from jali.tokens.grid import TokenGrid
    from jali.tokens.layout import Blocks
    from jali.tokens.order import Raster

    header = Header(
        fingerprints={"transformer": Fingerprint("WanTransformer3DModel", "0" * 64)},
        grid=TokenGrid.video(5, 16, 16), order=Raster(), blocks=Blocks(64, 64), layers=2, heads=4,
        noise=(1.0,), noise_kind="sigma", transformers=("transformer",), branches=("mean",),
        prompts=(), importance=False, errors=Errors((2, 4, 8, 0), 1.0),
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    errors = torch.randn(2, *header.slab, generator=g).exp().sort(-1).values
    errors *= torch.tensor([1.0, 30.0, 2.0, 0.1])[:, None, None, None]
    return Cached(write_book(None, header, lambda _, layer: errors[layer]))


def options(method: str) -> dict[str, Any]:
    if method == "dense":
        return {}
    blocks = {"q_block": 64, "k_block": 64} if method in ("entropy", "rd", "sol") else {}
    probes = {"probes": 48} if method == "rd" else {}
    return {"mean_budget": 0.3, "warmup_frac": 0, "dense_first_layer": False, **blocks, **probes}


def once(name: str, method: str) -> torch.Tensor:
    """The result of one rank alone."""
    build, inputs = MODELS[name]
    model = build()
    with torch.no_grad(), jali.sparse_processor_mode(model, method=method, **options(method)):
        out: torch.Tensor = model(**inputs(600.0))[0]
    return out


def parallel(name: str, method: str, order: str, **config: Any) -> tuple[torch.Tensor, Any]:
    """The result of all ranks together."""
    from diffusers import ContextParallelConfig

    build, inputs = MODELS[name]
    model = build()
    config = config or {"ulysses_degree": dist.get_world_size()}
    if order == "before":
        model.enable_parallelism(config=ContextParallelConfig(**config))
    with (
        torch.no_grad(),
        jali.sparse_processor_mode(model, method=method, **options(method)) as run,
    ):
        if order == "after":
            model.enable_parallelism(config=ContextParallelConfig(**config))
        out: torch.Tensor = model(**inputs(600.0))[0]
    return out, run.stats()


def compiled(name: str, method: str) -> torch.Tensor:
    """The result of all ranks together, blocks compiled. Not as one graph each: diffusers' own
    hooks, which split and gather the sequence, cannot be traced."""
    from diffusers import ContextParallelConfig

    build, inputs = MODELS[name]
    model = build()
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    torch.compiler.reset()
    with (
        torch.no_grad(),
        jali.sparse_processor_mode(model, method=method, **options(method)) as run,
    ):
        model.compile_repeated_blocks(backend="aot_eager")
        out: torch.Tensor = model(**inputs(600.0))[0]
        out = model(**inputs(600.0))[0]
    assert run.stats().dense == {}, run.stats().dense
    return out


def tensor_parallel(name: str, method: str) -> torch.Tensor:
    """The result of ranks that hold some heads of every layer each."""
    from diffusers import TensorParallelConfig
    from diffusers.hooks import tensor_parallel

    tensor_parallel._SUPPORTED_TP_DEVICES = ("cpu",)
    build, inputs = MODELS[name]
    model = build()
    model.enable_parallelism(config=TensorParallelConfig(tp_degree=dist.get_world_size()))
    with torch.no_grad(), jali.sparse_processor_mode(model, method=method, **options(method)):
        out: torch.Tensor = model(**inputs(600.0))[0]
    return out


def diffusers_fails(build: Any, inputs: Any) -> None:
    """What jali cannot do among ranks because the stock model already fails there."""
    from diffusers import ContextParallelConfig

    model = build()
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=dist.get_world_size()))
    wrong = "doesn't match|must match|not yet supported"  # the last is 0.36, which says so itself
    with torch.no_grad(), pytest.raises((RuntimeError, ValueError), match=wrong):
        model(**inputs(600.0))


def main(rank: int, ranks: int, store: str) -> None:
    # diffusers asks for an accelerator; on a CPU it gets the CPU.
    torch._C._get_accelerator = lambda *_: torch.device("cpu")  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: ranks  # type: ignore[assignment]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    for name in MODELS:
        for method, order in (
            ("entropy", "before"), ("rd", "before"), ("sol", "before"), ("rf_v2", "after"),
            ("dense", "after"),
        ):  # fmt: skip
            expected = once(name, method)
            out, stats = parallel(name, method, order)
            worst = float((out - expected).norm() / expected.norm())
            assert worst < 1e-5, f"{name}, {method}: {worst}"
            if method != "dense":
                assert stats.dense == {}, stats.dense
                assert stats.cost < 0.7, stats.cost
    replay = book_of_rd()
    expected, (out, stats) = once("wan", replay), parallel("wan", replay, "before")
    worst = float((out - expected).norm() / expected.norm())
    assert worst < 1e-5, f"wan, a book of rd: {worst}"
    assert ranks > 2 or abs(stats.cost - 0.3) > 0.1, stats.cost  # of this rank's heads alone
    for name in ("wan", "ltx-video", "flux", "qwen-image"):
        expected = once(name, "entropy")
        worst = float((compiled(name, "entropy") - expected).norm() / expected.norm())
        assert worst < 1e-5, f"{name}, compiled: {worst}"
    for name in () if tiny.OLD else ("flux", "qwen-image"):
        for method in ("entropy", "rd", "rf_v2"):
            expected = once(name, method)
            out = tensor_parallel(name, method)
            worst = float((out - expected).norm() / expected.norm())
            assert worst < 1e-5, f"{name}, {method}, tensor parallel: {worst}"
    refused: list[dict[str, Any]] = [{"ring_degree": ranks}]
    if not tiny.OLD:
        refused.append({"ulysses_degree": ranks, "ulysses_anything": True})
    for config in refused:
        with pytest.raises(ValueError, match="jali does not do"):
            parallel("wan", "entropy", "before", **config)
        with pytest.raises(ValueError, match="jali does not do"):
            parallel("wan", "entropy", "after", **config)
    diffusers_fails(lambda: tiny.ltx(1, heads=4).transformer, ltx_inputs)
    if not tiny.OLD:
        diffusers_fails(
            lambda: tiny.ltx2_transformer(1, heads=4),
            lambda t: unmasked(tiny.ltx2_inputs(t)),
        )
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
