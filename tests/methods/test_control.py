"""The controls: honest budgets, no look at q and k, nearness in t, h, w."""

from __future__ import annotations

import pytest
import torch

from jali import Budget, Local, Random, TokenGrid, attend
from oracle import tensors


@pytest.mark.parametrize("kind", [Random, Local])
@pytest.mark.parametrize("mean", [0.2, 0.5, 1.0])
def test_budget(kind: type, mean: float) -> None:
    q, k, v = tensors(1024)
    plan = attend(q, k, v, method=kind(Budget(mean), q_block=32, k_block=32)).plan
    assert plan is not None
    assert plan.cost == pytest.approx(mean, abs=1 / 32)


@pytest.mark.parametrize("kind", [Random, Local])
def test_blind_to_q_and_k(kind: type) -> None:
    grid = TokenGrid.video(4, 8, 8)
    method = kind(Budget(0.3), q_block=16, k_block=16)
    plans = [
        attend(*tensors(grid, seed=seed), method=method, grid=grid).plan.levels for seed in (1, 2)
    ]
    assert torch.equal(plans[0], plans[1])


def test_local_reads_its_neighbourhood() -> None:
    """Blocks of one window: those kept are never farther than those left out."""
    grid = TokenGrid.video(8, 8, 8)
    method = Local(Budget(0.4), q_block=16, k_block=16, window=(1, 4, 4))
    plan = attend(*tensors(grid), method=method, grid=grid).plan
    assert plan is not None
    middle = torch.tensor(
        [[t, 4 * h + 1.5, 4 * w + 1.5] for t in range(8) for h in range(2) for w in range(2)]
    )
    distance = ((middle[:, None] - middle[None]).abs() / torch.tensor([1.0, 4.0, 4.0])).amax(-1)
    kept = plan.levels[0, 0].bool()
    for m in range(32):
        assert distance[m][kept[m]].max() <= distance[m][~kept[m]].min() + 1e-5


def test_local_keeps_to_its_own_video() -> None:
    from jali import Box

    grid = TokenGrid((Box(2, 8, 8), Box(2, 8, 8)))
    method = Local(Budget(0.5), q_block=32, k_block=32, window=(2, 4, 4))
    plan = attend(*tensors(grid), method=method, grid=grid).plan
    assert plan is not None
    block = torch.arange(8) < 4
    assert torch.equal(plan.levels[0, 0].bool(), block[:, None] == block[None])


def test_random_differs_between_rows_and_seeds() -> None:
    q, k, v = tensors(1024)
    levels = [
        attend(q, k, v, method=Random(Budget(0.3), 32, 32, seed)).plan.levels  # type: ignore[union-attr]
        for seed in (0, 1)
    ]
    assert not torch.equal(levels[0], levels[1])
    assert len({tuple(row) for row in levels[0][0, 0].tolist()}) > 16
