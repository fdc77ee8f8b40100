"""`jali inspect`: captured calls are the model's own, and scores are what they say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("diffusers")

import tiny

from jali import BlockPlan, Gilbert, Psa, Raster, attend, backends, block_layout
from jali.backends import Task
from jali.backends.torch import Torch
from jali.evaluation.inspection import (
    Capture,
    JudgedCall,
    MethodScore,
    capture,
    judge,
    ranking,
    sentences,
    verdict,
    what_is_left,
)
from jali.evaluation.inspection.judge import (
    PAIRS,
    _ExactAttention,
    _heaviest,
    _ReadMass,
    exact_map,
    planned,
    too_costly,
)
from jali.generation import Settings
from jali.methods import METHODS, make_method
from jali.planning.plan import full_plan
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
        blocks, levels = plan.blocks, torch.empty_like(weights, dtype=torch.uint8)
        for head in range(3):  # a head may have an order of its own
            read = plan.levels.expand(1, 3, -1, -1)[0, head]
            rows, keys = plan.query_tokens(head).argsort(), plan.key_tokens(head).argsort()
            levels[0, head] = read[rows // blocks.q][:, keys // blocks.k]
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


@st.composite
def calls_with_plans(draw: st.DrawFn) -> tuple[Capture, BlockPlan]:
    """Any sizes and orders, so blocks are short and mixed, and heads and rows read unevenly."""
    grid = TokenGrid.video(draw(st.integers(1, 4)), 5, 9, text=draw(st.sampled_from([0, 7])))
    S, g = grid.tokens, torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    q, k, v = (torch.randn(1, 2, S, 8, generator=g) * draw(st.sampled_from([1, 4]))
               for _ in range(3))  # fmt: skip
    length = draw(st.none() | st.integers(1, S))
    padding = None if length is None else KeyPadding.of_lengths((length,), torch.device("cpu"))
    order, blocks = draw(st.sampled_from([Raster(), Gilbert()])), Blocks(24, 16)
    layout = block_layout(grid, None, order, blocks)
    values = torch.tensor(draw(st.sampled_from([[0, 1], [0, 0, 1, 2, 8]])))
    levels = values[torch.randint(0, len(values), (1, 2, layout.M, layout.N), generator=g)]
    levels[..., 0] = 1
    heaviest = draw(st.booleans())
    call = Capture(Site(), grid, q, k, v, padding, 8**-0.5)
    if heaviest:  # as a plan that knows would choose, and more for one head
        exact = _ExactAttention(call, S)
        blank = BlockPlan(layout, (1,), map=torch.ones(1, 1, layout.M, layout.N, dtype=torch.uint8))
        looks = torch.stack([exact.block_map(head, blank) for head in range(2)])[None]
        levels = ((looks > 0.05) | (looks >= looks.amax(-1, keepdim=True))).long()
    plan = BlockPlan.from_levels(levels, layout)
    return call, replace(plan, padding=padding and padding.arranged(layout.k))


@given(calls_with_plans(), st.integers(1, 60))
@hypothesis.settings(max_examples=60, deadline=None)
def test_nothing_is_read_in_full_beyond_the_bound(
    found: tuple[Capture, BlockPlan], rows: int
) -> None:
    """Short blocks, padding, pooled levels, and heads and queries that share unevenly."""
    call, plan = found
    exact = _ExactAttention(call, rows)
    read = _ReadMass.of(exact, plan, 2)
    assert float(read.full.mean()) <= read.bound * (1 + 1e-9)
    assert read.bound <= 1 + 1e-6
    assert (read.full <= read.touched).all()
    everything = replace(full_plan(plan.layout), padding=plan.padding)
    assert _ReadMass.of(exact, everything, 2).bound == pytest.approx(1, abs=1e-5)


def test_the_bound_is_that_of_the_best_blocks() -> None:
    """By trying all of them: two queries, four blocks of keys, the last one short."""
    mass = torch.tensor([[0.5, 0.2, 0.2, 0.1], [0.1, 0.1, 0.1, 0.7]], dtype=torch.float64)
    keys = torch.tensor([4.0, 4.0, 4.0, 1.0]).double().expand(2, 4)
    for room in range(27):
        best = max(
            float((mass.flatten() * chosen).sum())
            for chosen in torch.cartesian_prod(*[torch.tensor([0.0, 1.0]).double()] * 8)
            if float((keys.flatten() * chosen).sum()) <= room
        )
        found = _heaviest(mass.flatten(), keys.flatten(), room)
        assert best - 1e-9 <= found <= best + 0.5 * (3 / 4)
    assert _heaviest(mass.flatten(), keys.flatten(), 5) == pytest.approx(0.7 + 0.5)


def test_scores_stay_below_their_bounds() -> None:
    (found,) = judge([call_of(text=41)], 0.5, ["entropy", "random", "psa"])
    for score in found.scores:
        assert 0 < score.mass_full <= score.bound <= found.bound <= 1 + 1e-6


def test_what_can_be_reached_is_beside_the_methods_and_not_among_them() -> None:
    call = call_of()
    (found,) = judge([call], 0.3, ["rd", "random"])
    reachable = found.reachable
    assert reachable is not None
    assert (reachable.rows, reachable.of, str(reachable)) == (128, 128, "all rows seen")
    assert [name for name, _, _ in ranking([found])] == ["rd", "random"]
    assert set(found.plans) == {"rd", "random"}
    errors = {own.method: own.error for own in found.scores}
    assert reachable.score.error < errors["random"]
    # Rows that planned are not all of those that are judged: a few samples cannot beat all by much.
    assert reachable.score.error < errors["rd"] * 1.02
    assert abs(reachable.score.cost - 0.3) < 0.02
    said = what_is_left([found])
    assert said is not None
    assert said.startswith(f"all rows seen: error {reachable.score.error:.1%}")


def test_on_large_calls_fewer_rows_are_seen_and_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PAIRS, "cpu", 3 * 1024 * 1024 // 8)
    (found,) = judge([call_of()], 0.3, ["random"])
    assert str(found.reachable) == "16 of 128 rows seen"
    monkeypatch.setitem(PAIRS, "cpu", 1)
    (found,) = judge([call_of()], 0.3, ["random"])
    assert str(found.reachable) == "4 of 128 rows seen"
    said = what_is_left([found])
    assert said is not None
    assert said.startswith("4 of 128 rows seen: error ")
    assert "with all of them it would be less" in said


def score(method: str, errors: list[float], always: float = 0.1, cost: float = 0.25) -> MethodScore:
    heads = tuple((0.25, 0.5, error) for error in errors)
    return MethodScore(method, 0.25, cost, cost, 0.5, 0.5, 0.6, fmean(errors), always, heads)


def judged_of(*scores: MethodScore) -> list[JudgedCall]:
    return [JudgedCall(call_of(), 0.25, (0.1,), scores, {})]


CLEAR, NOISY = [0.1, 0.11, 0.1, 0.12], [0.05, 0.3, 0.1, 0.4]


@pytest.mark.parametrize(
    ("scores", "winner", "words"),
    [
        # The same plan has the same errors: a tie, in whichever order they stand.
        ([("entropy", CLEAR), ("random", CLEAR)], None, "a tie: entropy"),
        ([("random", CLEAR), ("entropy", CLEAR)], None, "not ahead of entropy"),
        ([("psa", [0.05, 0.05, 0.05, 0.07]), ("entropy", CLEAR), ("random", [0.3] * 4)], "psa",
         "nearest to dense here: psa, error 5.5%"),
        # Better on the mean, by one head.
        ([("psa", [0.01, 0.12, 0.11, 0.12]), ("random", CLEAR)], None, "by more than the spread"),
        ([("psa", [0.05] * 4), ("rf_v2", [0.051, 0.049, 0.06, 0.05]), ("random", NOISY)], None,
         "not ahead of rf_v2, random"),
        ([("local", [0.01] * 4), ("psa", CLEAR)], "local", "no method found anything"),
        ([("psa", CLEAR)], None, None),
        ([("psa", [0.1, 0.1]), ("random", [0.2, 0.3])], None, "over 2 heads"),  # too few to tell
    ],
)  # fmt: skip
def test_a_winner_is_ahead_of_all_others(
    scores: list[tuple[str, list[float]]], winner: str | None, words: str | None
) -> None:
    judged = judged_of(*(score(*one) for one in scores))
    assert verdict(judged).winner == winner
    said = sentences(judged)
    assert (words is None and not said) or words in said[0]


def test_what_costs_too_much_wins_nothing() -> None:
    judged = judged_of(
        score("rf_v2", [0.01] * 4, cost=0.6), score("psa", CLEAR), score("random", NOISY)
    )
    assert verdict(judged).first == "psa"


def test_where_nothing_is_left_to_choose_nobody_wins() -> None:
    """Of 960 tokens a query block's own blocks are a quarter of all."""
    grid = TokenGrid.video(4, 12, 20)
    g = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 4, 960, 32, generator=g) for _ in range(3))
    call = Capture(Site(2, 4, 1, 3), grid, q, k, v, None, 32**-0.5)
    judged = list(judge([call], 0.25, ["entropy", "random"]))
    assert judged[0].scores[0].heads == judged[0].scores[1].heads
    found = verdict(judged)
    assert (found.winner, set(found.unfree)) == (None, {"entropy", "random"})
    (said,) = sentences(judged)
    assert said.startswith("a cost of 0.25 leaves no choice to any method at 960 tokens")
    assert "costs 0.253 or more" in said
    # One that can choose is named, and so are those that could not.
    mixed = judged_of(
        score("psa", [0.01] * 4), score("entropy", CLEAR, 0.25), score("random", CLEAR)
    )
    assert verdict(mixed).winner == "psa"
    assert [words.split(" at ")[0] for words in sentences(mixed)[1:]] == [
        "a cost of 0.25 leaves no choice to entropy"
    ]


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
    call.k[:, :, 1000:], call.v[:, :, 1000:] = torch.nan, torch.inf
    (again,) = judge([call], 0.4, ["entropy", "rf_v2"])
    assert again.scores == found.scores


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
    assert "all rows seen: error" in done.stdout
    data = json.loads((folder / "inspection.json").read_text())
    assert data["kind"] == "jali-inspection"
    assert [row["method"] for row in data["calls"][0]["methods"]] == ["psa", "random"]
    assert data["calls"][0]["reachable"]["rows"] == 128
    assert (folder / "inspection.png").read_bytes()[:4] == b"\x89PNG"
    told = json.loads(
        jali("inspect", *small, "--methods=psa,random", "--at-layers=1", "--cost=0.5", "--json",
             "--output-dir", folder).stdout
    )  # fmt: skip
    assert told["ranking"] == data["ranking"]
    assert told["winner"] in ("psa", "random", None)
    assert (told["winner"] or "tie" if told["verdict"]["equals"] else "choice") in done.stdout


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
