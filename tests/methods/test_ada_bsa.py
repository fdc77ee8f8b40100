"""ada_bsa: masses and plans against plain loops; compat against the goldens."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from jali import AdaBsa, BlockPlan, Blocks, TokenGrid, attend, block_layout
from jali.planning.scoring import antidiagonal_scores
from oracle import antidiagonal, best_first, golden_qk, hex_rows, tensors


def plan_of(q: torch.Tensor, k: torch.Tensor, method: AdaBsa, **more: object) -> BlockPlan:
    plan = attend(q, k, torch.zeros_like(k), method=method, **more).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("options", "rows", "kept"),
    [
        (
            {"cdf_threshold": 0.5},
            "a481 8921 8249 9093 a481 8921 8249 8093 a425 c901 9241 8491 8125 c909 9241 8491",
            83,
        ),
        (
            {"sparsity": 0.8},
            "a481 8921 8249 8093 a481 8921 8249 8093 a405 c901 9241 8491 8125 c109 9241 8491",
            80,
        ),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_masks(options: dict[str, float], rows: str, kept: int, dtype: torch.dtype) -> None:
    q, k = golden_qk(2048)
    plan = plan_of(q.to(dtype), k.to(dtype), AdaBsa(**options, compat=True))  # type: ignore[arg-type]
    assert hex_rows(plan.levels[0, 0]) == rows.split()
    assert int(plan.levels.sum()) == kept


def original(q: torch.Tensor, k: torch.Tensor, method: AdaBsa) -> np.ndarray:
    """Section 3, step by step, for one head: q zero-padded to groups, the K tail dropped."""
    P, g = method.block_size, 8
    S, D = q.shape
    padded = torch.cat([q, q.new_zeros(-S % g, D)])
    keys = k[: S // g * g]
    qg = padded.reshape(-1, g, D).flip(1).flatten(1)
    kg = keys.reshape(-1, g, D).flatten(1)
    p = (qg @ kg.T * D**-0.5 / g).softmax(-1).numpy()
    n = -(-S // P)
    r = P // g
    x = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            x[i, j] = p[i * r : (i + 1) * r, j * r : (j + 1) * r].sum()
    kept = np.zeros((n, n), dtype=bool)
    for i in range(n):
        row = x[i].copy()
        row[n - 1] = 0
        if method.keep_sink:
            row[0] = 0
        y = np.sort(row)[::-1]
        guard, count = 0.0, n
        if method.cdf_threshold < 1:
            j = next(j for j in range(n) if y[: j + 1].sum() >= method.cdf_threshold * row.sum())
            guard, count = y[j], j
        room = n * (1 - method.sparsity)
        if count > room and n >= 10:
            guard = y[int(room) - 1]
        kept[i] = row > guard - 1e-5
        kept[i, 0] = kept[i, n - 1] = True
    return kept


@pytest.mark.parametrize("S", [16 * 12, 16 * 12 + 5, 16 * 7, 16 * 11 + 8])
@pytest.mark.parametrize(
    "options",
    [
        {"sparsity": 0.5}, {"cdf_threshold": 0.6}, {"sparsity": 0.7, "cdf_threshold": 0.8},
        {"sparsity": 0.8, "keep_sink": False}, {"sparsity": 0.5, "keep_recent": False},
    ],
)  # fmt: skip
def test_compat_is_the_original(S: int, options: dict[str, float]) -> None:
    q, k, _ = tensors(S, H=2, dtype=torch.float64)
    method = AdaBsa(**options, block_size=16, compat=True)  # type: ignore[arg-type]
    plan = plan_of(q, k, method)
    for h in range(2):
        assert (plan.levels[0, h].numpy() == original(q[0, h], k[0, h], method)).all()


def test_compat_counts_of_the_specification() -> None:
    """n = 64: .5 keeps 34 to 35, .8 keeps 14 to 15, .9 keeps 8 to 9; n = 9 ignores the cap."""
    q, k, _ = tensors(64 * 16, H=2, spread=1.0)
    for sparsity, counts in ((0.5, {33, 34, 35}), (0.8, {13, 14, 15}), (0.9, {7, 8, 9})):
        plan = plan_of(q, k, AdaBsa(sparsity, block_size=16, compat=True))
        assert set(plan.levels.sum(-1).unique().tolist()) <= counts
    q, k, _ = tensors(9 * 16, H=1)
    assert plan_of(q, k, AdaBsa(0.8, block_size=16, compat=True)).density == 1


@pytest.mark.parametrize("S", [96, 93, 81, 65])
def test_masses_against_loops(S: int) -> None:
    q, k, _ = tensors(S, H=4, kv=2, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(S), blocks=Blocks(16, 16))
    scores = antidiagonal_scores(q, k, layout, 0.25)
    for h in range(4):
        wanted = antidiagonal(q[0, h], k[0, h // 2], 16, 0.25)
        np.testing.assert_allclose(scores[0, h].numpy(), wanted, atol=1e-9)
    torch.testing.assert_close(scores.sum(-1), torch.ones_like(scores[..., 0]))


@pytest.mark.parametrize("S", [96, 93, 173])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("threshold", [1.0, 0.9, 0.5, 0.0])
@pytest.mark.parametrize(("sink", "recent"), [(True, True), (False, False), (True, False)])
def test_the_plan_against_loops(
    S: int, sparsity: float, threshold: float, sink: bool, recent: bool
) -> None:
    q, k, _ = tensors(S, H=1, dtype=torch.float64)
    plan = plan_of(q, k, AdaBsa(sparsity, threshold, sink, recent, block_size=16))
    mass = antidiagonal(q[0, 0], k[0, 0], 16, 0.25)
    N = len(mass)
    cap = math.ceil((1 - sparsity) * N - 1e-6)
    for m in range(N):
        forced = [j == m or (sink and j == 0) or (recent and j == N - 1) for j in range(N)]
        order = best_first(mass[m].tolist(), forced)
        count = N
        if threshold < 1:
            total = np.cumsum([mass[m][j] for j in order])
            count = 1 + int((total < threshold - 1e-9).sum())
        wanted = set(order[: max(min(count, cap), sum(forced))])
        assert set(plan.levels[0, 0, m].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize("offset", [0, 24, 64])
@pytest.mark.parametrize("threshold", [1.0, 0.7])
def test_causal_rows_share_what_they_see(offset: int, threshold: float) -> None:
    """For a row the number of key blocks is that of the blocks it can see."""
    q, k, v = tensors(96, 160, H=1, dtype=torch.float64)
    method = AdaBsa(0.5, threshold, block_size=16)
    plan = attend(q, k, v, method=method, causal=True, offset=offset).plan
    assert plan is not None
    visible = plan.layout.causal.sum(-1)
    forced = (plan.layout.own | (torch.arange(plan.layout.N) == 0)) & plan.layout.causal
    for m in range(plan.layout.M):
        share = max(math.ceil(int(visible[m]) * 0.5), int(forced[m].sum()))
        read = int(plan.levels[0, 0, m].sum())
        assert read == share if threshold == 1 else read <= share
        assert not (plan.levels[0, 0, m].bool() & ~plan.layout.causal[m]).any()


def test_causal_threshold_does_not_count_what_lies_ahead() -> None:
    """All mass lies in block 3: sink, own and that block reach the threshold, none is added."""
    S = 160
    k = torch.zeros(1, 1, S, 16)
    k[:, :, 48:64, 0] = 30.0
    q = torch.zeros(1, 1, S, 16)
    q[..., 0] = 10.0
    method = AdaBsa(0.0, 0.5, block_size=16)
    plan = attend(q, k, k, method=method, causal=True).plan
    assert plan is not None
    wanted = plan.layout.own | (torch.arange(10) == 0) | (torch.arange(10) == 3)
    assert torch.equal(plan.levels[0, 0, 3:].bool(), wanted[3:])
