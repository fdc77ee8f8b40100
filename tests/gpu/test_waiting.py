"""The host never waits for the GPU between the layers of a transformer call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import nn

import jali

pytestmark = pytest.mark.gpu

METHODS = {
    "entropy": jali.Entropy(jali.Budget(0.3)),
    "entropy, drawn samples": jali.Entropy(jali.Budget(0.3), seed=3),
    "entropy from means": jali.Entropy(jali.Budget(0.3), means=1),
    "rf_v2": jali.RfV2(sparsity=0.8),
    "ada_bsa": jali.AdaBsa(sparsity=0.8),
    "ada_bsa by share": jali.AdaBsa(cdf_threshold=0.6),
    "psa": jali.Psa(),
    "psa by share": jali.Psa(mode="thresholdbound", importance="surrogate"),
    "psa by similarity": jali.Psa(similarity=(0.1, 0.0, -0.1)),
    "rd": jali.RateDistortion(0.3),
    "rd by price": jali.RateDistortion(price=0.01, keep=0),
    "rd from statistics": jali.RateDistortion(0.3, estimate="statistics", keep=0),
    "rd, mixed": jali.RateDistortion(0.3, estimate="mixed", keep=0),
    "sol": jali.Sol(),
    "sol at a share": jali.Sol(thresh_type="exact", budget=0.3),
    "draft": jali.Draft(),
    "mass": jali.Mass(),
    "mass at a share": jali.Mass(budget=0.3, keep=0),
    "sparge": jali.Sparge(),
    "sparge at a share": jali.Sparge(budget=0.3),
    "sparge by count": jali.Sparge(topk=0.3),
    "radial": jali.Radial(),
    "radial, with a budget": jali.Radial(budget=0.3),
    "sta": jali.Sta(tile_size=(2, 8, 8)),
    "svg": jali.Svg(),
    "svg, with a budget": jali.Svg(budget=0.3),
    "svg2": jali.Svg2(),
    "svg2, with a budget": jali.Svg2(budget=0.3),
    "tail": jali.Entropy(jali.Budget(0.3), tail=True),
    "budgets": jali.Schedule(jali.Entropy(), budgets=(0.5, 0.3)),
    "dense": jali.Schedule(jali.Entropy(), min_tokens=2**62),
}


@contextmanager
def refusing_to_wait(blocks: nn.ModuleList) -> Iterator[None]:
    """Whatever waits for the GPU from the third block on raises. (What the layers of a call share
    is found by the first that are sparse; drawn samples are copied then.)"""

    def begin(*_: object) -> None:
        torch.cuda.set_sync_debug_mode("error")

    def end(*_: object) -> None:
        torch.cuda.set_sync_debug_mode("default")

    hooks = blocks[2].register_forward_pre_hook(begin), blocks[-1].register_forward_hook(end)
    try:
        yield
    finally:
        end()
        for hook in hooks:
            hook.remove()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    diffusers = pytest.importorskip("diffusers")
    torch.manual_seed(0)
    made = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=128, num_layers=5,
        ffn_dim=64, text_dim=16, freq_dim=16, in_channels=4, out_channels=4, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    )  # fmt: skip
    return made.eval().to("cuda", torch.bfloat16)


def step(model: nn.Module, timestep: float) -> torch.Tensor:
    device, dtype = torch.device("cuda"), torch.bfloat16
    with torch.no_grad():
        out: torch.Tensor = model(
            hidden_states=torch.ones(1, 4, 5, 32, 48, device=device, dtype=dtype),
            encoder_hidden_states=torch.ones(1, 8, 16, device=device, dtype=dtype),
            timestep=torch.tensor([timestep], device=device),
            return_dict=False,
        )[0]
    return out


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize("name", METHODS)
def test_layers_never_wait(model: nn.Module, name: str, backend: str) -> None:
    handle = jali.apply_sparse_attention(
        model, jali.Schedule(METHODS[name], dense_layers=(0,)), backend=backend, steps=3
    )
    try:
        step(model, 900.0)  # compiles
        with refusing_to_wait(model.blocks):
            step(model, 600.0)
            out = step(model, 300.0)
        stats = handle.stats()
    finally:
        handle.remove()
    assert torch.isfinite(out).all()
    assert sum(row.reason is None for row in stats.rows) == (0 if name == "dense" else 12)


def test_the_check_can_fail(model: nn.Module) -> None:
    """A layer that waits is found."""
    waits = model.blocks[3].register_forward_hook(lambda *_: torch.ones(1, device="cuda").item())
    try:
        with refusing_to_wait(model.blocks), pytest.raises(RuntimeError, match="synchroniz"):
            step(model, 900.0)
    finally:
        waits.remove()
