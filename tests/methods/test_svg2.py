"""Sparse VideoGen 2 on balanced clusters, against its rule written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from jali import Curve, Gilbert, Mass, Schedule, Site, Svg2, Tables, TokenGrid, attend, make_method
from jali.planning import cluster
from jali.planning.cluster import balanced_order, clusters_share, second_moment
from jali.planning.plan import BlockPlan
from oracle import relative, sdpa, tensors

SMALL = {"q_block": 16, "k_block": 8}


def planned(method: Svg2, q: torch.Tensor, k: torch.Tensor, grid: TokenGrid) -> BlockPlan:
    plan = attend(q, k, torch.zeros_like(k), method=method, grid=grid).plan
    assert plan is not None
    return plan


def published(q: torch.Tensor, k: torch.Tensor, rows: list, keys: list, p: float, least: float):
    """Which clusters of keys each cluster of queries reads, for one head."""
    read = torch.zeros(len(rows), len(keys), dtype=torch.uint8)
    for i, row in enumerate(rows):
        weights = []
        for key in keys:
            logit = float(q[row].mean(0) @ k[key].mean(0)) * q.shape[1] ** -0.5
            weights.append(len(key) * math.exp(logit))
        before = 0.0
        order = sorted(range(len(keys)), key=lambda j: -weights[j])
        for place, j in enumerate(order):
            if before <= p * sum(weights) or place < int(least * len(keys)):
                read[i, j] = 1
            before += weights[j]
    return read


@pytest.mark.parametrize(("p", "least"), [(0.9, 0.1), (0.5, 0.0), (0.3, 0.4), (0.0, 0.0)])
def test_keeps_the_published_clusters(p: float, least: float) -> None:
    grid = TokenGrid.video(3, 7, 9)  # 189 tokens: the last blocks are short
    q, k, _ = tensors(grid, B=2, H=4, kv=2)
    plan = planned(Svg2(p, least, **SMALL), q, k, grid)
    for b in range(2):
        for h in range(4):
            rows = plan.query_tokens(h, b).split(16)
            keys = plan.key_tokens(h, b).split(8)
            wanted = published(q[b, h], k[b, h // 2], rows, keys, p, least)
            assert torch.equal(plan.levels[b, h], wanted)


@pytest.mark.parametrize("metric", ["products", "distance"])
def test_halves_along_the_main_direction(metric: str) -> None:
    make = torch.Generator().manual_seed(0)
    spread = torch.tensor([9.0, 4.0, 2.0, 1.0, 0.3])
    x = torch.randn(64, 5, generator=make) * spread
    other = torch.eye(5)
    if metric == "products":
        other = torch.diag(torch.tensor([1e-4, 1.0, 9.0, 100.0, 1e-4]))
    order = balanced_order(x[None, None], other[None, None], 64, 32)[0, 0]
    halves = {frozenset(part.tolist()) for part in order.split(32)}
    at = {"distance": 0, "products": 3}[metric]  # of 9 and of 1 · √100
    centred = x - x.mean(0)
    direction = torch.linalg.svd(centred @ other.sqrt()).Vh[0]
    assert direction.abs().argmax() == at
    ranked = (centred @ other.sqrt() @ direction).argsort().tolist()
    wanted = {frozenset(ranked[:32]), frozenset(ranked[32:])}
    same = max(len(a & b) for a in halves for b in wanted)
    assert same >= 31  # the power iteration stops early


def test_finds_clusters_wherever_they_lie() -> None:
    """Sixteen kinds of tokens, strewn over the clip: a block is of one kind, but where a median
    goes through it."""
    make = torch.Generator().manual_seed(0)
    kind = torch.randperm(16 * 8, generator=make) % 16
    codes = torch.randn(16, 32, generator=make)
    x = codes[kind] + 0.05 * torch.randn(128, 32, generator=make)
    order = balanced_order(x[None, None], None, 128, 8)[0, 0]
    commonest = [int(kind[part].bincount().max()) for part in order.split(8)]
    assert sum(commonest) > 0.8 * 128  # strewn: about a quarter
    q, k = 4 * codes[kind][None, None], codes[kind][None, None]
    v = torch.randn(1, 1, 128, 32, generator=make)
    found = attend(q, k, v, method=Svg2(q_block=8, k_block=8), grid=(2, 8, 8))
    assert found.plan is not None
    assert found.plan.cost < 0.25
    assert relative(found.out, sdpa(q, k, v)) < 0.05


@pytest.mark.parametrize("tokens", [0, 1, 7, 8, 9, 40, 57, 64])
def test_any_number_of_tokens_and_what_is_not_finite_stay_a_bijection(tokens: int) -> None:
    x = torch.randn(2, 3, 64, 6, generator=torch.Generator().manual_seed(0))
    x[0, 0, 3] = torch.nan
    x[0, 1, 5] = torch.inf
    x[1, 2] = 0
    order = balanced_order(x, second_moment(x, 3), tokens, 8)
    assert torch.equal(order.sort(-1).values, torch.arange(64).expand(2, 3, 64))
    assert torch.equal(order[..., tokens:], torch.arange(tokens, 64).expand(2, 3, -1))


@pytest.mark.parametrize("side", ["front", "back"])
def test_text_stays_and_is_read(side: str) -> None:
    grid = TokenGrid.video(3, 7, 9, text=11, text_side=side)
    q, k, _ = tensors(grid, B=2, H=4, kv=2)
    plan = planned(Svg2(0.2, 0.0, **SMALL), q, k, grid)
    text = list(range(11)) if side == "front" else list(range(189, 200))
    for head in range(4):
        assert plan.query_tokens(head, 1)[-11:].tolist() == text
        assert plan.key_tokens(head, 1)[-11:].tolist() == text
    assert (plan.levels[..., plan.layout.text_keys] == 1).all()
    assert (plan.levels[:, :, plan.layout.text_rows] == 1).all()


@pytest.mark.parametrize("budget", [0.1, 0.3, 0.6])
def test_a_budget_is_met_by_one_mass_for_all_heads(budget: float) -> None:
    grid = TokenGrid.video(4, 8, 10)
    q, k, _ = tensors(grid, H=4)
    plan = planned(Svg2(budget=budget, **SMALL), q, k, grid)
    assert budget - 0.02 < plan.cost <= budget + 1e-6
    assert float(plan.costs.std()) > 0


def test_a_total_along_a_run() -> None:
    grid = TokenGrid.video(4, 8, 10)
    q, k, v = tensors(grid, H=3)
    method = Schedule(Svg2(**SMALL), curve=Curve(0.4))
    costs = []
    for step in range(6):
        plan = attend(q, k, v, method=method, grid=grid, site=Site(step, 6, 0, 1)).plan
        costs.append(1.0 if plan is None else plan.cost)
    assert sum(costs) / 6 == pytest.approx(0.4, abs=0.03)


class TestARun:
    grid = TokenGrid.video(4, 8, 10)

    def run(self, method: Svg2, step: int, tables: Tables | None, *, seed: int = 0, **where: Any):
        q, k, v = tensors(self.grid, H=4, kv=2, seed=seed)
        site = Site(step, 8, **where)
        return attend(q, k, v, method=method, grid=self.grid, site=site, tables=tables)

    def test_clusters_serve_a_share_of_the_run_and_scores_every_call(self) -> None:
        tables, method = Tables(), Svg2(budget=0.3, keep=0.5, **SMALL)
        first, later = self.run(method, 0, tables), self.run(method, 3, tables, seed=1)
        fresh = self.run(method, 3, None, seed=1)
        for head in range(4):
            assert torch.equal(later.plan.key_tokens(head), first.plan.key_tokens(head))
            assert torch.equal(later.plan.query_tokens(head), first.plan.query_tokens(head))
        assert not torch.equal(later.plan.key_tokens(0), fresh.plan.key_tokens(0))
        assert not torch.equal(later.plan.levels, first.plan.levels)  # by the numbers of its call
        assert later.plan.cost == pytest.approx(0.3, abs=0.02)
        assert first.planning == clusters_share(first.plan.layout) > 0 == later.planning
        assert tables.made == 1
        again = self.run(method, 4, tables, seed=1)  # the other half
        assert torch.equal(again.plan.key_tokens(0), fresh.plan.key_tokens(0))
        assert tables.made == 2

    def test_results_are_those_of_the_kept_order_and_memory_is_used_again(self) -> None:
        tables, method = Tables(), Svg2(1.0, keep=2, **SMALL)  # everything is read
        for step, made in ((0, 1), (1, 1), (2, 2), (3, 2), (2, 2)):
            q, k, v = tensors(self.grid, H=4, kv=2, seed=step)
            done = self.run(method, step, tables, seed=step)
            assert relative(done.out, sdpa(q, k, v)) < 1e-5
            assert tables.made == made
        assert tables.bytes == tables.largest == 4 * (4 + 2) * 320  # int32, heads of q and of k

    def test_branches_layers_layouts_and_methods_have_their_own(self) -> None:
        tables, method = Tables(), Svg2(budget=0.3, **SMALL)
        for where in ({}, {"branch": "uncond"}, {"layer": 1, "layers": 2}, {"transformer": "b"}):
            self.run(method, 0, tables, **where)
            self.run(method, 1, tables, **where)
        assert tables.made == 4
        self.run(Svg2(budget=0.3, q_block=8, k_block=8), 1, tables)
        self.run(Mass(0.9, **SMALL), 1, tables)
        self.run(Mass(0.9, **SMALL), 2, tables)
        assert tables.made == 6

    def test_other_keys_of_as_many_queries_are_another_layout(self) -> None:
        tables, method = Tables(), Svg2(1.0, **SMALL)
        for keys in (320, 200):  # an image's keys may be cached, another's not
            q, k, v = tensors(self.grid, H=4, kv=2)
            k, v = k[:, :, :keys], v[:, :, :keys]
            key_grid = TokenGrid.flat(keys)
            done = attend(
                q, k, v, method=method, grid=self.grid, key_grid=key_grid, site=Site(0, 8),
                tables=tables,
            )  # fmt: skip
            assert relative(done.out, sdpa(q, k, v)) < 1e-5
        assert tables.made == 2


@pytest.mark.parametrize("tokens", [48, 160])  # fewer than dims, and more: two ways to one matrix
def test_directions_are_those_of_a_plain_power_iteration(tokens: int) -> None:
    make = torch.Generator().manual_seed(1)
    x = torch.randn(1, 2, tokens, 64, generator=make, dtype=torch.float64)
    x = x * torch.linspace(3, 1, 64)
    metric = second_moment(torch.randn(1, 2, 400, 64, generator=make, dtype=torch.float64), 2)
    centred = x - x.mean(2, keepdim=True)
    wanted = centred.square().sum(2)[..., None]
    for _ in range(8):
        wanted = metric @ (centred.mT @ (centred @ wanted))
        wanted = wanted / wanted.norm(dim=2, keepdim=True)
    found = cluster._direction(centred, metric)
    found = found / found.norm(dim=2, keepdim=True)
    assert ((found * wanted).sum(2).abs() > 0.99).all()


def test_bad_options() -> None:
    with pytest.raises(ValueError, match=r"keep must be in \[0, 1\], got 1.5"):
        Svg2(keep=1.5)
    with pytest.raises(ValueError, match=r"top_p_kmeans must be in \[0, 1\], got 1.5"):
        Svg2(1.5)
    with pytest.raises(ValueError, match="svg2 orders tokens by q and k: it has no order Gilbert"):
        Svg2(order=Gilbert())
    with pytest.raises(ValueError, match="svg2 has no option 'num_q_centroids'"):
        make_method("svg2", num_q_centroids=300)
