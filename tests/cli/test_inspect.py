"""`jali inspect`: captured calls are the model's own, and scores are what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("diffusers")

import tiny

from jali import Psa, attend, backends
from jali.backends import Task
from jali.backends.torch import Torch
from jali.evaluation.inspection import Capture, capture, judge, ranking
from jali.evaluation.inspection.judge import _ExactAttention, exact_map, planned, too_costly
from jali.generation import Settings
from jali.methods import METHODS, make_method
from jali.planning.site import Site
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding

Jali = Callable[..., Any]


def call_of(kind: str = "structured", text: int = 0, padding: KeyPadding | None = None) -> Capture:
    """One call with heads that look near, far and everywhere."""
    grid = TokenGrid.video(4, 16, 16, text=text)
    g = torch.Generator().manual_seed(0)
    S = grid.tokens
    place = torch.linspace(0, 12, S)[:, None] * torch.arange(1, 17)
    waves = torch.cat([place.cos(), place.sin()], -1)
    q, k, v = (torch.randn(1, 3, S, 32, generator=g) for _ in range(3))
    if kind == "structured":
        q[:, 0], k[:, 0] = 4 * waves, 4 * waves
        q[:, 1] = k[:, 1] * 3
        q[:, 2] *= 0.1
    return Capture(Site(2, 4, 1, 3), grid, q, k, v, padding, 32**-0.5)


def test_captured_calls_are_the_models_own() -> None:
    pipe = tiny.wan(layers=4)
    settings = Settings(
        "wan-t2v-1.3b", height=64, width=64, num_frames=9, steps=4, device="cpu", method="dense",
        arguments={"max_sequence_length": 16},
    ).resolve()  # fmt: skip
    seen: dict[int, torch.Tensor] = {}
    attn = pipe.transformer.blocks[2].attn1
    hook = attn.to_out[0].register_forward_hook(
        lambda _module, given, _out: seen.update({len(seen): given[0]})
    )
    found = capture(pipe, settings, "a cat", layers=[2, 3], steps=[1, 2])
    hook.remove()
    assert [(c.site.step, c.site.layer) for c in found] == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert {c.site.branch for c in found} == {"cond"}
    assert str(found[0].grid) == "3×4×4"
    # What the model itself computed with them: calls are cond, uncond, cond, … of steps 0, 1, 2.
    for at, place in ((0, 2), (2, 4)):
        c = found[at]
        own = F.scaled_dot_product_attention(c.q, c.k, c.v, scale=c.scale)
        expected = seen[place]
        torch.testing.assert_close(own.transpose(1, 2).flatten(2), expected, rtol=1e-4, atol=1e-5)
    assert len(seen) == 5  # the generation ended with the last call that was wanted
    assert type(attn.processor).__name__ == "WanAttnProcessor"
    default = capture(pipe, settings, "a cat")
    assert [(c.site.step, c.site.layer) for c in default] == [(2, 1), (2, 2), (2, 3)]
    for wrong, words in (({"layers": [4]}, "layers 0 to 3"), ({"steps": [4]}, "0 to 3, got 4")):
        with pytest.raises(ValueError, match=words):
            capture(pipe, settings, "a cat", **wrong)  # type: ignore[arg-type]


def test_verdicts_are_what_they_say() -> None:
    """Against everything written out, for every query instead of some."""
    call = call_of()
    (found,) = judge([call], 0.3, rows=10_000)
    weights = (call.q @ call.k.transpose(2, 3) * call.scale).softmax(-1)
    dense = weights @ call.v
    entropy = -(weights * weights.clamp_min(1e-30).log()).sum(-1)
    spread = (entropy.exp().mean(-1) / weights.shape[-1])[0]
    torch.testing.assert_close(torch.tensor(found.spread), spread, rtol=1e-4, atol=1e-5)
    assert spread[2] > 0.9 > 0.2 > spread[0]
    from jali.attend import attend

    for score in found.scores:
        plan = found.plans[score.method]
        layout, blocks = plan.layout, plan.blocks
        slots = torch.arange(layout.k.tokens) if layout.k.inverse is None else layout.k.inverse
        levels = plan.levels.expand(1, 3, -1, -1)[:, :, slots // blocks.q][..., slots // blocks.k]
        assert score.mass == pytest.approx(float((weights * (levels > 0)).sum(-1).mean()), abs=1e-4)
        assert score.mass_full == pytest.approx(
            float((weights * (levels == 1)).sum(-1).mean()), abs=1e-4
        )
        method = make_method(score.method).with_budget(score.budget)
        out = attend(call.q, call.k, call.v, method=method, grid=call.grid, site=call.site).out
        error = float((out - dense).norm() / dense.norm())
        assert score.error == pytest.approx(error, rel=1e-3)
        assert score.cost == pytest.approx(plan.cost)
        assert len(score.heads) == 3


def test_costs_are_equal_or_said_not_to_be() -> None:
    (found,) = judge([call_of()], 0.3)
    assert {v.method for v in found.scores} == set(METHODS) - {"dense"}
    dear = too_costly([found])
    for score in found.scores:
        # Eight blocks of keys: a step of cost is an eighth.
        assert abs(score.cost - 0.3) < 0.0626 or score.method in dear, score
    order = [name for name, _, _ in ranking([found])]
    assert set(order[len(order) - len(dear) :]) == dear
    errors = {v.method: v.error for v in found.scores}
    fair = [name for name in order if name not in dear]
    assert [errors[name] for name in fair] == sorted(errors[name] for name in fair)
    assert errors["entropy"] < errors["random"]  # it looks, and that pays


def test_no_full_blocks_hold_more_than_the_bound() -> None:
    call = call_of()
    (found,) = judge([call], 0.25, ["entropy", "random"], rows=10_000)
    for score in found.scores:
        if score.cost <= 0.25 + 1e-6:
            assert score.mass_full <= found.bound + 1e-4
    everything = _ExactAttention(call, 64).bound(0.999999, 128)
    assert everything == pytest.approx(1, abs=1e-3)


def test_padding_is_not_attention() -> None:
    call = call_of(text=64, padding=KeyPadding.of_lengths((1000,), torch.device("cpu")))
    exact = _ExactAttention(call, 32)
    assert float(exact.weights(0)[:, 1000:].sum()) == 0
    mask = torch.ones(1, 1088, dtype=torch.bool)
    mask[:, 1000:] = False
    masked = call_of(text=64, padding=KeyPadding(mask=mask))
    torch.testing.assert_close(exact.weights(1), _ExactAttention(masked, 32).weights(1))
    (found,) = judge([call], 0.4, ["entropy", "rf_v2"])
    assert all(0 < v.error < 1 for v in found.scores)


class LengthsOnly(Torch):
    """As FlashAttention-4: it knows lengths of keys, no masks, and runs larger blocks."""

    name: ClassVar[str] = "lengths only"

    def why_not(self, task: Task) -> list[str]:
        return ["takes no mask of keys"] if task.padding == "mask" else []

    def fitting(self, blocks: Blocks, task: Task) -> Blocks:  # noqa: ARG002
        return Blocks(4 * blocks.q, 4 * blocks.k)


def test_what_is_judged_is_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """An order may scatter the padding; then the backend is chosen again, here as in `attend`."""
    monkeypatch.setattr(backends, "BACKENDS", {"lengths only": LengthsOnly(), "torch": Torch()})
    for cache in (backends._fastest, backends._reasons):
        cache.cache_clear()
    lengths = torch.tensor([700])
    call = call_of(padding=KeyPadding(length=lengths.int(), host=(700,)))
    try:
        plan = planned(Psa(), call)
        ran = attend(
            call.q, call.k, call.v, method=Psa(), grid=call.grid, site=call.site, scale=call.scale,
            key_length=lengths,
        )  # fmt: skip
    finally:
        for cache in (backends._fastest, backends._reasons):
            cache.cache_clear()
    assert ran.backend == "torch"
    assert ran.executed is not None
    assert plan.blocks == ran.executed.blocks
    assert torch.equal(plan.levels, ran.executed.levels)


def test_the_map_is_where_a_head_looks() -> None:
    call = call_of()
    plan = planned(make_method("local").with_budget(0.3), call)
    found = exact_map(call, 0, plan)
    assert found.shape == (plan.layout.M, plan.layout.N)
    torch.testing.assert_close(found.sum(-1), torch.ones(plan.layout.M))


def test_the_command(jali: Jali, small: tuple[str, ...], tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "i"
    done = jali("inspect", *small, "--methods=psa,random", "--at-layers=1", "--cost=0.5",
                "--output-dir", folder)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    assert "layer 1, step 1" in done.stdout
    data = json.loads((folder / "inspection.json").read_text())
    assert data["kind"] == "jali-inspection"
    assert [row["method"] for row in data["calls"][0]["methods"]] == ["psa", "random"]
    assert (folder / "inspection.png").read_bytes()[:4] == b"\x89PNG"
    told = json.loads(
        jali("inspect", *small, "--methods=psa,random", "--at-layers=1", "--cost=0.5", "--json",
             "--output-dir", folder).stdout
    )  # fmt: skip
    assert told["ranking"] == data["ranking"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--cost=1"], "--cost must be above 0 and below 1, got 1.0"),
        (["--methods=nothing"], "unknown method 'nothing'"),
        (["--at-layers=x"], "--at-layers are whole numbers"),
        (["--at-layers=9"], "this model has the layers 0 to 1, got 9"),
        (["--at-steps=9"], "steps count from 0 to 2, got 9"),
    ],
)
def test_bad_input(
    words: list[str], sentence: str, jali: Jali, small: tuple[str, ...], tmp_path: Path
) -> None:
    done = jali("inspect", *small, *words, "--output-dir", tmp_path / "i")
    assert done.exit_code == 2
    assert sentence in done.stderr
    assert not (tmp_path / "i").exists()
