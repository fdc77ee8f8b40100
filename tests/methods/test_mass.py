"""Mass targets (LoSA): against exact masses in plain loops, and what is kept along a run."""

from __future__ import annotations

import itertools

import pytest
import torch

from jali import Curve, Mass, RateDistortion, Schedule, Site, Tables, TokenGrid, attend, make_method
from jali.planning.mass import exact_masses
from jali.planning.tables import period_of
from jali.tokens.layout import Blocks, block_layout
from jali.tokens.padding import KeyPadding
from oracle import blocks_of, tensors

BLOCKS = {"q_block": 16, "k_block": 8}


def masses(q, k, q_block, k_block, scale, real):
    """Of one head: the mean over a block's queries of the softmax over real keys. [M, N]."""
    weights = (q @ k.nan_to_num().T * scale).masked_fill(~real, -torch.inf).softmax(-1)
    found = [
        [weights[list(rows)][:, list(keys)].sum(-1).mean() for keys in blocks_of(len(k), k_block)]
        for rows in blocks_of(len(q), q_block)
    ]
    return torch.tensor(found)


@pytest.mark.parametrize("tokens", [64, 75])
@pytest.mark.parametrize("padded", [False, True])
def test_exact_masses_against_loops(tokens, padded):
    q, k, _ = tensors(tokens, B=2, H=4, kv=2, dtype=torch.float64)
    real, padding = torch.ones(2, tokens, dtype=torch.bool), None
    if padded:
        real[0, 50:] = False
        padding = KeyPadding(length=torch.tensor([50, tokens], dtype=torch.int32))
        k = torch.where(real[:, None, :, None], k, torch.nan)
    layout = block_layout(TokenGrid.flat(tokens), blocks=Blocks(16, 8))
    found = exact_masses(q, k, layout, 0.25, padding)
    for b, h in itertools.product(range(2), range(4)):
        wanted = masses(q[b, h], k[b, h // 2], 16, 8, 0.25, real[b])
        torch.testing.assert_close(found[b, h], wanted.double(), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize(
    ("grid", "kv", "theta"),
    [
        (TokenGrid.video(3, 9, 10), 2, 0.9),
        (TokenGrid.video(2, 8, 11, text=20), 4, 0.6),
        (TokenGrid.video(2, 8, 8, text=5, text_side="back"), 1, 0.99),
    ],
)
def test_the_plan_is_the_shortest_prefix_that_holds_theta(grid, kv, theta):
    q, k, v = tensors(grid, B=2, H=4, kv=kv, dtype=torch.float64)
    plan = attend(q, k, v, method=Mass(theta, **BLOCKS), grid=grid).plan
    layout, real = plan.layout, torch.ones(grid.tokens, dtype=torch.bool)
    text = set(layout.text_keys.nonzero()[:, 0].tolist())
    for b, h in itertools.product(range(2), range(4)):
        exact = masses(q[b, h], k[b, h // (4 // kv)], 16, 8, 0.25, real)
        for m in range(layout.M):
            order = sorted(range(layout.N), key=lambda n, row=exact[m]: -row[n])
            running = list(itertools.accumulate(float(exact[m, n]) for n in order))
            read = set(plan.levels[b, h, m].nonzero()[:, 0].tolist())
            if layout.text_rows[m]:
                assert read == set(range(layout.N))
                continue
            wanted = [n for n, before in zip(order, [0, *running], strict=False) if before < theta]
            always = text | {2 * m, 2 * m + 1} & set(range(layout.N))
            # Masses are kept as halves: what lies within one of them may fall on either side.
            close = {
                n for n, before in zip(order, [0, *running], strict=False)
                if abs(before - theta) < 5e-3 * (1 - theta)
            }  # fmt: skip
            assert read - close == (set(wanted) | always) - close


@pytest.mark.parametrize("mean", [0.1, 0.3, 0.8])
def test_a_budget_is_met(mean):
    grid = TokenGrid.video(4, 16, 16)
    q, k, v = tensors(grid, B=2, H=4)
    q[:, 0] *= 0.1
    q[1, 1] *= 4
    plan = attend(q, k, v, method=Mass(**BLOCKS).with_budget(mean), grid=grid).plan
    for b, cost in enumerate(plan.costs.mean(1).tolist()):
        assert cost == pytest.approx(mean, abs=16 * 8 / 1024**2)
        assert plan.costs[b, 0] > plan.costs[b, 2]  # a flat head needs more
    assert Mass().mean_budget is None


class TestARun:
    grid = TokenGrid.video(4, 8, 16)

    def run(self, method, step, tables, *, x=1.0, **where):
        q, k, v = tensors(self.grid, H=2, seed=3)
        site = Site(step, 10, **where)
        return attend(q * x, k, v, method=method, grid=self.grid, site=site, tables=tables)

    def test_one_look_serves_the_rest_of_it(self):
        tables, method = Tables(), Mass(0.9, **BLOCKS)
        first = self.run(method, 3, tables)
        assert first.planning == 0.5
        for step in (4, 9):
            later = self.run(method, step, tables, x=0.2)  # other numbers, the same masses
            assert torch.equal(later.plan.levels, first.plan.levels)
            assert later.planning == 0
        assert tables.made == 1
        fresh = self.run(method, 4, None, x=0.2)
        assert not torch.equal(fresh.plan.levels, first.plan.levels)

    def test_budgets_that_change_need_no_other_look(self):
        tables = Tables()
        method = Schedule(Mass(**BLOCKS), dense_steps=2, curve=Curve(0.5))
        costs = []
        for step in range(2, 10):
            done = self.run(method, step, tables, x=1 + step / 5)
            costs.append(done.plan.cost)
        assert tables.made == 1
        assert costs == sorted(costs, reverse=True)
        assert (2 + sum(costs)) / 10 == pytest.approx(0.5, abs=0.01)

    def test_branches_layers_and_shapes_look_for_themselves(self):
        tables, method = Tables(), Mass(0.9, **BLOCKS)
        conditional = self.run(method, 3, tables).plan.levels
        other = self.run(method, 3, tables, x=0.2, branch="uncond").plan.levels
        assert not torch.equal(conditional, other)
        assert torch.equal(self.run(method, 5, tables, x=7.0).plan.levels, conditional)
        assert torch.equal(
            self.run(method, 5, tables, x=7.0, branch="uncond").plan.levels, other
        )  # fmt: skip
        self.run(method, 5, tables, layer=1, layers=2)
        self.run(method, 5, tables, transformer="transformer_2")
        assert tables.made == 4
        self.run(Mass(0.5, **BLOCKS), 6, tables)  # the same masses, another share of them
        assert tables.made == 4
        self.run(Mass(0.9, q_block=16, k_block=16), 6, tables)  # other blocks
        self.run(RateDistortion(0.4, **BLOCKS), 6, tables)  # another kind of table
        self.run(RateDistortion(0.4, **BLOCKS), 7, tables)
        assert tables.made == 6

    def test_steps_count_by_their_place(self):
        tables, method = Tables(), Mass(0.9, keep=0.5, **BLOCKS)
        for step, made in ((3, 1), (4, 1), (5, 2), (9, 2), (5, 2)):
            self.run(method, step, tables)
            assert tables.made == made
        assert [period_of(Site(s, 10), 1.0) for s in (0, 3, 9)] == [0, 0, 0]
        assert [period_of(Site(s, 10), 4) for s in (0, 3, 4, 9)] == [0, 0, 1, 2]

    def test_what_is_kept_is_small_and_bounded(self):
        size = 2 * 32 * 64 * 2  # heads, query blocks, key blocks, bytes
        for limit, made, held in ((2 * size, 2, 2 * size), (size, 1, size), (size - 1, 2, 0)):
            tables = Tables(limit)
            for branch in ("cond", "uncond"):
                self.run(Mass(0.9, **BLOCKS), 3, tables, branch=branch)
            assert (tables.made, tables.bytes) == (made, held)


def test_bad_input_is_refused_in_words():
    with pytest.raises(ValueError, match=r"theta must be in \[0, 1\], got 99"):
        Mass(99)
    with pytest.raises(ValueError, match=r"keep must be in \[0, 1\], got 1.5"):
        Mass(keep=1.5)
    with pytest.raises(ValueError, match="mass has no option 'thet'; did you mean 'theta'"):
        make_method("mass", thet=0.9)
    q, k, v = tensors(64)
    with pytest.raises(ValueError, match="mass cannot be causal: its scores know keys to come"):
        attend(q, k, v, method=Mass(), causal=True)
