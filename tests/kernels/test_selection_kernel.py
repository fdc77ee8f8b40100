"""Budgets, lists and levels against plain torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali.kernels.selection import (
    cumulative_ends,
    entropy_budgets,
    level_lists,
    list_levels,
    row_entropy,
    select_lists,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def budget_reference(
    entropy: Tensor, n: int, mean: float, floor: float, ceiling: float, sharpness: float
) -> Tensor:
    """The definition, by bisection in float64. entropy [H] -> int64 [H]."""
    heads = len(entropy)
    total = min(max(math.floor(mean * n * heads + 0.5), heads), n * heads)
    target = total / (n * heads)
    low, high = min(max(floor, 1 / n), target), max(ceiling, target)
    log_weight = sharpness * torch.log(entropy.double() + 1e-6)
    left, right = -1e3, 1e3
    for _ in range(200):
        middle = (left + right) / 2
        share = (middle + log_weight).exp().clamp(low, high)
        left, right = (middle, right) if share.mean() < target else (left, middle)
    share = (right + log_weight).exp().clamp(low, high)
    whole = torch.floor(share * n + 1e-6).long()
    rest = ((share * n - whole) * 2**20 + 0.5).floor()
    order = sorted(range(heads), key=lambda h: (-rest[h].item(), h))
    for h in order[: total - int(whole.sum())]:
        whole[h] += 1
    return whole


def budgets(
    entropy: list[float],
    n: int,
    mean: float,
    floor: float = 0.05,
    ceiling: float = 1.0,
    sharpness: float = 1.0,
) -> list[int]:
    given = torch.tensor(entropy, dtype=torch.float32, device=DEVICE)[None, :, None]
    scores = torch.empty(1, len(entropy), 1, n, device=DEVICE)
    floor = min(floor, mean)
    keep = entropy_budgets(scores, mean, floor, ceiling, sharpness, entropy=given)
    return keep[0].tolist()


@pytest.mark.parametrize(
    ("entropy", "n", "mean", "want"),
    [
        ([1.0, 0.02, 0.02, 0.02], 300, 0.5, [300, 100, 100, 100]),
        ([1.0, 1.0, 0.0, 0.0], 100, 0.9, [100, 100, 80, 80]),
        ([0.0, 0.0, 0.0], 10, 0.5, [5, 5, 5]),
        ([0.0, 0.0, 0.0], 7, 0.5, [4, 4, 3]),
        ([1.0, 1.0], 1000, 0.7, [700, 700]),
        ([0.5, 0.25], 8, 0.0, [1, 1]),
        ([0.5, 0.25], 8, 1.0, [8, 8]),
        ([0.3], 64, 0.25, [16]),
    ],
)
def test_budgets_come_out_exact(entropy: list[float], n: int, mean: float, want: list[int]) -> None:
    assert budgets(entropy, n, mean) == want


@pytest.mark.parametrize("seed", range(12))
def test_budgets_follow_the_definition(seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def uniform() -> float:
        return torch.rand((), generator=generator).item()

    heads, n = int(uniform() * 40) + 1, int(uniform() * 600) + 1
    entropy = torch.rand(heads, generator=generator) ** (1 + 3 * uniform())
    ceiling = 0.3 + 0.7 * uniform()
    mean = uniform() * ceiling
    floor, sharpness = uniform() * mean, 3 * uniform()
    got = budgets(entropy.tolist(), n, mean, floor, ceiling, sharpness)
    want = budget_reference(entropy, n, mean, floor, ceiling, sharpness)
    assert sum(got) == min(max(math.floor(mean * n * heads + 0.5), heads), n * heads)
    assert got == want.tolist()


def test_entropy_counts_only_the_rows_that_take_part() -> None:
    scores = random(2, 3, 5, 11, seed=1).mul(2).softmax(-1)
    entropy = -(scores * scores.log()).sum(-1) / math.log(11)
    torch.testing.assert_close(row_entropy(scores), entropy, atol=1e-5, rtol=1e-5)
    rows = torch.tensor([True, False, True, True, False], device=DEVICE)
    got = entropy_budgets(scores, 0.4, 0.05, 1.0, 2.0, rows)
    for b in range(2):
        want = budget_reference(entropy[b][:, rows].mean(1).cpu(), 11, 0.4, 0.05, 1.0, 2.0)
        assert got[b].tolist() == want.tolist()
    assert row_entropy(torch.ones(1, 2, 3, 1, device=DEVICE)).eq(1).all()


def test_one_hot_rows_have_no_entropy() -> None:
    scores = torch.eye(4, device=DEVICE)[None, None]
    assert row_entropy(scores).eq(0).all()


def ranked(row: list[float], must: list[bool]) -> list[int]:
    def place(j: int) -> tuple[bool, bool, float, int]:
        missing = math.isnan(row[j])
        return (not must[j], missing, 0.0 if missing else -row[j], j)

    return sorted(range(len(row)), key=place)


def list_reference(
    scores: Tensor, keep: Tensor, forced: Tensor | None, full: Tensor | None
) -> list[list[int]]:
    b, h, m, n = scores.shape
    lists = []
    for bi in range(b):
        for hi in range(h):
            for mi in range(m):
                must = [False] * n if forced is None else forced[mi].bool().tolist()
                k = max(int(keep[bi, hi]), 1, sum(must))
                if full is not None and full[mi]:
                    k = n
                lists.append(sorted(ranked(scores[bi, hi, mi].tolist(), must)[:k]))
    return lists


def check_lists(counts: Tensor, indices: Tensor, want: list[list[int]]) -> None:
    assert counts.dtype == indices.dtype == torch.int32
    rows = zip(counts.flatten().tolist(), indices.flatten(0, 2).tolist(), want, strict=True)
    for count, row, expected in rows:
        assert row[:count] == expected
        assert not any(row[count:])


@pytest.mark.parametrize("n", [1, 2, 7, 33, 64])
@pytest.mark.parametrize("special", [False, True])
def test_select_lists(n: int, special: bool) -> None:
    m = 4
    scores = random(2, 2, m, n, seed=n).mul(3).round() / 3  # many ties
    scores[0, 0, 0, 0] = math.nan
    scores[0, 1, 1] = -math.inf
    scores[1, 0, 2, n // 2 :] = math.inf
    scores[1, 1, 3, ::2] = -0.0
    scores[1, 1, 3, 1::2] = 0.0
    keep = torch.tensor([[0, n], [max(1, n // 3), n // 2]], dtype=torch.int32, device=DEVICE)
    forced = (random(m, n, seed=3) > 1).to(DEVICE) if special else None
    full = torch.tensor([True, False, False, False], device=DEVICE) if special else None
    counts, indices = select_lists(scores, keep, forced, full)
    check_lists(counts, indices, list_reference(scores, keep, forced, full))


def test_select_lists_in_a_narrow_table() -> None:
    scores = random(1, 2, 3, 20, seed=4)
    keep = torch.tensor([[5, 6]], dtype=torch.int32, device=DEVICE)
    counts, indices = select_lists(scores, keep, width=6)
    assert indices.shape == (1, 2, 3, 6)
    check_lists(counts, indices, list_reference(scores, keep, None, None))


def level_reference(
    scores: Tensor, ends: Tensor, ratios: tuple[int, ...], forced: Tensor | None
) -> Tensor:
    b, h, m, n = scores.shape
    ends = ends.expand(b, h, m, len(ratios))
    out = torch.zeros(b, h, m, n, dtype=torch.uint8)
    for at in torch.cartesian_prod(*map(torch.arange, (b, h, m))).tolist():
        bi, hi, mi = at
        must = [False] * n if forced is None else forced[mi].bool().tolist()
        for rank, j in enumerate(ranked(scores[bi, hi, mi].tolist(), must)):
            level = 0
            for ratio, end in zip(ratios, ends[bi, hi, mi].tolist(), strict=True):
                if end > rank:
                    level = ratio
                    break
            out[bi, hi, mi, j] = 1 if must[j] else level
    return out.to(DEVICE)


@pytest.mark.parametrize("per_row", [False, True])
@pytest.mark.parametrize("special", [False, True])
def test_list_levels(per_row: bool, special: bool) -> None:
    b, h, m, n = 2, 2, 3, 21
    ratios = (1, 2, 4, 8)
    scores = random(b, h, m, n, seed=5).mul(2).round()
    ends = torch.tensor([2, 5, 5, 14], dtype=torch.int32, device=DEVICE)
    if per_row:
        ends = ends + torch.arange(b * h * m, device=DEVICE).view(b, h, m, 1) - 4
        ends = ends.clamp(0, n).to(torch.int32)
    forced = (random(m, n, seed=6) > 1.2).to(DEVICE) if special else None
    full = torch.tensor([False, True, False], device=DEVICE) if special else None
    cap = 2 ** torch.arange(b * h * n, device=DEVICE).view(b, h, n).remainder(4)
    cap = cap.to(torch.uint8) if special else None
    want = level_reference(scores, ends, ratios, forced)
    if full is not None and cap is not None:
        want[:, :, full] = 1
        want = torch.minimum(want, cap[:, :, None])
    # A row that would read nothing reads its first block.
    want[..., :1] = torch.where((want == 0).all(-1, keepdim=True), 1, want[..., :1])
    lists = list_levels(scores, ends, ratios, ratios, forced, full, cap)
    assert list(lists) == list(ratios)
    for ratio, (counts, indices) in lists.items():
        rows = (want == ratio).flatten(0, 2)
        check_lists(counts, indices, [row.nonzero().flatten().tolist() for row in rows])


def mixed_scores(n: int) -> Tensor:
    """Rows of every kind: distinct, tied, with infinities, with NaN, all equal, tiny."""
    scores = random(1, 2, 4, n, seed=n)
    scores[0, 0, 1] = scores[0, 0, 1].round()
    scores[0, 0, 2, : n // 3] = -math.inf
    scores[0, 0, 3, ::3] = math.nan
    scores[0, 1, 0] = 0.25
    scores[0, 1, 1] *= 1e-38
    scores[0, 1, 2] = (scores[0, 1, 2] * 9).exp()
    return scores


def ends_reference(mass: Tensor, bounds: list[float], forced: Tensor | None) -> list[list[int]]:
    """Forced blocks first, then by falling mass, in float64; the crossing block belongs too."""
    n = mass.shape[-1]
    ends = []
    for line, row in enumerate(mass.flatten(0, 2).double().cpu()):
        must = [False] * n if forced is None else forced[line % mass.shape[2]].bool().tolist()
        fixed = sum(must)
        sums = row[ranked(row.tolist(), must)].cumsum(0)
        limits = [(bound + 1e-6) * float(sums[-1]) for bound in bounds]
        spent = float(sums[fixed - 1]) if fixed else 0.0
        counts = [max(fixed, int((sums <= limit).sum())) for limit in limits]
        ends.append(
            [
                min(n, c + (c > 0 and spent <= limit))
                for c, limit in zip(counts, limits, strict=True)
            ]
        )
    return ends


@pytest.mark.parametrize("n", [100, 128, 300, 591])
@pytest.mark.parametrize("special", [False, True])
def test_long_rows_of_every_kind(n: int, special: bool) -> None:
    scores = mixed_scores(n)
    forced = (random(4, n, seed=8) > 1.5).to(DEVICE) if special else None
    full = torch.tensor([False, False, False, True], device=DEVICE) if special else None
    for keep in ((n // 5, n // 2), (1, n - 1)):
        given = torch.tensor([keep], dtype=torch.int32, device=DEVICE)
        counts, indices = select_lists(scores, given, forced, full)
        check_lists(counts, indices, list_reference(scores, given, forced, full))
    ends = torch.tensor([3, n // 10, n // 4, n], dtype=torch.int32, device=DEVICE)
    ratios = (1, 2, 4, 8)
    levels = level_reference(scores, ends, ratios, forced)
    if full is not None:
        levels[:, :, full] = 1
    for ratio, (counts, indices) in list_levels(scores, ends, ratios, ratios, forced, full).items():
        rows = (levels == ratio).flatten(0, 2)
        check_lists(counts, indices, [row.nonzero().flatten().tolist() for row in rows])
    mass = scores.abs().nan_to_num(0.0, 0.0, 0.0)
    bounds = [0.2, 0.4, 0.6, 0.8, 1.0]
    got = cumulative_ends(mass, torch.tensor(bounds, device=DEVICE), forced=forced)
    assert got.flatten(0, 2).tolist() == ends_reference(mass, bounds, forced)


def test_all_levels_in_one_launch() -> None:
    levels = random(1, 2, 3, 200, seed=9).mul(2).round().abs().clamp(max=3)
    levels = torch.where(levels > 0, 2 ** (levels - 1), 0).to(torch.uint8)
    lists = level_lists(levels, (1, 2, 4, 8))
    assert list(lists) == [1, 2, 4, 8]
    for ratio, (counts, indices) in lists.items():
        rows = (levels == ratio).flatten(0, 2)
        check_lists(counts, indices, [row.nonzero().flatten().tolist() for row in rows])


@pytest.mark.parametrize("crossing", [False, True])
def test_cumulative_ends(crossing: bool) -> None:
    n = 20
    scores = random(1, 2, 4, n, seed=7).mul(2).softmax(-1)
    scores[0, 0, 0] = 1 / n  # ties
    scores[0, 0, 1] = torch.tensor([0.9] + [0.1 / (n - 1)] * (n - 1), device=DEVICE)
    bounds = torch.tensor([0.42, 0.63, 0.81, 1.0], device=DEVICE)
    got = cumulative_ends(scores, bounds, least=2, crossing=crossing)
    share = scores.double().sort(-1, descending=True).values.cumsum(-1)
    share = share / share[..., -1:]
    count = (share[..., None] <= bounds.double() + 1e-6).sum(3)
    if crossing:
        count = torch.where(count > 0, count + 1, count).clamp(max=n)
    count[..., 0] = count[..., 0].clamp(min=2)
    assert torch.equal(got.long(), count)


def test_forced_blocks_lead_the_cumulative_sum() -> None:
    scores = torch.tensor([0.5, 0.3, 0.1, 0.1], device=DEVICE)[None, None, None]
    forced = torch.tensor([[False, False, False, True]], device=DEVICE)
    bounds = torch.tensor([0.05, 0.65], device=DEVICE)
    got = cumulative_ends(scores, bounds, crossing=False, forced=forced)
    assert got.flatten().tolist() == [1, 2]  # the forced block; then 0.1 + 0.5
