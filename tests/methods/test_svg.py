"""Sparse VideoGen, against its rules written out token by token."""

from __future__ import annotations

import math

import pytest
import torch

from jali import Curve, Schedule, Site, Svg, TokenGrid, attend
from jali.attend import Attended
from oracle import relative, sdpa, tensors

FRAMES, SIZE = 6, 40
GRID = TokenGrid.video(FRAMES, 5, 8)
S = FRAMES * SIZE


def place_by_place() -> list[int]:
    return [t * SIZE + place for place in range(SIZE) for t in range(FRAMES)]


def published(share: float, block: int, first_frame: bool) -> torch.Tensor:
    """Block pairs whose middles are less than the band's width apart, and the first frame's worth
    of slots: the same in both orders."""
    width = S * (1 - math.sqrt(1 - share))
    read = torch.zeros(S // block, S // block, dtype=torch.uint8)
    for i in range(S // block):
        for j in range(S // block):
            row, column = i * block + (block - 1) / 2, j * block + (block - 1) / 2
            read[i, j] = abs(row - column) < width or (first_frame and column <= SIZE)
    return read


def looking(kind: str, H: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """Heads whose queries find the keys of their own frame, or of their own place."""
    make = torch.Generator().manual_seed(seed)
    token = torch.arange(S)
    own = token // SIZE if kind == "space" else token % SIZE
    code = torch.randn(1, H, own.max() + 1, 32, generator=make)[:, :, own]
    v = torch.randn(1, H, S, 32, generator=make)
    return 3 * code, code, v


@pytest.mark.parametrize("first_frame", [True, False])
@pytest.mark.parametrize("share", [0.1, 0.25, 0.6])
def test_is_the_published_band(share: float, first_frame: bool) -> None:
    found = attend(
        *tensors(GRID), method=Svg(share, first_frame=first_frame, block_size=8), grid=GRID
    )
    assert found.plan is not None
    for levels in found.plan.levels[0]:
        assert torch.equal(levels, published(share, 8, first_frame))


@pytest.mark.parametrize(("kind", "choice"), [("space", 0), ("time", 1)])
def test_a_head_gets_the_order_it_looks_along(kind: str, choice: int) -> None:
    q, k, v = looking(kind)
    found = attend(q, k, v, method=Svg(block_size=8), grid=GRID)
    assert found.plan is not None
    assert found.plan.orders is not None
    assert found.plan.orders.choice is not None
    assert (found.plan.orders.choice == choice).all()
    wanted = [list(range(S)), place_by_place()][choice]
    assert found.plan.query_tokens(0).tolist() == found.plan.key_tokens(0).tolist() == wanted
    assert relative(found.out, sdpa(q, k, v)) < 0.1


def test_decides_as_a_loop_over_heads_rows_and_masks() -> None:
    """The mean squared error of sampled rows under each mask, against all keys."""
    mixed = zip(looking("space", 3), looking("time", 3, seed=1), strict=True)
    q, k, v = (torch.cat([0.3 * a, 0.3 * b], dim=1) for a, b in mixed)
    q += 0.5 * torch.randn(q.shape, generator=torch.Generator().manual_seed(2))
    rows = [(2 * i + 1) * S // 32 for i in range(16)]
    band = published(0.25, 8, True).bool().repeat_interleave(8, 0).repeat_interleave(8, 1)
    temporal = torch.empty_like(band)  # the band of the other order, token by token
    for a, row in enumerate(place_by_place()):
        temporal[row, place_by_place()] = band[a]
    choices = []
    for head in range(6):
        wrong = [0.0, 0.0]
        for row in rows:
            logits = k[0, head] @ q[0, head, row] * 32**-0.5
            exact = logits.softmax(0) @ v[0, head]
            for i, mask in enumerate((band[row], temporal[row])):
                seen = logits.masked_fill(~mask, -torch.inf).softmax(0) @ v[0, head]
                wrong[i] += float((seen - exact).square().mean())
        choices.append(int(wrong[1] < wrong[0]))
    found = attend(q, k, v, method=Svg(num_sampled_rows=16, block_size=8), grid=GRID)
    assert chosen(found) == choices
    assert 0 < sum(choices) < 6


def chosen(found: Attended) -> list[int]:
    assert found.plan is not None
    assert found.plan.orders is not None
    assert found.plan.orders.choice is not None
    return found.plan.orders.choice[0].tolist()


def test_heads_of_one_key_head_decide_together() -> None:
    space, time = looking("space", 1), looking("time", 1)
    q = torch.cat([time[0], time[0], space[0], time[0], space[0], space[0]], dim=1)
    k, v = (torch.cat([time[i], space[i]], dim=1) for i in (1, 2))
    found = attend(q, k, v, method=Svg(block_size=8), grid=GRID)
    assert chosen(found) == [1, 1, 1, 0, 0, 0]
    assert found.plan is not None
    assert found.plan.query_tokens(2).tolist() == place_by_place()
    assert found.plan.key_tokens(5).tolist() == list(range(S))


@pytest.mark.parametrize("side", ["front", "back"])
def test_text_stays_at_the_end_and_is_read(side: str) -> None:
    grid = TokenGrid.video(FRAMES, 5, 8, text=13, text_side=side)
    q, k, v = tensors(grid, B=2, H=4, kv=2)
    found = attend(q, k, v, method=Svg(0.4, block_size=8), grid=grid)
    plan = found.plan
    assert plan is not None
    text = list(range(13)) if side == "front" else list(range(S, S + 13))
    for batch in range(2):
        for head in range(4):
            assert plan.key_tokens(head, batch)[-13:].tolist() == text
            assert sorted(plan.key_tokens(head, batch).tolist()) == list(range(S + 13))
    assert (plan.levels[..., plan.layout.text_keys] == 1).all()
    assert (plan.levels[:, :, plan.layout.text_rows] == 1).all()
    assert not plan.layout.own.any()


def test_padded_keys_go_behind_the_real_ones_in_every_head() -> None:
    grid = TokenGrid.video(FRAMES, 5, 8, text=13, text_side="back")
    q, k, v = tensors(grid, H=3)
    mask = torch.rand(1, S + 13, generator=torch.Generator().manual_seed(0)) < 0.6
    found = attend(q, k, v, method=Svg(budget=1.0, block_size=8), grid=grid, key_mask=mask)
    assert found.plan is not None
    assert found.plan.padding is not None
    real = found.plan.padding.valid(S + 13)[0]
    count = int(mask[0, :S].sum())
    assert real[:count].all()
    assert not real[count:S].any()
    for head in range(3):
        assert torch.equal(mask[0, found.plan.key_tokens(head)], real)
    assert relative(found.out, sdpa(q, k[:, :, mask[0]], v[:, :, mask[0]])) < 1e-5


@pytest.mark.parametrize("budget", [0.05, 0.2, 0.5])
def test_a_budget_is_met_in_every_head(budget: float) -> None:
    q, k, v = tensors(GRID, H=3)
    found = attend(q, k, v, method=Svg(budget=budget, block_size=8), grid=GRID)
    assert found.plan is not None
    assert found.plan.costs.tolist()[0] == pytest.approx([budget] * 3, abs=0.01)
    diagonal = found.plan.levels.diagonal(dim1=2, dim2=3)
    assert diagonal.all() or budget < 0.1  # a band narrows before its middle is lost


def test_a_chunk_finds_its_places_among_the_keys() -> None:
    """Queries of the last two frames: the band lies at their end of the keys in space, and along
    all of them in time."""
    for kind in ("space", "time"):
        q, k, v = looking(kind)
        found = attend(
            q[:, :, -2 * SIZE :], k, v, method=Svg(first_frame=False, block_size=8),
            grid=TokenGrid.video(2, 5, 8), key_grid=GRID, offset=S - 2 * SIZE,
        )  # fmt: skip
        assert relative(found.out, sdpa(q[:, :, -2 * SIZE :], k, v)) < 0.1


def test_an_image_has_no_first_frame() -> None:
    q, k, v = tensors(256)
    found = attend(q, k, v, method=Svg(0.3, block_size=8), grid=(1, 16, 16))
    assert found.plan is not None
    assert found.plan.cost < 0.4


def test_a_total_along_a_run() -> None:
    q, k, v = tensors(GRID)
    method = Schedule(Svg(block_size=8), curve=Curve(0.4), dense_layers=())
    costs = []
    for step in range(6):
        plan = attend(q, k, v, method=method, grid=GRID, site=Site(step, 6, 0, 1)).plan
        costs.append(1.0 if plan is None else plan.cost)
    assert sum(costs) / 6 == pytest.approx(0.4, abs=0.03)


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"sparsity must be in \[0, 1\], got 2"):
        Svg(2.0)
    with pytest.raises(ValueError, match="num_sampled_rows must be at least 1, got 0"):
        Svg(num_sampled_rows=0)
    with pytest.raises(ValueError, match="causal"):
        attend(*tensors(64), method=Svg(), causal=True)
