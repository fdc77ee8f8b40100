"""Costs are exact: the share of logits that are computed, short blocks and padding included."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st

from jali import BlockPlan, Blocks, TokenGrid, attend, block_layout
from jali.backends.pyramid import pool
from jali.backends.reference import token_levels
from jali.kernels.lists import MEAN, group_size
from jali.methods import METHODS, Dense, make_method
from jali.planning.plan import full_plan
from jali.tokens.padding import KeyPadding


@st.composite
def paddings(draw: st.DrawFn, batch: int, tokens: int) -> KeyPadding | None:
    """None, lengths that the host or only the device knows, or a scattered mask."""
    kind = draw(st.sampled_from(["none", "host", "device", "mask"]))
    if kind == "none":
        return None
    if kind == "mask":
        make = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
        return KeyPadding(mask=torch.rand(batch, tokens, generator=make) < 0.6)
    lengths = tuple(draw(st.integers(0, tokens)) for _ in range(batch))
    if kind == "host":
        return KeyPadding.of_lengths(lengths, torch.device("cpu"))
    return KeyPadding(torch.tensor(lengths, dtype=torch.int32))


@st.composite
def plans(draw: st.DrawFn) -> BlockPlan:
    """Any sizes, so nearly every last block is short; one plan for all samples or heads, or not."""
    blocks = Blocks(draw(st.sampled_from([4, 16, 24])), draw(st.sampled_from([8, 16, 40])))
    Sq, Sk = draw(st.integers(1, 90)), draw(st.integers(1, 150))
    layout = block_layout(TokenGrid.flat(Sq), TokenGrid.flat(Sk), blocks=blocks)
    values = torch.tensor(
        draw(
            st.sampled_from(
                [[0, 1], [0, 1, 2, 4, 8], [0, 8], [0, 0, 0, 4], [0, 1, 8, MEAN], [0, MEAN]]
            )
        )
    )
    make = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))
    B, H = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    levels = values[torch.randint(0, len(values), (B, H, layout.M, layout.N), generator=make)]
    levels[..., 0] = torch.where((levels == 0).all(-1), values[-1], levels[..., 0])
    padding = draw(paddings(B if B > 1 else draw(st.integers(1, 2)), Sk))
    return replace(BlockPlan.from_levels(levels, layout), padding=padding)


def logits_computed(plan: BlockPlan) -> torch.Tensor:
    """How many logits of every head the reference does not mask. int64 [B, H]."""
    Sk, found = plan.layout.k.tokens, torch.zeros(1, 1, dtype=torch.int64)
    for level in plan.ratios:
        keys, ratio = torch.zeros(1, 1, Sk, 1), group_size(level, plan.blocks.k)
        count = pool(keys, keys, ratio, plan.padding)[2]
        read = token_levels(plan)[..., ::ratio] == level
        found = found + (read & (count > 0)[:, None, None]).sum((-2, -1))
    return found


@given(plans())
def test_a_cost_is_the_share_of_logits_that_are_computed(plan: BlockPlan) -> None:
    layout, read = plan.layout, logits_computed(plan)
    Sk = layout.k.tokens
    real = torch.ones(1, Sk) if plan.padding is None else plan.padding.valid(Sk)
    dense = layout.q.tokens * real.sum(-1).long()[:, None]
    listed = BlockPlan(layout, plan.ratios, given=plan.lists, padding=plan.padding)
    for one in (plan, listed):
        assert torch.equal(one.pairs_read, read)
        assert torch.equal(one.pairs_of_dense, dense)
        wanted = read.double() / dense.clamp_min(1)
        torch.testing.assert_close(one.costs.double(), wanted, rtol=1e-6, atol=0)
        # Of a batch: all that is computed over all that there is, not the mean of shares.
        whole = (dense + 0 * read).sum()
        assert one.cost == pytest.approx(float(read.sum() / whole) if whole else 0)
    assert 0 <= plan.cost <= 1


@given(plans())
def test_everything_costs_exactly_one(plan: BlockPlan) -> None:
    everything = replace(full_plan(plan.layout), padding=plan.padding)
    assert everything.cost in ((0, 1) if plan.padding else (1,))  # 0 where no key is real
    assert everything.costs[everything.pairs_of_dense > 0].eq(1).all()


@given(plans(), st.integers(1, 4), st.integers(1, 4))
def test_coarser_blocks_cost_no_less_and_their_parts_as_much(
    plan: BlockPlan, q: int, k: int
) -> None:
    assume(MEAN not in plan.ratios)  # one mean of a larger block is less to read
    coarse = plan.coarsen(Blocks(plan.blocks.q * q, plan.blocks.k * k))
    assert coarse.padding is plan.padding
    assert (coarse.pairs_read >= plan.pairs_read).all()
    parts = coarse.coarsen(plan.blocks)
    assert torch.equal(parts.pairs_read, coarse.pairs_read)


def test_a_short_block_costs_what_it_has() -> None:
    """300 queries in blocks of 256 and 44, 160 keys in blocks of 128 and 32."""
    layout = block_layout(TokenGrid.flat(300), TokenGrid.flat(160), blocks=Blocks(256, 128))
    for levels, read in (
        ([[1, 0], [1, 0]], 300 * 128),
        ([[0, 1], [0, 1]], 300 * 32),
        ([[1, 0], [0, 1]], 256 * 128 + 44 * 32),
        ([[8, 8], [0, 4]], 256 * 20 + 44 * 8),
    ):
        plan = BlockPlan.from_levels(torch.tensor(levels)[None, None], layout)
        assert plan.cost == pytest.approx(read / (300 * 160))


@pytest.mark.parametrize("name", [name for name in METHODS if name != Dense.name])
@pytest.mark.parametrize("padded", [False, True])
def test_what_attend_reports_is_what_was_executed(name: str, padded: bool) -> None:
    """Every method, 5 × 7 × 9 tokens, blocks of the backend's own choice, padded keys."""
    g = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, 2, 315, 16, generator=g) for _ in range(3))
    lengths = [201, 315] if padded else None
    found = attend(q, k, v, method=make_method(name), grid=(5, 7, 9), key_length=lengths)
    assert found.plan is not None
    assert found.executed is not None
    keys = sum(lengths) if lengths else 2 * 315
    for plan in (found.plan, found.executed):
        read = (logits_computed(plan) + torch.zeros(2, 2)).sum()
        assert plan.cost == pytest.approx(float(read) / (2 * 315 * keys))
    assert found.executed.cost >= found.plan.cost - 1e-9
