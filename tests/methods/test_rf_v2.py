"""rf_v2: exact counts, protection, windows; compat against goldens and the original's rules."""

from __future__ import annotations

import pytest
import torch

from jali import BlockPlan, Box, RfV2, TokenGrid, attend
from oracle import best_first, blocks_of, golden_qk, hex_rows, rf_v2_original, tensors


def plan_of(q: torch.Tensor, k: torch.Tensor, grid: TokenGrid, method: RfV2) -> BlockPlan:
    plan = attend(q, k, torch.zeros_like(k), method=method, grid=grid).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("text", "sparsity", "rows"),
    [
        (0, 0.5, "ff ff cb cb f4 f4 cb cb"),
        (128, 0.7, "1ff 1ff 1ad 193 1c1 1a5 1a5 193 1ff"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_golden_masks(text: int, sparsity: float, rows: str, dtype: torch.dtype) -> None:
    q, k = golden_qk(1024 + text)
    grid = TokenGrid.video(4, 16, 16, text=text)
    plan = plan_of(q.to(dtype), k.to(dtype), grid, RfV2(sparsity, compat=True))
    assert hex_rows(plan.levels[0, 0]) == rows.split()
    assert int(plan.levels.sum()) == (46 if text == 0 else 57)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "text"), [((4, 16, 16), 0), ((3, 21, 32), 0), ((2, 24, 45), 0), ((4, 16, 16), 200)]
)
@pytest.mark.parametrize("sparsity", [0.3, 0.7, 0.9])
def test_compat_is_the_original(
    dtype: torch.dtype, shape: tuple[int, int, int], text: int, sparsity: float
) -> None:
    grid = TokenGrid.video(*shape, text=text)
    q, k, _ = tensors(grid, H=2, dtype=dtype, spread=0.5)
    plan = plan_of(q, k, grid, RfV2(sparsity, compat=True))
    for h in range(2):
        wanted = rf_v2_original(q[0, h], k[0, h], shape, text, sparsity)
        assert (plan.levels[0, h].numpy() == wanted).all()


@pytest.mark.parametrize(
    ("shape", "text"), [((4, 16, 16), 0), ((3, 21, 32), 0), ((4, 16, 16), 200)]
)
def test_compat_without_the_first_frame_keeps_the_scored_blocks_and_text(
    shape: tuple[int, int, int], text: int
) -> None:
    grid = TokenGrid.video(*shape, text=text)
    q, k, _ = tensors(grid, H=2, spread=0.5)
    plan = plan_of(q, k, grid, RfV2(0.7, compat=True, first_frame=False))
    forced = plan_of(q, k, grid, RfV2(0.7, compat=True))
    for h in range(2):
        wanted = rf_v2_original(q[0, h], k[0, h], shape, text, 0.7, first_frame=False)
        assert (plan.levels[0, h].numpy() == wanted).all()
    assert plan.cost < forced.cost
    assert torch.equal(
        forced.levels, plan_of(q, k, grid, RfV2(0.7, compat=True, first_frame=True)).levels
    )


@pytest.mark.parametrize(("blocks", "kept"), [(10, 3), (1000, 300)])
def test_the_count_is_exact(blocks: int, kept: int) -> None:
    size = 16 if blocks == 10 else 1
    q, k, _ = tensors(blocks * size, H=1, D=8)
    method = RfV2(0.7, block_size=size, first_frame=False)
    plan = plan_of(q, k, TokenGrid.flat(blocks * size), method)
    assert (plan.levels.sum(-1) == kept).all()


@pytest.mark.parametrize("shape", [(3, 9, 10), (1, 20, 20), (4, 8, 8)])
@pytest.mark.parametrize("first_frame", [None, True, False])
@pytest.mark.parametrize("text", [0, 11])
def test_the_plan_against_loops(
    shape: tuple[int, int, int], first_frame: bool | None, text: int
) -> None:
    grid = TokenGrid.video(*shape, text=text)
    q, k, _ = tensors(grid, H=2, dtype=torch.float64)
    method = RfV2(0.6, block_size=16, window=(2, 2, 4), first_frame=first_frame)
    plan = plan_of(q, k, grid, method)
    layout = plan.layout
    assert layout.q.index is not None
    index = layout.q.index.tolist()
    protect = first_frame is True or (first_frame is None and shape[0] > 1)
    frame = range(text, text + shape[1] * shape[2]) if protect else range(0)
    blocks = blocks_of(grid.tokens, 16)
    tokens = [[index[i] for i in block] for block in blocks]
    special = [any(t < text or t in frame for t in part) for part in tokens]
    keep = -(-4 * len(blocks) // 10)
    for h in range(2):
        means = [(q[0, h, part].mean(0), k[0, h, part].mean(0)) for part in tokens]
        for m in range(len(blocks)):
            forced = [special[j] or j == m for j in range(len(blocks))]
            scores = [float(means[m][0] @ means[j][1]) for j in range(len(blocks))]
            order = best_first(scores, forced)
            wanted = set(order[: max(keep, sum(forced))])
            if special[m]:
                wanted = set(range(len(blocks)))
            assert set(plan.levels[0, h, m].nonzero().flatten().tolist()) == wanted


def test_sparsity_one_keeps_own_and_forced_blocks() -> None:
    grid = TokenGrid.video(5, 8, 8, text=3)
    q, k, _ = tensors(grid)
    plan = plan_of(q, k, grid, RfV2(1.0, block_size=32, window=(1, 4, 8)))
    layout = plan.layout
    special = layout.text_rows | layout.first_rows
    wanted = layout.own | layout.text_keys | layout.first_keys | special[:, None]
    assert torch.equal(plan.levels.bool(), wanted.expand_as(plan.levels))


def test_several_videos_each_have_a_first_frame() -> None:
    grid = TokenGrid((Box(3, 8, 8), Box(1, 8, 8), Box(2, 8, 8)))
    q, k, _ = tensors(grid)
    plan = plan_of(q, k, grid, RfV2(1.0, block_size=16, window=(1, 4, 4)))
    layout = plan.layout
    assert int(layout.first_keys.sum()) == 8
    assert (plan.levels[..., layout.first_keys] == 1).all()
    assert not (plan.levels[..., layout.single_keys] == 1).all()


def test_with_budget() -> None:
    assert RfV2(0.2).with_budget(0.25).sparsity == 0.75


def test_small_frames_run_in_compat() -> None:
    for shape in ((2, 5, 30), (1, 9, 9), (3, 30, 7)):
        grid = TokenGrid.of(shape)
        q, k, _ = tensors(grid)
        assert plan_of(q, k, grid, RfV2(0.5, compat=True)).cost > 0
