"""Plans: levels and lists, density, coarsening, pictures. (What they cost: test_cost.py.)"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jali import BlockPlan, Blocks, TokenGrid, block_layout
from jali.kernels.lists import MEAN, BlockList, StackedLists, StackedListsSpec
from jali.planning.plan import full_plan
from jali.tokens.layout import BlockLayout


def layout_of(M: int, N: int, q: int = 16, k: int = 16) -> BlockLayout:
    return block_layout(TokenGrid.flat(M * q - 3), TokenGrid.flat(N * k - 5), blocks=Blocks(q, k))


@st.composite
def plans(draw: st.DrawFn) -> BlockPlan:
    M, N = draw(st.integers(1, 9)), draw(st.integers(1, 9))
    B, H = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    make = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    values = torch.tensor(draw(st.sampled_from([[0, 1], [0, 1, 2, 4, 8], [0, 8], [0, 0, 0, 4]])))
    levels = values[torch.randint(0, len(values), (B, H, M, N), generator=make)]
    levels[..., 0] = torch.where((levels == 0).all(-1), values[-1], levels[..., 0])
    return BlockPlan.from_levels(levels, layout_of(M, N))


@given(plans())
def test_lists_and_levels_say_the_same(plan: BlockPlan) -> None:
    lists = plan.lists
    B, H, M, N = plan.levels.shape
    for ratio, part in lists.items():
        assert part.counts.dtype == part.indices.dtype == torch.int32
        assert (part.indices >= 0).all()
        assert (part.indices < N).all(), "a list points outside the keys"
        for b in range(B):
            for h in range(H):
                for m in range(M):
                    count = int(part.counts[b, h, m])
                    listed = part.indices[b, h, m, :count].tolist()
                    wanted = (plan.levels[b, h, m] == ratio).nonzero().flatten().tolist()
                    assert listed == wanted
    again = BlockPlan(plan.layout, plan.ratios, given=lists)
    assert torch.equal(again.levels, plan.levels)
    assert again.cost == pytest.approx(plan.cost)
    assert again.density == pytest.approx(plan.density)
    torch.testing.assert_close(again.costs, plan.costs)


@given(plans())
def test_density_against_brute_force(plan: BlockPlan) -> None:
    flat = plan.levels.flatten().tolist()
    assert plan.density == pytest.approx(sum(x > 0 for x in flat) / len(flat))


@given(
    plans(), st.sampled_from([(32, 16), (16, 48), (64, 64), (16, 16), (24, 16), (8, 8), (16, 40)])
)
def test_coarsen_is_a_superset_that_keeps_the_finest(
    plan: BlockPlan, sizes: tuple[int, int]
) -> None:
    coarse = plan.coarsen(Blocks(*sizes))
    assert coarse.blocks == Blocks(*sizes)
    B, H, M, N = plan.levels.shape

    def parts(i: int, size: int, count: int) -> range:
        """The blocks of 16 that a larger or smaller block shares tokens with."""
        return range(i * size // 16, min(count, -(-(i + 1) * size // 16)))

    for b in range(B):
        for h in range(H):
            for m in range(coarse.layout.M):
                for n in range(coarse.layout.N):
                    levels = [
                        int(plan.levels[b, h, x, y])
                        for x in parts(m, sizes[0], M)
                        for y in parts(n, sizes[1], N)
                    ]
                    read = [x for x in levels if x]
                    assert int(coarse.levels[b, h, m, n]) == (min(read) if read else 0)


def test_lists_shared_between_heads() -> None:
    layout = layout_of(2, 3)
    one = BlockList(torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[2, 0], [0, 1]]]]).int())
    two = BlockList(
        torch.tensor([[[1, 0], [0, 1]]]).int(),
        torch.tensor([[[[1], [0]], [[0], [2]]]]).int(),
    )
    plan = BlockPlan(layout, (1, 2), given={1: one, 2: two})
    assert plan.levels.tolist() == [[[[0, 2, 1], [1, 1, 0]], [[0, 0, 1], [1, 1, 2]]]]
    # 29 queries in blocks of 16 and 13, 43 keys in blocks of 16, 16 and 11.
    read = 2 * (16 * 11 + 13 * 32) + 16 * 8 + 13 * 6
    assert plan.pairs_read.sum() == read
    assert plan.cost == pytest.approx(read / (2 * 29 * 43))


@pytest.mark.parametrize("bad", [3, 16, 257, 256, -1, 1.5])
def test_from_levels_refuses_unknown_levels(bad: float) -> None:
    levels = torch.ones(1, 1, 2, 3, dtype=torch.float64 if isinstance(bad, float) else torch.int64)
    levels[0, 0, 1, 2] = bad
    with pytest.raises(ValueError, match=rf"levels are 0, 1, 2, 4, 8 or MEAN \(254\), got .*{bad}"):
        BlockPlan.from_levels(levels, layout_of(2, 3))


def test_from_levels_refuses_empty_rows_and_wrong_shapes() -> None:
    levels = torch.ones(1, 2, 2, 3, dtype=torch.uint8)
    levels[0, 1, 0] = 0
    with pytest.raises(ValueError, match="at least one key block"):
        BlockPlan.from_levels(levels, layout_of(2, 3))
    with pytest.raises(ValueError, match=r"2, 3"):
        BlockPlan.from_levels(torch.ones(1, 1, 3, 2), layout_of(2, 3))
    with pytest.raises(ValueError, match="multiple of 8"):
        BlockPlan.from_levels(torch.full((1, 1, 2, 3), 8), layout_of(2, 3, k=12))


def test_refuses_two_forms_or_none() -> None:
    layout = layout_of(2, 3)
    with pytest.raises(ValueError, match="one of the two"):
        BlockPlan(layout, (1,))
    with pytest.raises(ValueError, match="ascending"):
        BlockPlan(layout, (2, 1), map=torch.ones(1, 1, 2, 3, dtype=torch.uint8))


def test_full_plan() -> None:
    layout = block_layout(TokenGrid.flat(64), blocks=Blocks(16, 16))
    assert full_plan(layout).cost == 1
    assert torch.equal(full_plan(layout, True).levels[0, 0].bool(), torch.ones(4, 4).tril().bool())


def test_show_is_a_picture_in_text() -> None:
    levels = torch.tensor([[[[1, 0, 0], [0, 8, 0]], [[1, 0, 0], [0, 0, 1]]]])
    plan = BlockPlan.from_levels(levels, layout_of(2, 3))
    text = plan.show(head=0).splitlines()
    assert "2 query × 3 key blocks of 16×16" in text[0]
    assert "head 0" in text[0]
    assert text[0].endswith(f"cost {(16 * 16 + 13 * 2) / (29 * 43):.3f}")  # of that head alone
    assert text[1] == "█  "
    assert text[2][0] == text[2][2] == " "
    assert text[2][1] not in " █"
    assert plan.show().splitlines()[0].endswith(f"mean over heads: cost {plan.cost:.3f}")
    wide = full_plan(block_layout(TokenGrid.flat(5000), blocks=Blocks(16, 16))).show(width=20)
    assert all(line == "█" * 20 for line in wide.splitlines()[1:])
    assert len(wide.splitlines()) == 11


def test_show_refuses_a_head_that_is_not_there() -> None:
    plan = BlockPlan.from_levels(torch.ones(1, 2, 2, 3), layout_of(2, 3))
    for wrong in ({"head": 2}, {"batch": 1}):
        with pytest.raises(IndexError):
            plan.show(**wrong)


def test_figure() -> None:
    pytest.importorskip("matplotlib")
    levels = torch.tensor([[[[1, 0, 0], [0, 8, 0]]]])
    plan = BlockPlan.from_levels(levels, layout_of(2, 3))
    figure = plan.figure()
    axes = figure.axes[0]
    assert axes.images[0].get_array().tolist() == [[1, 0, 0], [0, 0.125, 0]]
    assert "cost" in axes.get_title()
    assert "query blocks of 16" in axes.get_ylabel()


@given(plans())
def test_tally_and_work_are_those_of_the_levels(plan: BlockPlan) -> None:
    """By levels, by lists made on demand and by given lists alike."""
    listed = BlockPlan(plan.layout, plan.ratios, given=plan.lists)
    parts = [plan.lists[ratio] for ratio in plan.ratios]
    counts, indices = (torch.stack(x) for x in zip(*parts, strict=True))
    stack = StackedLists(StackedListsSpec(plan.ratios, indices.shape), counts, indices)
    stacked = BlockPlan(plan.layout, plan.ratios, given=stack)
    fresh = BlockPlan(plan.layout, plan.ratios, map=plan.levels)
    assert torch.equal(stacked.levels, plan.levels)
    for one in (plan, listed, stacked, fresh):
        tally = dict(zip(plan.ratios, one.tally, strict=True))
        for ratio, count in tally.items():
            assert torch.equal(count, (plan.levels == ratio).sum((-2, -1)))
        assert torch.equal(one.pairs_read, plan.pairs_read)


def test_a_plan_is_shown_in_one_line_without_its_numbers() -> None:
    layout = layout_of(2, 3, 128, 64)
    levels = torch.empty(3, 12, 2, 3, dtype=torch.uint8, device="meta")  # holds none
    plan = BlockPlan(layout, (1, 2, 4), map=levels)
    assert repr(plan) == "BlockPlan(3×12 heads, 2×3 blocks of 128×64, ratios 1/2/4)"
    lists = {
        1: BlockList(torch.empty(1, 12, 2, device="meta"), torch.empty(1, 12, 2, 3, device="meta")),
        8: BlockList(torch.empty(3, 1, 2, device="meta"), torch.empty(3, 1, 2, 3, device="meta")),
    }
    plan = BlockPlan(layout, (1, 8), given=lists, causal=True)
    assert plan.shape == (3, 12, 2, 3)
    assert repr(plan) == "BlockPlan(3×12 heads, 2×3 blocks of 128×64, ratios 1/8, causal)"


def test_a_mean_is_that_of_the_block_it_stands_in() -> None:
    # Cut, every part is read as one mean; joined, the finest part decides, and means become one.
    layout = block_layout(TokenGrid.flat(64), blocks=Blocks(32, 16))
    levels = torch.tensor([[MEAN, MEAN, 1, 0], [MEAN, 0, MEAN, 8]])[None, None]
    plan = BlockPlan.from_levels(levels, layout)
    assert plan.coarsen(Blocks(32, 32)).levels.tolist() == [[[[MEAN, 1], [MEAN, 8]]]]
    cut = plan.coarsen(Blocks(32, 8)).levels[0, 0]
    assert cut[0].tolist() == [MEAN] * 4 + [1, 1, 0, 0]
    assert plan.pairs_read.tolist() == [[32 * (1 + 1 + 16) + 32 * (1 + 1 + 2)]]
    assert "mean" in repr(plan)


def test_a_tail_reads_what_was_skipped() -> None:
    layout = block_layout(TokenGrid.flat(64), blocks=Blocks(32, 16))
    levels = torch.tensor([[1, 0, 0, 2], [0, 1, 0, 0]])[None, None]
    tailed = BlockPlan.from_levels(levels, layout).with_tail()
    assert tailed.levels.tolist() == [[[[1, MEAN, MEAN, 2], [MEAN, 1, MEAN, MEAN]]]]
    assert tailed.ratios == (1, 2, MEAN)
    with pytest.raises(ValueError, match="cannot be causal"):
        replace(tailed, causal=True).with_tail()
