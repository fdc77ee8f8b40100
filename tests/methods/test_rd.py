"""Rate–distortion planning: its table against the definition, its levels against brute force."""

from __future__ import annotations

import itertools

import pytest
import torch

from jali import Budget, Entropy, RateDistortion, TokenGrid, attend, make_method
from jali.backends import BACKENDS
from jali.methods.method import Query
from jali.methods.rd import ESTIMATES
from jali.planning.distortion import encode, error_table
from jali.planning.plan import MEAN, SKIP, BlockPlan
from jali.planning.site import Site
from jali.planning.tables import Tables
from jali.planning.tradeoff import choose_levels
from jali.tokens.layout import Blocks, block_layout
from jali.tokens.padding import KeyPadding

LEVELS = (2, 4, 8, MEAN, SKIP)
ALL = (2, 4, 8, "mean", "skip")


def tensors(batch=1, heads=2, kv_heads=2, tokens=200, dim=16, seed=0):
    dice = torch.Generator().manual_seed(seed)
    q = torch.randn(batch, heads, tokens, dim, generator=dice) * 2
    k, v = (torch.randn(batch, kv_heads, tokens, dim, generator=dice) for _ in range(2))
    return q, k, v


def structured(tokens=768, seed=0):
    """Keys and values that change slowly, as a video's do."""
    dice = torch.Generator().manual_seed(seed)
    walk = torch.randn(3, 1, 2, tokens, 16, generator=dice).cumsum(3)
    return tuple(x / x.std() * 2 for x in walk)


def change(q, k, v, row, block, level, scale, real):
    """Δ of one row and block, written out."""
    logits = (k @ q[row]) * scale
    logits[~real] = -torch.inf
    lse = logits.logsumexp(0)
    p = (logits - lse).exp()
    out = p @ v
    inside = [j for j in block if real[j]]
    total = sum((p[j] * (v[j] - out) for j in inside), torch.zeros_like(out))
    if level == SKIP:
        return total
    size = len(block) if level == MEAN else level
    for start in range(0, len(block), size):
        group = [j for j in block[start : start + size] if real[j]]
        if group:
            logit = k[group].mean(0) @ q[row] * scale + torch.tensor(len(group)).log()
            total = total - (logit - lse).exp() * (v[group].mean(0) - out)
    return total


@pytest.mark.parametrize("padded", [False, True])
def test_the_table_holds_mean_squared_changes(padded):
    q, k, v = tensors(heads=4, tokens=90)
    layout = block_layout(TokenGrid.flat(90), blocks=Blocks(32, 16))
    at = torch.tensor([[0, 7, 30], [33, 40, 63], [64, 70, 89]])
    real = torch.ones(90, dtype=torch.bool)
    padding = None
    if padded:
        real[77:] = False
        padding = KeyPadding(length=torch.tensor([77], dtype=torch.int32))
    k[:, :, ~real], v[:, :, ~real] = torch.nan, torch.nan
    table = error_table(q, k, v, layout, 0.25, at, LEVELS, padding)
    found = table.errors()
    for h, m, n in itertools.product(range(4), range(3), range(6)):
        block = list(range(16 * n, min(16 * n + 16, 90)))
        if padded and not real[block].any():
            continue
        for i, level in enumerate(LEVELS):
            args = (q[0, h], k[0, h // 2].nan_to_num(), v[0, h // 2].nan_to_num())
            rows = [change(*args, int(r), block, level, 0.25, real) for r in at[m]]
            want = torch.stack(rows).square().sum(-1).mean()
            top = 2.0 ** float(table.top[0, h])
            # A code is exact to an eighth of an octave.
            exact = pytest.approx(float(want), rel=0.1, abs=top * 1e-6)
            assert float(found[0, h, m, n, i]) == exact


def brute_force(errors, work, budget):
    """The least error over all choices of levels that cost no more than the budget."""
    pairs = errors.flatten(0, -2)
    best = None
    for choice in itertools.product(range(pairs.shape[1]), repeat=len(pairs)):
        cost = sum(work[c] for c in choice) / len(pairs)
        if cost <= budget + 1e-9:
            error = sum(float(pairs[i, c]) for i, c in enumerate(choice))
            best = error if best is None else min(best, error)
    return best


def test_levels_err_least_among_those_of_their_cost():
    # Prices reach the points on the convex hull; at the cost of such a point nothing errs less.
    layout = block_layout(TokenGrid.flat(32), TokenGrid.flat(48), blocks=Blocks(16, 16))
    dice = torch.Generator().manual_seed(1)
    errors = torch.rand(1, 1, 2, 3, 2, generator=dice).sort(-1).values
    table = encode(errors, (4, SKIP))
    for budget in (0.2, 0.4, 0.6, 0.9):
        levels = choose_levels(table, layout, budget)
        work = {1: 1.0, 4: 0.25, SKIP: 0.0}
        cost = sum(work[int(x)] for x in levels.flatten()) / 6
        assert cost <= budget + 1e-6
        index = {1: 0, 4: 1, SKIP: 2}
        full = torch.cat([torch.zeros_like(errors[..., :1]), table.errors()], -1)
        ours = sum(
            float(full[0, 0, m, n, index[int(levels[0, 0, m, n])]])
            for m, n in itertools.product(range(2), range(3))
        )
        best = brute_force(full, [1.0, 0.25, 0.0], cost)
        assert ours <= best * 1.1 + 1e-6


@pytest.mark.parametrize("padded", [False, True])
def test_the_price_is_the_lowest_that_costs_no_more(padded):
    # Errors in any order: some levels are never the best of a block. Short blocks have levels that
    # cost the same.
    layout = block_layout(TokenGrid.flat(200), blocks=Blocks(16, 16))
    dice = torch.Generator().manual_seed(2)
    errors = torch.rand(2, 2, 13, 13, 5, generator=dice) ** 8
    errors[..., ::3, 1] = 0.0
    padding = KeyPadding(length=torch.tensor([150, 177])) if padded else None
    table = encode(errors, LEVELS)

    def cost(**asked):
        levels = choose_levels(table, layout, padding=padding, **asked)
        return BlockPlan(layout, (1, 2, 4, 8, MEAN), map=levels, padding=padding).costs.mean(1)

    prices = torch.logspace(-12, 1, 400, base=10).tolist()
    costs = torch.stack([cost(price=price) for price in prices])  # [prices, B]
    for budget in (0.1, 0.2, 0.5, 0.8):
        found = cost(budget=budget)
        best = torch.where(costs <= budget, costs, 0).amax(0)
        assert bool((found <= budget).all())
        assert bool((found >= best - 1e-4).all())


@pytest.mark.parametrize("budget", [0.05, 0.1, 0.3, 0.6, 1.0])
def test_it_costs_its_budget(budget):
    q, k, v = structured()
    method = RateDistortion(budget, q_block=32, k_block=32)
    found = attend(q, k, v, method=method, grid=(3, 16, 16))
    own = 1 / 24  # of every row of blocks, always read
    assert max(own, budget) - 0.02 <= found.plan.cost <= max(own, budget) + 1e-3


def test_at_one_it_is_dense():
    q, k, v = tensors()
    found = attend(q, k, v, method=RateDistortion(1.0, q_block=32, k_block=32))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    torch.testing.assert_close(found.out, dense, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("estimate", ESTIMATES)
@pytest.mark.parametrize("budget", [0.1, 0.2, 0.4])
def test_it_errs_less_than_mass_at_the_same_cost(budget, estimate):
    q, k, v = structured()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def error(method):
        found = attend(q, k, v, method=method, grid=(3, 16, 16))
        return float((found.out - dense).norm() / dense.norm())

    blocks = {"q_block": 32, "k_block": 32}
    mine = error(RateDistortion(budget, samples=8, estimate=estimate, **blocks))
    other = error(Entropy(Budget(budget), samples=8, **blocks))
    assert mine < other


def test_samples_do_not_share_their_budget():
    # A clip must not depend on what it is batched with.
    a, b = structured(seed=1), structured(seed=2)
    both = [torch.cat(pair) for pair in zip(a, b, strict=True)]
    method = RateDistortion(0.2, q_block=32, k_block=32)
    alone = attend(*a, method=method, grid=(3, 16, 16)).plan.levels
    together = attend(*both, method=method, grid=(3, 16, 16)).plan.levels
    assert torch.equal(alone[0], together[0])


def test_text_is_read_in_full_and_reads_all():
    grid = TokenGrid.video(3, 16, 16, text=20)
    q, k, v = (torch.cat([x, x[:, :, :20]], 2) for x in structured())
    plan = attend(q, k, v, method=RateDistortion(0.2, q_block=32, k_block=32), grid=grid).plan
    assert bool((plan.levels[:, :, plan.layout.text_rows] == 1).all())
    assert bool((plan.levels[..., plan.layout.text_keys] == 1).all())
    mixed = plan.levels[..., plan.layout.mixed_keys]
    assert bool(((mixed == 1) | (mixed == SKIP)).all())


def test_a_price_follows_the_content():
    q, k, v = structured()
    costs = [
        attend(q, k, v, method=RateDistortion(price=price, q_block=32, k_block=32)).plan.cost
        for price in (1e-9, 1e-3, 1e3)
    ]
    assert costs[0] > costs[1] > costs[2]


def test_levels_that_are_not_allowed_do_not_occur():
    q, k, v = structured()
    method = RateDistortion(0.3, levels=("mean",), q_block=32, k_block=32)
    found = attend(q, k, v, method=method).plan.levels.unique().tolist()
    assert found == [1, MEAN]


@pytest.mark.parametrize("levels", [("mean", "skip"), (4, "skip"), (4,)])
def test_a_tail_skips_nothing_and_keeps_to_the_budget(levels):
    q, k, v = structured()
    method = RateDistortion(0.2, levels=levels, tail=True, q_block=32, k_block=32)
    assert SKIP not in method.codes
    assert MEAN in method.ratios
    plan = attend(q, k, v, method=method, grid=(3, 16, 16)).plan
    assert not (plan.levels == SKIP).any()
    assert (plan.levels == MEAN).any()
    assert plan.cost <= 0.2


def test_an_option_of_another_method_is_named_with_it():
    with pytest.raises(ValueError, match=r"rd has no option 'sharpness' \(an option of entropy\)"):
        make_method("rd", sharpness=2.0)


def test_a_level_that_costs_more_is_taken_less():
    q, k, v = structured()
    blocks = {"q_block": 32, "k_block": 32}

    def pooled(costs):
        method = RateDistortion(0.3, levels=ALL, costs=costs, **blocks)
        levels = attend(q, k, v, method=method, grid=(3, 16, 16)).plan.levels
        return [float((levels == level).float().mean()) for level in (2, 4, 8, MEAN)]

    work = {2: 0.5, 4: 0.25, 8: 0.125, "mean": 1 / 32}
    assert pooled(work) == pooled({})
    assert pooled({8: 1.0})[2] == 0 < pooled({})[2]
    cheap, dear = pooled({2: 0.3}), pooled({2: 0.9})
    assert cheap[0] > dear[0]


def test_the_budget_is_in_the_units_of_the_costs():
    q, k, v = structured()
    costs = {2: 0.9, 4: 0.6, 8: 0.4, "mean": 0.1}
    method = RateDistortion(0.3, costs=costs, q_block=32, k_block=32)
    levels = attend(q, k, v, method=method, grid=(3, 16, 16)).plan.levels
    share = {1: 1.0, 2: 0.9, 4: 0.6, 8: 0.4, MEAN: 0.1, SKIP: 0.0}
    cost = sum(value * float((levels == level).float().mean()) for level, value in share.items())
    assert 0.29 <= cost <= 0.3 + 1e-4


def test_costs_by_time_are_those_of_the_backend_that_runs(monkeypatch):
    q, k, v = structured()
    options = {"q_block": 32, "k_block": 32}

    def levels(costs):
        method = RateDistortion(0.3, costs=costs, **options)
        return attend(q, k, v, method=method, grid=(3, 16, 16), backend="torch").plan.levels

    measured = {2: 0.9, 8: 0.3, MEAN: 0.05}
    monkeypatch.setattr(type(BACKENDS["torch"]), "level_times", measured)
    assert torch.equal(levels("time"), levels({2: 0.9, 8: 0.3, "mean": 0.05}))
    monkeypatch.setattr(type(BACKENDS["torch"]), "level_times", {})
    assert torch.equal(levels("time"), levels({}))  # nothing measured: by work


def test_costs_are_part_of_a_methods_value():
    pairs = RateDistortion(costs=((8, 0.2), (2, 0.6)))
    assert pairs == RateDistortion(costs={2: 0.6, 8: 0.2})
    assert hash(pairs) == hash(RateDistortion(costs={2: 0.6, 8: 0.2}))
    assert pairs != RateDistortion()


def test_a_table_serves_its_period():
    q, k, v = structured()
    tables, method = Tables(), RateDistortion(0.2, keep=0.5, q_block=32, k_block=32)

    def run(step, x=1.0):
        return attend(
            q * x, k, v, method=method, grid=(3, 16, 16), site=Site(step, 8), tables=tables
        ).plan.levels

    first = run(0)
    assert torch.equal(first, run(3, x=5.0))  # other numbers, the same table
    assert tables.made == 1
    run(4)
    assert tables.made == 2
    run(4, x=5.0)
    tables.clear()
    run(4)
    assert tables.made == 3


def test_another_shape_makes_its_own_table():
    tables, method = Tables(), RateDistortion(0.2, q_block=32, k_block=32)
    for grid in ((3, 16, 16), (2, 16, 16)):
        q, k, v = structured(tokens=grid[0] * 256)
        attend(q, k, v, method=method, grid=grid, tables=tables)
    assert tables.made == 2


def test_a_table_of_other_levels_does_not_serve():
    q, k, v = structured()
    tables, blocks = Tables(), {"q_block": 32, "k_block": 32}
    attend(q, k, v, method=RateDistortion(0.2, **blocks), tables=tables)
    few = RateDistortion(0.2, levels=(8, "skip"), **blocks)
    assert attend(q, k, v, method=few, tables=tables).plan.ratios == (1, 8)
    levels = attend(q, k, v, method=few, tables=tables).plan.levels
    assert set(levels.unique().tolist()) <= {0, 1, 8}
    assert tables.made == 2


def test_tables_stay_within_their_limit():
    q, k, v = structured()
    method = RateDistortion(0.2, levels=ALL, q_block=32, k_block=32)
    size = 2 * 24 * 24 * len(LEVELS)

    def run(limit):
        tables = Tables(limit)
        for branch in ("cond", "uncond"):
            site = Site(branch=branch)
            attend(q, k, v, method=method, grid=(3, 16, 16), site=site, tables=tables)
        return tables.made, tables.bytes

    assert run(2 * size) == (2, 2 * size)  # one for each branch
    assert run(2 * size - 1) == (1, size)  # shared
    assert run(size - 1) == (2, 0)  # made anew in every call


@pytest.mark.parametrize("method", ["rd", "entropy"])
def test_what_is_no_tables_is_refused(method):
    q, k, v = tensors()
    with pytest.raises(TypeError, match=r"tables must be a Tables\(\), .*; got {}"):
        attend(q, k, v, method=method, tables={})
    with pytest.raises(TypeError, match="limit must be an int, got '8GB'"):
        Tables("8GB")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"budget": 1.5}, "budget must be"),
        ({"price": 0.0}, "price must be a finite number above 0, got 0.0"),
        ({"price": -1.0}, "above 0, got -1.0"),
        ({"price": "0.1"}, "above 0, got '0.1'"),
        ({"price": True}, "above 0, got True"),
        ({"levels": (3,)}, "levels are some of 2, 4, 8, mean, skip, got 3"),
        ({"levels": ()}, "levels are some of"),
        ({"k_block": 36, "levels": (8, "skip")}, "cannot be pooled 8×"),
        ({"samples": 0}, "samples must be at least 1"),
        ({"keep": 1.5}, "keep must be in"),
        ({"costs": {3: 0.5}}, "costs are shares of the levels 2, 4, 8, mean, .* got one of 3"),
        ({"costs": {"skip": 0.5}}, "got one of 'skip'"),
        ({"costs": {2: 1.5}}, r"the cost of level 2 must be in \[0, 1\], got 1.5"),
        ({"costs": {2: float("nan")}}, "the cost of level 2 must be in"),
        ({"costs": "money"}, "costs are shares of the levels .* or 'time', got 'money'"),
        ({"estimate": "rows"}, "estimate must be 'samples', 'statistics' or 'mixed', got 'rows'"),
    ],
)
def test_what_cannot_be_is_refused(options, words):
    with pytest.raises(ValueError, match=words):
        RateDistortion(**options)


def test_it_cannot_be_causal():
    q, k, v = tensors()
    with pytest.raises(ValueError, match="rd cannot be causal"):
        attend(q, k, v, method=RateDistortion(), causal=True)


def test_a_query_without_values_is_a_mistake_of_the_caller():
    q, k, _ = tensors()
    layout = block_layout(TokenGrid.flat(200), blocks=Blocks(128, 128))
    with pytest.raises(ValueError, match="reads values"):
        RateDistortion().plan(Query(q, k, layout, Site(), 0.25))
