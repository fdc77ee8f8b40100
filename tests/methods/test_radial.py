"""Radial Attention, against its rule written out token by token."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from jali import Curve, Radial, Schedule, Site, TokenGrid, attend
from jali.planning.plan import BlockPlan
from oracle import tensors


def published(frames: int, size: int, block: int, decay: float, first_frame: bool) -> np.ndarray:
    """Which block pairs are read, where frames are whole blocks (elsewhere theirs is undefined)."""
    per_frame = size // block
    read = np.zeros((frames * per_frame, frames * per_frame), dtype=bool)
    place = np.arange(size)
    for i in range(frames):
        for j in range(frames):
            away = abs(i - j)
            length = 2 ** size.bit_length() / 2 ** away.bit_length()
            width = size if away <= 1 else max(block, length * decay)
            mask = np.abs(place[:, None] - place[None]) <= width
            if length < block and away % int(block / length):
                mask[:] = False
            if first_frame and j == 0:
                mask[:] = True
            for a in range(per_frame):
                for b in range(per_frame):
                    rows = slice(a * block, (a + 1) * block)
                    columns = slice(b * block, (b + 1) * block)
                    density = mask[rows, columns].mean(0)
                    touched = max(1, (density > 0).sum())
                    full = (density > 1 / 3).sum() / touched > 0.6
                    read[i * per_frame + a, j * per_frame + b] = full
    return read


def plan_of(method: Radial, grid: TokenGrid | tuple[int, int, int], **more: int) -> BlockPlan:
    grid = TokenGrid.of(grid)
    plan = attend(*tensors(grid, D=16, **more), method=method, grid=grid).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize("first_frame", [True, False])
@pytest.mark.parametrize("decay", [0.2, 0.5, 1.0, 3.0])
@pytest.mark.parametrize("block", [16, 32])
def test_is_the_published_pattern(decay: float, first_frame: bool, block: int) -> None:
    plan = plan_of(Radial(decay, first_frame, block_size=block), (20, 8, 12))
    wanted = published(20, 96, block, decay, first_frame)
    np.fill_diagonal(wanted, True)
    assert np.array_equal(plan.levels[0, 0].numpy(), wanted)
    assert 0 < plan.density < 1


def test_bands_narrow_with_distance() -> None:
    levels = plan_of(Radial(first_frame=False, block_size=16), (9, 16, 16)).levels[0, 0]
    a_row = levels[8].view(9, 16).sum(1)  # the middle of the first frame, frame by frame
    assert a_row.tolist() == sorted(a_row.tolist(), reverse=True)
    assert a_row[0] == a_row[1] == 16
    assert a_row[2] > a_row[8] > 0


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.37, 0.8])
def test_a_budget_is_met(budget: float) -> None:
    plan = plan_of(Radial(budget=budget, block_size=16), (12, 8, 10))
    assert plan.density == pytest.approx(budget, abs=1e-3)


def test_a_budget_widens_the_bands_of_the_pattern() -> None:
    own = plan_of(Radial(block_size=16), (20, 8, 12))
    less, more = (
        plan_of(Radial(budget=share * own.density, block_size=16), (20, 8, 12)).levels.bool()
        for share in (0.7, 1.3)
    )
    pattern = own.levels.bool()
    assert (pattern | ~less).all()
    assert (more | ~pattern).all()
    wide = torch.from_numpy(published(20, 96, 16, 3.0, True))
    assert (more & wide).sum() > 0.8 * more.sum()  # the frames it leaves out come last


@pytest.mark.parametrize(
    "grid",
    [
        TokenGrid.video(5, 7, 11),  # frames that are no whole blocks
        TokenGrid.video(4, 3, 3),  # several frames in a block
        TokenGrid.video(5, 7, 11, text=9),
        TokenGrid.video(5, 7, 11, text=9, text_side="back"),
        TokenGrid.video(1, 16, 16),
    ],
    ids=str,
)
def test_odd_sizes_text_and_images(grid: TokenGrid) -> None:
    plan = plan_of(Radial(block_size=16), grid, B=2, H=4, kv=2)
    layout, levels = plan.layout, plan.levels[0, 0]
    assert levels[layout.forced].all()
    assert levels[layout.text_rows].all()
    if grid == TokenGrid.video(1, 16, 16):
        assert plan.cost == 1  # one frame is read whole


def test_every_frame_sees_its_neighbours_whole_whatever_the_size() -> None:
    """The original leaves the last tokens of a frame out where a block ends inside it."""
    plan = plan_of(Radial(block_size=16), (3, 7, 11))
    frame = torch.arange(231) // 77
    near = (frame[:, None] - frame[None]).abs() <= 1
    token = plan.levels[0, 0].repeat_interleave(16, 0).repeat_interleave(16, 1)[:231, :231]
    assert (token[near] == 1).double().mean() > 0.97


def test_a_total_along_a_run_shares_one_ranking() -> None:
    q, k, v = tensors(480)
    method = Schedule(Radial(block_size=16), curve=Curve(0.4))
    costs = []
    for step in range(6):
        site = Site(step, 6, 0, 1)
        plan = attend(q, k, v, method=method, grid=(5, 8, 12), site=site).plan
        costs.append(1.0 if plan is None else plan.cost)
    assert sum(costs) / 6 == pytest.approx(0.4, abs=0.02)
    assert costs == sorted(costs, reverse=True)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match="decay_factor must be finite and >= 0, got -1"):
        Radial(-1)
    with pytest.raises(ValueError, match=r"budget must be in \[0, 1\], got 1.5"):
        Radial(budget=1.5)
    with pytest.raises(ValueError, match="causal"):
        attend(*tensors(64), method=Radial(), causal=True)
