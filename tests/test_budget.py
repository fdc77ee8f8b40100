"""Budgets: exact cases of the specification, and the mean is kept for any input."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from jali import Budget
from jali.planning.budget import blocks_for, entropy_of, share_blocks, shares_by_weight


def asked(mean: float, N: int, H: int) -> int:
    return min(max(math.floor(mean * N * H + 0.5), H), N * H)


def shares(entropy: list[float], mean: float, floor: float = 0.05) -> list[float]:
    weight = torch.tensor([entropy], dtype=torch.float64) + 1e-6
    return shares_by_weight(weight, mean, min(floor, mean), 1.0)[0].tolist()


def test_one_diffuse_head_takes_what_it_can() -> None:
    """E = (1, .02, .02, .02), budget .5: the first is full, the rest share (2 − 1) / 3."""
    assert shares([1, 0.02, 0.02, 0.02], 0.5) == pytest.approx([1, 1 / 3, 1 / 3, 1 / 3])
    kept = share_blocks(torch.tensor([[1, 0.02, 0.02, 0.02]]), Budget(0.5), 30)
    assert kept.tolist() == [[30, 10, 10, 10]]


def test_two_diffuse_and_two_focused() -> None:
    """E = (1, 1, 0, 0), budget .9: 1, 1, .8, .8."""
    assert shares([1, 1, 0, 0], 0.9) == pytest.approx([1, 1, 0.8, 0.8])
    kept = share_blocks(torch.tensor([[1.0, 1, 0, 0]]), Budget(0.9), 10)
    assert kept.tolist() == [[10, 10, 8, 8]]


@pytest.mark.parametrize("mean", [0.0, 0.05, 0.3, 0.5, 1.0])
def test_no_entropy_at_all_shares_equally(mean: float) -> None:
    kept = share_blocks(torch.zeros(1, 4), Budget(mean), 20)
    assert kept.tolist() == [[max(1, round(20 * mean))] * 4]


def test_remainder_goes_to_the_largest_fraction_then_the_lower_head() -> None:
    assert share_blocks(torch.ones(1, 4), Budget(0.5), 5).tolist() == [[3, 3, 2, 2]]
    kept = share_blocks(torch.tensor([[0.60, 0.55, 0.50]]), Budget(0.55), 10)[0]
    exact = [0.60 * 10, 0.55 * 10, 0.50 * 10]  # sums to 16.5, asked 17
    assert kept.sum() == 17
    assert (kept - torch.tensor(exact)).abs().max() < 1


def test_each_sample_has_its_own_factor() -> None:
    entropy = torch.tensor([[1, 0.02, 0.02, 0.02], [0.5, 0.5, 0.5, 0.5]])
    assert share_blocks(entropy, Budget(0.5), 30).tolist() == [[30, 10, 10, 10], [15] * 4]


@st.composite
def budgets(draw: st.DrawFn) -> Budget:
    mean = draw(st.floats(0, 1))
    floor = draw(st.none() | st.floats(0, mean))
    return Budget(mean, floor, draw(st.floats(mean, 1)))


ENTROPY = st.one_of(
    st.sampled_from([0.0, 1.0, 1e-12, 0.5, 1 + 1e-7]), st.floats(0, 1, allow_subnormal=True)
)


@settings(max_examples=settings().max_examples * 10)
@given(
    st.lists(st.lists(ENTROPY, min_size=1, max_size=9), min_size=1, max_size=1),
    budgets(),
    st.integers(1, 700),
    st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.5, 60.0, 1000.0]),
)
@example([[1, 0.02, 0.02, 0.02]], Budget(0.5), 591, 1.0)
@example([[0.0, 1.0]], Budget(0.3), 100, 100.0)
def test_the_mean_is_kept(
    entropy: list[list[float]], budget: Budget, N: int, sharpness: float
) -> None:
    kept = share_blocks(torch.tensor(entropy), budget, N, sharpness)
    H = len(entropy[0])
    assert kept.dtype == torch.int64
    assert int(kept.sum()) == asked(budget.mean, N, H)
    assert int(kept.min()) >= 1
    assert int(kept.max()) <= N
    # No head leaves its range by more than the rounding of one block.
    assert int(kept.max()) <= max(budget.ceiling * N, budget.mean * N, 1) + 1
    assert int(kept.min()) >= min(budget.least * N, budget.mean * N) - 1
    # More entropy never means fewer blocks (beyond that rounding).
    order = torch.tensor(entropy[0]).clamp(0, 1).argsort()
    ranked = kept[0, order]
    assert bool((ranked.cummax(0).values - ranked <= 1).all())


def test_sharpness() -> None:
    entropy = torch.tensor([[0.9, 0.6, 0.3]])
    spread = [
        float(share_blocks(entropy, Budget(0.4), 1000, s).double().std()) for s in (0, 0.5, 1, 2)
    ]
    assert spread == sorted(spread)
    assert spread[0] < 1


def test_entropy_of() -> None:
    even = torch.full((1, 1, 3, 8), 1 / 8)
    assert float(entropy_of(even)) == pytest.approx(1)
    peak = torch.zeros(1, 1, 3, 8)
    peak[..., 2] = 1
    assert float(entropy_of(peak)) == 0
    assert entropy_of(torch.ones(2, 3, 4, 1)).tolist() == [[1.0] * 3] * 2
    half = torch.cat([even, peak], dim=2)
    assert float(entropy_of(half)) == pytest.approx(0.5)
    rows = torch.tensor([False] * 3 + [True] * 3)
    assert float(entropy_of(half, rows)) == 0
    half[0, 0, 1] = torch.nan  # a broken query counts for nothing, and spoils nobody's share
    assert float(entropy_of(half)) == pytest.approx(2 / 6)
    assert float(entropy_of(half, rows)) == 0


@pytest.mark.parametrize(
    ("share", "blocks", "kept"),
    [(1 - 0.7, 10, 3), (1 - 0.7, 1000, 300), (0.3, 10, 3), (0.31, 10, 4), (0, 5, 0), (1, 7, 7),
     (1 - 0.9, 10, 1), (1e-12, 10, 0), (0.001, 10, 1)],
)  # fmt: skip
def test_blocks_for(share: float, blocks: int, kept: int) -> None:
    assert blocks_for(share, blocks) == kept


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Budget(1.5), ValueError, r"mean must be in \[0, 1\], got 1.5"),
        (lambda: Budget(-0.1), ValueError, "mean"),
        (lambda: Budget(math.nan), ValueError, "mean.*nan"),
        (lambda: Budget("0.5"), TypeError, "mean must be a number.*'0.5'"),
        (lambda: Budget(True), TypeError, "mean"),
        (lambda: Budget(0.5, floor=0.6), ValueError, "floor <= mean <= ceiling"),
        (lambda: Budget(0.5, ceiling=0.4), ValueError, "floor <= mean <= ceiling"),
        (lambda: Budget(0.5, floor=math.nan), ValueError, "floor.*nan"),
        (lambda: Budget(0.5, ceiling=math.nan), ValueError, "ceiling.*nan"),
        (lambda: Budget(0.5, ceiling=1.1), ValueError, "ceiling.*1.1"),
    ],
)
def test_refuses(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]
