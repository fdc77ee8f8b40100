"""SpargeAttn: which blocks are read, against its rule in plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from jali import Budget, Sparge, TokenGrid, attend, make_method
from jali.planning.likeness import block_likeness
from jali.planning.mass import log_mass_left
from oracle import blocks_of, tensors


def smooth(grid, *, B=1, H=2, kv=None, seed=0, noise=0.7):
    """Tokens that change slowly, so that some blocks are alike and some are not."""
    q, k, v = tensors(grid, B=B, H=H, kv=kv, dtype=torch.float64, seed=seed)
    for x in (q, k):
        walk = x.cumsum(2) / 3
        x.copy_(walk + noise * x + 1.5)  # keys share a mean, which is taken away
    return q, k, v


def cosine(x):
    """Mean over all pairs of tokens, a token with itself included."""
    pairs = list(itertools.product(x, x))
    return sum(float(a @ b / (a.norm() * b.norm())) for a, b in pairs) / len(pairs)


def selected(q, k, alike, cdf, topk, q_block, k_block, length=None):
    """Of one head: what each query block reads."""
    length = k.shape[0] if length is None else length
    k = k[:length]
    q_blocks, k_blocks = blocks_of(len(q), q_block), blocks_of(length, k_block)
    centred = k - k.mean(0)
    blind = {n for n, keys in enumerate(k_blocks) if not cosine(centred[list(keys)]) > alike}
    found = []
    for rows in q_blocks:
        if not cosine(q[list(rows)]) > alike:
            found.append(set(range(len(k_blocks))))
            continue
        weights = {}
        for n, keys in enumerate(k_blocks):
            if n not in blind:
                logit = q[list(rows)].mean(0) @ centred[list(keys)].mean(0) * q.shape[1] ** -0.5
                weights[n] = math.exp(logit)
        order = sorted(weights, key=lambda n, w=weights: -w[n])
        if topk is not None:
            count = int(topk * len(k_blocks) + 1e-9)
        else:
            running = itertools.accumulate(weights[n] / sum(weights.values()) for n in order)
            count = sum(share <= cdf for share in running)
        found.append(blind | set(order[: max(1, count)]))
    return found


@pytest.mark.parametrize(
    ("grid", "heads", "kv", "alike", "cdf", "topk"),
    [
        (TokenGrid.video(3, 9, 10), 4, 2, 0.8, 0.9, None),
        (TokenGrid.video(2, 8, 11, text=20), 2, 2, 0.85, 0.5, None),
        (TokenGrid.video(2, 8, 8, text=5, text_side="back"), 2, 1, -0.1, 0.98, None),
        (TokenGrid.flat(150), 2, 2, -0.1, 0.9, 0.3),
        (TokenGrid.flat(150), 2, 2, 0.8, 0.9, 0.05),
    ],
)
def test_the_plan_against_loops(grid, heads, kv, alike, cdf, topk):
    q, k, v = smooth(grid, B=2, H=heads, kv=kv)
    method = Sparge(alike, cdf, topk, q_block=16, k_block=8)
    plan = attend(q, k, v, method=method, grid=grid).plan
    layout = plan.layout
    texts = [set(x.nonzero()[:, 0].tolist()) for x in (layout.text_rows, layout.text_keys)]
    gated = 0
    for b, h in itertools.product(range(2), range(heads)):
        rows = selected(q[b, h], k[b, h // (heads // kv)], alike, cdf, topk, 16, 8)
        gated += sum(len(row) == layout.N for row in rows)
        for m, found in enumerate(rows):
            wanted = found | texts[1] | {2 * m, 2 * m + 1} & set(range(layout.N))
            if m in texts[0]:
                wanted = set(range(layout.N))
            assert set(plan.levels[b, h, m].nonzero()[:, 0].tolist()) == wanted
    assert (gated > 0) == (alike > 0), "the gate must have been tried"
    assert plan.density < 0.9


def test_padded_keys_take_no_part():
    q, k, v = smooth(120, B=2)
    k[0, :, 90:], v[0, :, 90:] = torch.nan, torch.inf
    method = Sparge(0.8, 0.9, q_block=16, k_block=8)
    plan = attend(q, k, v, method=method, key_length=[90, 120]).plan
    for b, h in itertools.product(range(2), range(2)):
        rows = selected(q[b, h], k[b, h], 0.8, 0.9, None, 16, 8, (90, 120)[b])
        real = set(range(-(-(90, 120)[b] // 8)))
        for m, found in enumerate(rows):
            read = set(plan.levels[b, h, m].nonzero()[:, 0].tolist()) & real
            assert read == found | {2 * m, 2 * m + 1} & real


@pytest.mark.parametrize("block", [7, 16])
def test_likeness_of_some_real_tokens(block):
    _, k, _ = smooth(50, B=2)
    valid = torch.rand(2, 50, generator=torch.Generator().manual_seed(3)) < 0.7
    valid[0, :block] = False
    found = block_likeness(k, block, valid)
    for b, n in itertools.product(range(2), range(-(-50 // block))):
        tokens = [t for t in range(block * n, min(50, block * n + block)) if valid[b, t]]
        wanted = cosine(k[b, 0, tokens]) if tokens else 0
        assert float(found[b, 0, n]) == pytest.approx(wanted)


def test_what_is_left_is_exact_where_no_float_holds_it():
    mass = torch.tensor([0.5, 0.5, 0.0, 1e-30]).log()
    mass = torch.cat([mass, torch.tensor([-500.0, -501.0])]).view(1, 1, 1, 6)
    before, after = log_mass_left(mass)[0, 0, 0], log_mass_left(mass, after=True)[0, 0, 0]
    tiny, rest = math.log(1e-30), -500 + math.log(1 + math.exp(-1))
    assert before.tolist() == pytest.approx([0, math.log(0.5), -math.inf, tiny, rest, -501])
    assert after.tolist() == pytest.approx([math.log(0.5), tiny, -math.inf, rest, -501, -math.inf])


@pytest.mark.parametrize("alike", [-1.0, 0.6])
@pytest.mark.parametrize("mean", [0.12, 0.3, 0.7])
def test_a_budget_is_met_whatever_is_not_alike(mean, alike):
    grid = TokenGrid.video(4, 16, 16, text=12)
    q, k, v = tensors(grid, B=2, H=4)  # noise: nothing is alike
    q[:, 0] *= 0.1
    method = Sparge(alike, q_block=16, k_block=16).with_budget(mean)
    assert method.mean_budget == mean
    plan = attend(q, k, v, method=method, grid=grid).plan
    layout = plan.layout
    pairs = layout.row_sizes[:, None] * layout.block_sizes * ~layout.text_rows[:, None]
    costs = (plan.levels * pairs).sum((1, 2, 3)) / (4 * pairs.sum())
    assert costs.tolist() == pytest.approx([mean] * 2, abs=16 * 16 / (4 * int(pairs.sum())))


def test_without_a_budget_it_has_its_own():
    assert Sparge().mean_budget is None
    assert [Sparge().alike, Sparge(topk=0.5).alike, Sparge(budget=0.5).alike] == [0.6, -0.1, -0.1]
    assert Sparge(0.3, budget=0.5).alike == 0.3
    assert Sparge(topk=0.5).mean_budget == 0.5
    assert Sparge(topk=0.5).with_budget(0.3) == Sparge(topk=0.3)
    grid = TokenGrid.video(4, 16, 16)
    q, k, v = tensors(grid)
    assert attend(q, k, v, method="sparge", grid=grid).plan.cost == 1, "noise is not alike"
    method = Sparge(topk=0.25, q_block=16, k_block=16)
    assert attend(q, k, v, method=method, grid=grid).plan.cost == pytest.approx(0.25, abs=0.02)


def test_it_is_nearer_to_dense_than_chance():
    grid = TokenGrid.video(4, 16, 16)
    q, k, v = (x.float() for x in smooth(grid, H=3, noise=0.2))
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)

    def error(method):
        return float((attend(q, k, v, method=method, grid=grid).out - dense).norm())

    blocks = {"q_block": 32, "k_block": 32}
    chance = error(make_method("random", budget=Budget(0.25), **blocks))
    assert error(Sparge(budget=0.25, **blocks)) < 0.5 * chance
    assert error(Sparge(topk=0.25, **blocks)) < 0.1 * chance


def test_bad_input_is_refused_in_words():
    with pytest.raises(ValueError, match=r"simthreshd1 is a cosine in \[-1, 1\], got 2"):
        Sparge(2)
    with pytest.raises(ValueError, match=r"simthreshd1 is a cosine in \[-1, 1\], got '0.6'"):
        Sparge("0.6")
    with pytest.raises(ValueError, match=r"cdfthreshd must be in \[0, 1\], got 1.5"):
        Sparge(cdfthreshd=1.5)
    with pytest.raises(ValueError, match="topk and budget ask for the same"):
        Sparge(topk=0.5, budget=0.5)
    with pytest.raises(ValueError, match="sparge has no option 'pvthreshd'"):
        make_method("sparge", pvthreshd=50)
    q, k, v = tensors(64)
    with pytest.raises(ValueError, match="sparge cannot be causal: its scores know keys to come"):
        attend(q, k, v, method="sparge", causal=True)
