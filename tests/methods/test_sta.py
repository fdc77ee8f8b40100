"""Sliding tile attention, against its rule written out tile by tile."""

from __future__ import annotations

import itertools

import pytest
import torch

from jali import Sta, TokenGrid, attend
from jali.planning.plan import BlockPlan
from oracle import tensors

TILE = (2, 4, 4)  # 32 tokens


def published(tiles: tuple[int, int, int], window: tuple[int, int, int]) -> torch.Tensor:
    """Which tile reads which: all within half a window of the middle, which stays so far inside
    that the window does not leave the video."""
    places = list(itertools.product(*map(range, tiles)))
    read = torch.zeros(len(places), len(places), dtype=torch.uint8)
    for i, query in enumerate(places):
        for j, key in enumerate(places):
            inside = True
            for q, k, w, n in zip(query, key, window, tiles, strict=True):
                half = w // 2
                middle = min(max(q, half), n - 1 - half)
                inside &= abs(middle - k) <= half
            read[i, j] = inside
    return read


def plan_of(method: Sta, grid: TokenGrid | tuple[int, int, int], **more: int) -> BlockPlan:
    grid = TokenGrid.of(grid)
    plan = attend(*tensors(grid, D=16, **more), method=method, grid=grid).plan
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    "window", [(3, 3, 3), (1, 1, 1), (1, 3, 5), (5, 1, 3), (3, 2, 4), (9, 9, 9)], ids=str
)
@pytest.mark.parametrize("block", [32, 16])
def test_is_the_published_window(window: tuple[int, int, int], block: int) -> None:
    plan = plan_of(Sta(window, TILE, block_size=block), (8, 16, 20))
    wanted = published((4, 4, 5), window)
    wanted = wanted.repeat_interleave(32 // block, 0).repeat_interleave(32 // block, 1)
    assert torch.equal(plan.levels[0, 0], wanted)


def test_the_published_size() -> None:
    """30 × 48 × 80 in tiles of 6 × 8 × 8, of which 27 of 300 are read."""
    method = Sta()
    grid = TokenGrid.video(30, 48, 80)
    layout = method.layout(grid, None, None, method.blocks(None), torch.device("cpu"))  # type: ignore[arg-type]
    ranked = method.ranked(layout)
    assert ranked.published / ranked.pairs == 27 / 300


@pytest.mark.parametrize("budget", [0.02, 0.1, 0.3, 0.75])
def test_a_budget_is_met(budget: float) -> None:
    plan = plan_of(Sta((3, 3, 3), TILE, budget=budget, block_size=16), (8, 16, 20))
    assert plan.density == pytest.approx(budget, abs=1e-3)


def test_the_window_grows_with_the_budget() -> None:
    narrow, wide = (
        published((6, 4, 5), window).sum() / 120**2 for window in ((3, 1, 1), (5, 3, 3))
    )
    for share, inside, outside in ((narrow, (3, 1, 1), None), (wide, (5, 3, 3), (3, 1, 1))):
        method = Sta((3, 1, 1), TILE, budget=float(share), block_size=32)
        found = plan_of(method, (12, 16, 20)).levels[0, 0].bool()
        if outside is None:
            assert torch.equal(found, published((6, 4, 5), inside).bool())
        else:
            assert (found | ~published((6, 4, 5), outside).bool()).all()
            part = (found & published((6, 4, 5), inside).bool()).sum() / found.sum()
            assert part > 0.75


@pytest.mark.parametrize(
    "grid",
    [
        TokenGrid.video(5, 9, 11),
        TokenGrid.video(5, 9, 11, text=9),
        TokenGrid.video(5, 9, 11, text=9, text_side="back"),
        TokenGrid.video(1, 24, 24),
        TokenGrid.video(1, 3, 2),
    ],
    ids=str,
)
def test_odd_sizes_text_and_images(grid: TokenGrid) -> None:
    """The original is made for three sizes and 256 text tokens; here any will do."""
    plan = plan_of(Sta((1, 3, 3), TILE, block_size=16), grid, B=2, H=4, kv=2)
    layout, levels = plan.layout, plan.levels[0, 0]
    assert levels[layout.forced].all()
    assert levels[layout.text_rows].all()
    if grid == TokenGrid.video(1, 24, 24):
        assert plan.density < 0.5


def test_text_does_not_move_the_windows() -> None:
    method = Sta((3, 3, 3), TILE, block_size=16)
    bare, joint = (plan_of(method, TokenGrid.video(8, 16, 20, text=n)) for n in (0, 40))
    assert torch.equal(joint.levels[0, 0, : bare.layout.M, : bare.layout.N], bare.levels[0, 0])


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"window_size is \(t, h, w\), one for all heads"):
        Sta([(3, 3, 3)] * 24)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="every one of tile_size must be at least 1, got 0"):
        Sta(tile_size=(6, 0, 8))
    assert Sta([3, 3, 3]) == Sta()  # type: ignore[arg-type]
    assert hash(Sta([3, 3, 3])) == hash(Sta())  # type: ignore[arg-type]
