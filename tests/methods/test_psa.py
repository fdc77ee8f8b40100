"""PSA: both rules against plain loops, ranges, the cap, the step axis, budgets, pooled levels."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jali import BlockPlan, Blocks, Gilbert, Psa, Raster, Site, TokenGrid, attend, block_layout
from jali.backends import BACKENDS
from jali.methods import sampling
from jali.methods.psa import nominal_cost
from jali.methods.sampling import jittered_positions
from jali.planning.plan import RATIOS
from jali.planning.scoring import key_similarity
from jali.planning.selection import align_ends, cumulative_ends, levels_by_rank, ranks
from jali.tokens.padding import KeyPadding
from oracle import best_first, blocks_of, peak_importance, pooled_attention, psa_levels, tensors

LEVELS = {1: (0.0, 0.2), 2: (0.2, 0.35), 4: (0.35, 0.6), 8: (0.6, 0.8), 0: (0.8, 1.0)}
SITE = Site(3, 10, 2, 4)


@pytest.mark.parametrize("mode", ["topk", "thresholdbound"])
@pytest.mark.parametrize("importance", ["softmax", "surrogate"])
@pytest.mark.parametrize("tokens", [157, 320])
def test_both_rules_against_loops(mode: str, importance: str, tokens: int) -> None:
    grid = TokenGrid.flat(tokens)
    q, k, v = tensors(grid, H=2, dtype=torch.float64, spread=1.0)
    method = Psa(
        LEVELS, mode, importance=importance, q_block=32, k_block=16, order=Raster(), seed=5
    )
    plan = attend(q, k, v, method=method, grid=grid, site=SITE).plan
    assert plan is not None
    q_picks, k_picks = (
        jittered_positions(tokens, block, block // 4, 5, SITE, q.device).tolist()
        for block in (32, 16)
    )
    for h in range(2):
        scores = peak_importance(q[0, h], k[0, h], q_picks, k_picks, 0.25, importance == "softmax")
        for m in range(plan.layout.M):
            own = {t // 16 for t in range(32 * m, min(32 * m + 32, tokens))}
            forced = [j in own for j in range(plan.layout.N)]
            wanted = psa_levels(scores[m].tolist(), forced, LEVELS, mode, 0.06)
            assert plan.levels[0, h, m].tolist() == wanted


@pytest.mark.parametrize("mode", ["topk", "thresholdbound"])
@pytest.mark.parametrize("k_block", [32, 64, 128])
@pytest.mark.parametrize("keys", [1, 7, 10, 23, 61])
def test_aligned_levels_against_loops(
    mode: str, k_block: int, keys: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles at every level, over a row's own blocks and over keys that have none."""
    tokens, given = keys * k_block - 5, torch.Generator().manual_seed(keys)
    _, k, v = tensors(tokens, D=4)
    for q_tokens in (tokens, 70):
        q, _, _ = tensors(q_tokens, D=4)
        scores = torch.rand(1, 2, -(-q_tokens // 64), keys, generator=given, dtype=torch.float64)
        scores = scores.pow(6) / scores.pow(6).sum(-1, keepdim=True)
        monkeypatch.setattr("jali.methods.psa.peak_scores", lambda *_, scores=scores: scores)
        method = Psa(LEVELS, mode, q_block=64, k_block=k_block, order=Raster(), aligned=True)
        plan = attend(q, k, v, method=method).plan
        assert plan is not None
        for h, m in itertools.product(range(2), range(plan.layout.M)):
            row, forced = scores[0, h, m].tolist(), plan.layout.forced[m].tolist()
            wanted = psa_levels(row, forced, LEVELS, mode, 0.06, k_block)
            wanted = wanted if any(wanted) else [1, *wanted[1:]]  # no row reads nothing
            assert plan.levels[0, h, m].tolist() == wanted
            if not any(forced):
                assert all(wanted.count(r) * k_block // r % 32 == 0 for r in RATIOS)


def test_a_level_rounds_up_or_down_at_the_end() -> None:
    ends = torch.tensor([[3, 4, 7, 9], [1, 1, 10, 10], [0, 0, 0, 0], [10, 10, 10, 10]])
    # Levels of 3, 1, 3, 2 blocks in multiples of 1, 2, 4, 8: 3, 2, 4, and 1 is left to none.
    assert align_ends(ends, (1, 2, 4, 8), 10).tolist() == [
        [3, 5, 9, 9], [1, 1, 9, 9], [0, 0, 0, 0], [10, 10, 10, 10],
    ]  # fmt: skip
    assert torch.equal(align_ends(ends, (1, 1, 1, 1), 10), ends)


def test_what_cannot_be_aligned() -> None:
    with pytest.raises(ValueError, match="whole tiles of 32 keys, got k_block=16"):
        Psa(k_block=16, aligned=True)
    with pytest.raises(ValueError, match="with axis='step' there are none"):
        Psa(axis="step", aligned=True)
    with pytest.raises(TypeError, match="aligned must be a bool, got 'yes'"):
        Psa(aligned="yes")  # type: ignore[arg-type]
    assert Psa(aligned=True).with_budget(0.3).aligned


def test_samples_of_a_step_are_drawn_once_for_all_layers() -> None:
    """A copy to a GPU for every layer would wait for the GPU in every layer."""
    sampling._of_all_layers.cache_clear()
    cpu = torch.device("cpu")
    picks = [
        jittered_positions(1000, 64, 16, 0, Site(2, 5, layer, 30, branch), cpu)
        for branch in ("cond", "uncond")
        for layer in range(30)
    ]
    assert sampling._of_all_layers.cache_info().misses == 1
    assert all(torch.equal(a, b) for a, b in zip(picks[:30], picks[30:], strict=True))
    assert not any(torch.equal(picks[0], pick) for pick in picks[1:30])


def test_samples_lie_in_their_blocks_and_differ_between_blocks() -> None:
    picks = jittered_positions(1000, 64, 16, 0, SITE, torch.device("cpu"))
    assert picks.shape == (16, 16)
    for m, row in enumerate(picks.tolist()):
        block = range(64 * m, min(64 * m + 64, 1000))
        assert all(t in block for t in row)
        if len(block) == 64:
            assert len(set(row)) == 16, "without replacement"
    offsets = picks[:15] - 64 * torch.arange(15)[:, None]
    assert len({tuple(row) for row in offsets.tolist()}) > 1


def levels_of(
    importance: list[float], ranges: dict[int, tuple[float, float]], floor: float
) -> list[int]:
    """thresholdbound for one row, through jali's own selection."""
    scores = torch.tensor(importance, dtype=torch.float64)[None, None, None]
    rank = ranks(scores)
    reading = [r for r in sorted(ranges) if r]
    least = min(len(importance), int(floor * len(importance)) + 1)
    ends = cumulative_ends(scores, rank, tuple(ranges[r][1] for r in reading), least)
    return levels_by_rank(rank, ends, tuple(reading))[0, 0, 0].tolist()


def test_the_block_that_crosses_a_bound_is_included() -> None:
    # Cumulative .4, .7, .9, 1: the bound .5 lies inside block 1, .75 inside block 2.
    ranges = {1: (0, 0.5), 2: (0.5, 0.75), 0: (0.75, 1.0)}
    assert levels_of([0.4, 0.3, 0.2, 0.1], ranges, 0.0) == [1, 1, 2, 0]


def test_a_bound_below_the_first_block_is_empty_but_for_the_floor() -> None:
    """One block at 90 % of 20: ratio 1 gets the floor's two blocks, all others are skipped."""
    importance = [0.9] + [0.1 / 19] * 19
    ranges = {1: (0, 0.4), 2: (0.4, 0.5), 4: (0.5, 0.6), 8: (0.6, 0.8), 0: (0.8, 1.0)}
    assert levels_of(importance, ranges, 0.06) == [1, 1] + [0] * 18


@pytest.mark.parametrize(
    ("N", "floor", "least"), [(20, 0.06, 2), (100, 0.06, 7), (3, 0.06, 1), (10, 0.5, 6)]
)
def test_the_floor_counts_blocks_at_ratio_one(N: int, floor: float, least: int) -> None:
    importance = [0.99] + [0.01 / (N - 1)] * (N - 1)
    found = levels_of(importance, {1: (0, 0.1), 8: (0.1, 0.2), 0: (0.2, 1)}, floor)
    assert found.count(1) == least
    q, k, v = tensors(N * 16, spread=30.0)
    method = Psa(
        {1: (0, 0.01), 0: (0.01, 1)}, "thresholdbound", floor=floor, q_block=16, k_block=16,
        order=Raster(),
    )  # fmt: skip
    plan = attend(q, k, v, method=method).plan
    assert plan is not None
    assert int((plan.levels == 1).sum(-1).min()) >= least


def test_without_ratio_one_the_floor_is_still_one_of_ratio_one() -> None:
    q, k, v = tensors(320)
    method = Psa({2: (0, 0.5), 0: (0.5, 1)}, "thresholdbound", q_block=16, k_block=16, floor=0.2)
    plan = attend(q, k, v, method=method).plan
    assert plan is not None
    assert int((plan.levels == 1).sum(-1).min()) >= 5


def test_ranges_are_unordered_and_any_subset() -> None:
    a = Psa({0: (0.5, 1), 8: (0.2, 0.5), 1: (0, 0.2)})
    b = Psa({1: (0, 0.2), 8: (0.2, 0.5), 0: (0.5, 1)})
    c = Psa({1: [0, 0.2], 8: [0.2, 0.5]})  # type: ignore[dict-item]
    assert a == b
    assert hash(a) == hash(b)
    q, k, v = tensors(640)
    plans = [attend(q, k, v, method=m).plan.levels for m in (a, b, c)]  # type: ignore[union-attr]
    assert torch.equal(plans[0], plans[1])
    assert torch.equal(plans[0], plans[2])


def test_similarity_is_one_of_real_keys() -> None:
    k = torch.ones(1, 1, 64, 8)
    layout = block_layout(TokenGrid.flat(64), blocks=Blocks(32, 16))
    real = torch.ones(1, 64, dtype=torch.bool)
    real[:, 5], real[:, 20:] = False, False
    k.masked_fill_(~real[:, None, :, None], torch.nan)
    found = key_similarity(k, layout, 4, KeyPadding(mask=real))
    # Three whole groups; the one whole group of a block of four; none.
    torch.testing.assert_close(found, torch.tensor([[[1.0, 1, -1, -1]]]))


@pytest.mark.parametrize("k_block", [16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [511, 512, 613])
def test_similarity_caps_the_ratio(k_block: int, tokens: int) -> None:
    """Cosine of the first and last key of each group, for every block size."""
    k = torch.randn(1, 2, tokens, 8, dtype=torch.float64)
    k[:, :, 100:300] = k[:, :, 100:101] + 0.3 * k[:, :, 100:300]
    layout = block_layout(TokenGrid.flat(tokens), blocks=Blocks(128, k_block))
    for ratio in (2, 4, 8):
        found = key_similarity(k, layout, ratio)
        for h in range(2):
            for n, block in enumerate(blocks_of(tokens, k_block)):
                cosines = [
                    float(torch.cosine_similarity(k[0, h, t], k[0, h, t + ratio - 1], dim=0))
                    for t in range(block.start, block.stop - ratio + 1, ratio)
                ]
                wanted = sum(cosines) / len(cosines) if cosines else -1
                assert float(found[0, h, n]) == pytest.approx(wanted, abs=1e-6)
    method = Psa(
        {1: (0, 0.05), 8: (0.05, 0.9), 0: (0.9, 1)}, similarity=(0.5, 0.4, 0.3), q_block=128,
        k_block=k_block, order=Raster(),
    )  # fmt: skip
    q = torch.randn_like(k)
    plain = attend(q, k, k, method=Psa(method.ranges, q_block=128, k_block=k_block, order=Raster()))
    capped = attend(q, k, k, method=method)
    assert plain.plan is not None
    assert capped.plan is not None
    cap = torch.ones(1, 2, layout.N, dtype=torch.uint8)
    for ratio, threshold in zip((2, 4, 8), (0.5, 0.4, 0.3), strict=True):
        cap[key_similarity(k, layout, ratio) > threshold] = ratio
    assert torch.equal(capped.plan.levels, plain.plan.levels.minimum(cap[:, :, None]))
    assert torch.equal(capped.plan.levels == 0, plain.plan.levels == 0), "skips stay skips"


def test_steps_as_the_axis() -> None:
    """PSA's README reading: at a step, every block has the level whose range holds the step."""
    ranges = {1: (0, 0.4), 2: (0.4, 0.6), 8: (0.6, 0.8), 0: (0.8, 1)}
    method = Psa(ranges, axis="step", q_block=16, k_block=16)
    q, k, v = tensors(320)
    for step in range(10):
        plan = attend(q, k, v, method=method, site=Site(step, 10)).plan
        assert plan is not None
        wanted = 1 if step < 4 else 2 if step < 6 else 8 if step < 8 else 0
        own = plan.layout.own
        assert (plan.levels[..., own] == 1).all()
        assert (plan.levels[..., ~own] == wanted).all()


@given(st.floats(0.02, 1.0), st.integers(20, 60), st.integers(0, 20))
def test_with_budget_costs_what_was_asked(mean: float, blocks: int, seed: int) -> None:
    method = Psa(q_block=16, k_block=16, order=Raster()).with_budget(mean)
    assert nominal_cost(method.ranges) == pytest.approx(mean, abs=1e-6)
    q, k, v = tensors(blocks * 16, seed=seed)
    plan = attend(q, k, v, method=method).plan
    assert plan is not None
    # One own block in full, and each of three ends rounded down to a whole block.
    assert mean - 2 / blocks <= plan.cost <= mean + 1 / blocks


@pytest.mark.parametrize("ranges", [LEVELS, {1: (0, 0.1), 0: (0.1, 1)}, {1: (0.0, 1.0)}])
@pytest.mark.parametrize("mean", [0.0, 0.05, 0.3, 0.6, 1.0])
def test_with_budget_scales_any_ranges(ranges: dict[int, tuple[float, float]], mean: float) -> None:
    scaled = Psa(ranges, "thresholdbound", axis="step").with_budget(mean)
    assert nominal_cost(scaled.ranges) == pytest.approx(mean, abs=1e-6)
    assert scaled.mode == "topk"
    assert scaled.axis == "block"


@pytest.mark.parametrize("backend", ["reference", "torch"])
@pytest.mark.parametrize("k_block", [16, 32, 64, 128])
@pytest.mark.parametrize("tokens", [127, 301, 1000 - 1])
@pytest.mark.parametrize("ratio", RATIOS)
def test_pooled_levels_against_a_dense_softmax(
    backend: str, k_block: int, tokens: int, ratio: int
) -> None:
    """logit = q·k̄·scale + ln(number of real keys), also in the ragged tail."""
    q, k, v = tensors(40, tokens, H=1, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(40), TokenGrid.flat(tokens), blocks=Blocks(32, k_block))
    levels = torch.full((1, 1, layout.M, layout.N), ratio)
    levels[..., ::3] = 1
    levels[0, 0, 0, 1::3] = 0
    levels[..., -1] = ratio
    plan = BlockPlan.from_levels(levels, layout)
    out, lse = BACKENDS[backend].attend(q, k, v, plan, 0.25)
    wanted = pooled_attention(q, k, v, levels, 32, k_block, 0.25)
    torch.testing.assert_close(out, wanted)
    assert lse.isfinite().all()


@pytest.mark.parametrize("backend", ["reference", "torch"])
def test_pooling_counts_real_keys_only(backend: str) -> None:
    from jali.tokens.padding import KeyPadding

    q, k, v = tensors(40, 151, B=3, H=2, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(40), TokenGrid.flat(151), blocks=Blocks(32, 16))
    make = torch.Generator().manual_seed(0)
    levels = torch.tensor([0, 1, 2, 4, 8])[torch.randint(0, 5, (3, 2, 2, 10), generator=make)]
    levels[..., 0] = 8
    real = torch.rand(3, 151, generator=make) < 0.6
    real[2] = False
    plan = BlockPlan.from_levels(levels, layout)
    out, _ = BACKENDS[backend].attend(q, k, v, plan, 0.25, KeyPadding(mask=real))
    torch.testing.assert_close(out, pooled_attention(q, k, v, levels, 32, 16, 0.25, real))


def test_equal_keys_pool_without_loss() -> None:
    q, k, v = tensors(128)
    k = k[:, :, ::8].repeat_interleave(8, dim=2)
    v = v[:, :, ::8].repeat_interleave(8, dim=2)
    method = Psa({8: (0, 1.0)}, q_block=16, k_block=16, order=Raster())
    result = attend(q, k, v, method=method)
    full = attend(q, k, v, method="dense").out
    torch.testing.assert_close(result.out, full, atol=1e-5, rtol=1e-5)
    assert result.plan is not None
    assert result.plan.cost < 0.3


def test_default_runs_on_an_odd_video_with_text() -> None:
    grid = TokenGrid.video(3, 13, 17, text=226)
    q, k, v = tensors(grid)
    plan = attend(q, k, v, method="psa", grid=grid).plan
    assert plan is not None
    assert plan.layout.order == Gilbert()
    assert set(plan.levels.unique().tolist()) <= {0, 1, 2, 8}
    assert math.isfinite(plan.cost)


def test_mixed_blocks_are_never_pooled() -> None:
    grid = TokenGrid.video(2, 7, 11, text=9, text_side="back")
    from jali import Box

    grid = TokenGrid((Box(1, 7, 11), Box(2, 5, 7)))
    q, k, v = tensors(grid)
    plan = attend(q, k, v, method=Psa({8: (0, 1.0)}, q_block=16, k_block=16), grid=grid).plan
    assert plan is not None
    assert plan.layout.mixed_keys.any()
    assert (plan.levels[..., plan.layout.mixed_keys] == 1).all()
    assert best_first([0.1, 0.2], [False, False]) == [1, 0]


def test_what_is_asked_is_known_where_ranges_are_shares_of_blocks() -> None:
    assert Psa().mean_budget == pytest.approx(0.1 + 0.05 / 2 + 0.2 / 8)
    assert Psa().with_budget(0.3).mean_budget == pytest.approx(0.3)
    others = {"mode": "thresholdbound"}, {"axis": "step"}, {"similarity": (0.7, 0.8, 0.9)}
    assert all(Psa(**other).mean_budget is None for other in others)  # type: ignore[arg-type]
