"""Sol-Attn: which blocks are read, against its rule in plain loops."""

from __future__ import annotations

import math

import pytest
import torch

from jali import Gilbert, Site, Sol, TokenGrid, attend, make_method
from jali.kernels.lists import MEAN
from oracle import blocks_of, tensors


def routed(q, k, tau, kind, q_block, k_block, scale, length=None):
    """Of one head: rows of blocks whose proxy lies above mean + tau · deviation, in base 2."""
    length = k.shape[0] if length is None else length
    q_blocks, k_blocks = blocks_of(q.shape[0], q_block), blocks_of(length, k_block)
    means = torch.stack([k[list(keys)].mean(0) for keys in k_blocks])
    scale = scale / math.log(2)
    found = []
    for rows in q_blocks:
        proxy = [float((q[list(rows)] @ mean).mean()) * scale for mean in means]
        centre = q[list(rows)].mean(0)
        average = float(centre @ means.mean(0)) * scale
        if kind == "diag":
            spread = ((means - means.mean(0)) ** 2).mean(0)
            variance = float((centre**2 * spread).sum()) * scale**2
        else:
            variance = sum((x - average) ** 2 for x in proxy) / len(proxy)
        bound = average + tau * math.sqrt(variance + 1e-6)
        found.append({n for n, x in enumerate(proxy) if x > bound})
    return found


@pytest.mark.parametrize("kind", ["diag", "exact"])
@pytest.mark.parametrize(
    ("grid", "heads", "kv", "tau"),
    [
        (TokenGrid.video(3, 9, 10), 4, 2, 1.0),  # a short last block, grouped heads
        (TokenGrid.video(3, 9, 10, text=20), 2, 2, 0.5),
        (TokenGrid.video(2, 8, 8, text=5, text_side="back"), 2, 1, 1.5),
        (TokenGrid.flat(37), 1, 1, 0.0),
    ],
)
def test_the_plan_against_loops(grid, heads, kv, tau, kind):
    q, k, v = tensors(grid, B=2, H=heads, kv=kv, dtype=torch.float64)
    method = Sol(tau, kind, q_block=16, k_block=16)
    plan = attend(q, k, v, method=method, grid=grid).plan
    text = {t // 16 for t in range(grid.tokens) if _is_text(grid, t)}
    for b in range(2):
        for h in range(heads):
            rows = routed(q[b, h], k[b, h // (heads // kv)], tau, kind, 16, 16, 16**-0.5)
            for m, found in enumerate(rows):
                wanted = found | text | {m - 1, m, m + 1}
                wanted = wanted & set(range(plan.layout.N))
                if m in text:
                    wanted = set(range(plan.layout.N))
                levels = plan.levels[b, h, m]
                assert set((levels == 1).nonzero()[:, 0].tolist()) == wanted
                assert ((levels == 1) | (levels == MEAN)).all()  # nothing is skipped


def _is_text(grid, token):
    from jali import Text

    return any(
        start <= token < start + segment.tokens
        for start, segment in grid.spans()
        if isinstance(segment, Text)
    )


def test_padded_keys_take_no_part():
    q, k, v = tensors(100, B=2, dtype=torch.float64)
    k[0, :, 70:], v[0, :, 70:] = torch.nan, torch.inf
    method = Sol(0.7, q_block=16, k_block=16, tail=False)
    plan = attend(q, k, v, method=method, key_length=[70, 100]).plan
    for b, length in ((0, 70), (1, 100)):
        for h in range(2):
            rows = routed(q[b, h], k[b, h], 0.7, "diag", 16, 16, 16**-0.5, length)
            for m, found in enumerate(rows):
                read = set(plan.levels[b, h, m].nonzero()[:, 0].tolist())
                assert read - {m - 1, m, m + 1} == found - {m - 1, m, m + 1}


def test_other_keys_read_at_least_one_block():
    q, k, v = tensors(40, 90)
    plan = attend(
        q, k, v, method=Sol(50.0, q_block=16, k_block=16, tail=False), key_grid=(1, 9, 10)
    ).plan
    assert (plan.levels.sum(-1) == 1).all()


def test_a_higher_tau_reads_less_and_the_normal_share_of_noise():
    q, k, v = tensors(2048, H=4)
    shares = []
    for tau in (0.0, 1.0, 1.5):
        method = Sol(tau, "exact", q_block=16, k_block=16, tail=False)
        shares.append(attend(q, k, v, method=method).plan.cost)
    for share, normal in zip(shares, (0.5, 0.159, 0.067), strict=True):
        assert share == pytest.approx(normal, abs=0.035)  # and the neighbours


@pytest.mark.parametrize("mean", [0.05, 0.2, 0.5])
def test_a_budget_is_met_with_the_tail_in_it(mean):
    grid = TokenGrid.video(4, 16, 16)
    q, k, v = tensors(grid, B=2, H=4)
    q[:, 0] *= 0.1
    k[:, 1] = k[:, 1].cumsum(2) / 8  # heads differ
    method = Sol(q_block=16, k_block=16).with_budget(mean)
    assert method.mean_budget == mean
    assert Sol().mean_budget is None
    plan = attend(q, k, v, method=method, grid=grid).plan
    block = 16 * 16 / 1024**2
    near = (3 * 64 - 2) / 64**2
    always = near + (1 - near) / 16  # neighbours, and means of the rest
    for cost in plan.costs.mean(1).tolist():
        assert cost == pytest.approx(max(mean, always), abs=block)
    if mean == 0.2:
        assert plan.costs[0].max() > plan.costs[0].min() + 0.005
        taus = [0.5, 2.0]  # one tau for all: what is read at tau does not depend on the budget
        counts = [(attend(q, k, v, method=Sol(t, q_block=16, k_block=16), grid=grid).plan.levels
                   == 1) for t in taus]  # fmt: skip
        assert ((plan.levels == 1) <= counts[0]).all()
        assert (counts[1] <= (plan.levels == 1)).all()


def test_a_clip_does_not_depend_on_its_batch():
    grid = TokenGrid.video(4, 16, 16)
    q, k, v = tensors(grid, B=2)
    k[1] *= 3
    method = Sol(budget=0.3, q_block=32, k_block=16, order=Gilbert())
    both = attend(q, k, v, method=method, grid=grid).plan.levels
    alone = attend(q[1:], k[1:], v[1:], method=method, grid=grid).plan.levels
    assert torch.equal(both[1:], alone)


def test_along_a_falling_schedule():
    from jali import Curve, Schedule

    grid = TokenGrid.video(4, 16, 16)
    q, k, v = tensors(grid)
    method = Schedule(Sol(q_block=32, k_block=32), curve=Curve(0.5))
    costs = []
    for step in range(5):
        done = attend(q, k, v, method=method, grid=grid, site=Site(step, 5))
        costs.append(1.0 if done.plan is None else done.plan.cost)
    assert costs == sorted(costs, reverse=True)
    assert sum(costs) / 5 == pytest.approx(0.5, abs=0.03)


def test_bad_input_is_refused_in_words():
    with pytest.raises(ValueError, match="thresh_type must be 'diag' or 'exact', got 'full'"):
        Sol(thresh_type="full")
    with pytest.raises(ValueError, match=r"tau must be finite and >= 0, got -1"):
        Sol(-1)
    with pytest.raises(ValueError, match="sol has no option 'topk_ratio'"):
        make_method("sol", topk_ratio=0.1)
    q, k, v = tensors(64)
    with pytest.raises(ValueError, match="a tail cannot be causal"):
        attend(q, k, v, method=Sol(), causal=True)
    with pytest.raises(ValueError, match="sol cannot be causal: its scores know keys to come"):
        attend(q, k, v, method=Sol(tail=False), causal=True)
