"""DraftAttention: which blocks are read, against its rule in plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from jali import Draft, TokenGrid, attend, make_method
from oracle import tensors


def pooled(x, frames, height, width, pool_h, pool_w):
    """Means of tiles of every frame, in the order frame, row, column. [S, D] -> list of [D]."""
    found = []
    for f, y, x0 in itertools.product(
        range(frames), range(0, height, pool_h), range(0, width, pool_w)
    ):
        inside = itertools.product(range(y, y + pool_h), range(x0, x0 + pool_w))
        found.append(x[[(f * height + a) * width + b for a, b in inside]].mean(0))
    return found


def draft_map(q, k, *size):
    """The softmax of the pooled map, by (query tile, key tile)."""
    q_tiles, k_tiles = pooled(q, *size), pooled(k, *size)
    found = {}
    for m, a in enumerate(q_tiles):
        weights = [math.exp(float(a @ b) * len(a) ** -0.5) for b in k_tiles]
        for n, weight in enumerate(weights):
            found[m, n] = weight / sum(weights)
    return found


@pytest.mark.parametrize("sparsity", [0.5, 0.8])
@pytest.mark.parametrize(("kv", "text"), [(4, 0), (2, 0), (4, 16)])
def test_the_plan_against_loops(kv, text, sparsity):
    size = 3, 8, 12, 4, 4  # 3 frames of 2 × 3 tiles
    grid = TokenGrid.video(3, 8, 12, text=text, text_side="back")
    q, k, v = tensors(grid, B=2, H=4, kv=kv, dtype=torch.float64)
    plan = attend(q, k, v, method=Draft(sparsity, 4, 4), grid=grid).plan
    tiles, blocks = 18, 18 + text // 16
    for b, h in itertools.product(range(2), range(4)):
        entries = draft_map(q[b, h], k[b, h // (4 // kv)], *size)
        read = {(m, n) for m, n in plan.levels[b, h].nonzero().tolist() if m < tiles}
        always = {(m, m) for m in range(tiles)}
        always |= {(m, n) for m in range(tiles) for n in range(tiles, blocks)}
        room = int((1 - sparsity) * tiles * blocks + 1e-9) - len(always)
        free = sorted((e for e in entries if e not in always), key=lambda e: -entries[e])
        assert read == always | set(free[:room])
        assert (plan.levels[b, h, tiles:] == 1).all()
        if not text:  # the original: at least the largest of the k smallest, of each head
            ranked = sorted(entries.values())
            least = ranked[int(sparsity * len(ranked)) - 1]
            theirs = {e for e in entries if entries[e] >= least}
            assert read - always <= theirs
            assert len(theirs - read) <= len(always) + 2  # it rounds up and keeps one more


def test_heads_have_equal_shares_and_rows_do_not():
    grid = TokenGrid.video(4, 16, 32)
    q, k, v = tensors(grid, H=3)
    q[:, :, :700] *= 0.1
    plan = attend(q, k, v, method=Draft(0.7, 4, 8), grid=grid).plan
    assert plan.costs[0].tolist() == pytest.approx([0.3] * 3, abs=1 / 64**2)
    assert len((plan.levels[0, 0] == 1).sum(-1).unique()) > 3


@pytest.mark.parametrize("tail", [False, True])
def test_odd_sizes_text_and_padding(tail):
    grid = TokenGrid.video(3, 11, 13, text=5)
    q, k, v = tensors(grid, B=2, H=2)
    k[0, :, -60:], v[0, :, -60:] = torch.nan, torch.inf
    method = Draft(0.6, 4, 4, tail=tail)
    lengths = [grid.tokens - 60, grid.tokens]
    found = attend(q, k, v, method=method, grid=grid, key_length=lengths)
    assert found.out.isfinite().all()
    layout = found.plan.layout
    real = torch.stack([layout.k.arrange(torch.arange(grid.tokens)[None] < n)[0] for n in lengths])
    sizes = torch.stack(
        [torch.tensor([int(x.sum()) for x in real[b].split(16)]) for b in range(2)]
    )  # fmt: skip
    rows = layout.row_sizes * ~layout.text_rows
    unread = (sizes > 0).long() * tail
    work = torch.where(found.plan.levels == 1, sizes[:, None, None], unread[:, None, None])
    cost = (work.sum(-1) * rows).sum(-1) / (rows.sum() * sizes.sum(-1)[:, None])
    one = 16 * 16 / (rows.sum() * sizes.sum(-1)[:, None])
    assert (cost <= 0.4).all()
    assert (cost > 0.4 - one).all()


def test_a_budget_is_what_is_not_skipped():
    assert Draft().mean_budget == pytest.approx(0.1)
    assert Draft(0.9).with_budget(0.25) == Draft(0.75)
    q, k, v = tensors(TokenGrid.video(2, 8, 8))
    full = attend(q, k, v, method=Draft(0.0, 4, 4), grid=(2, 8, 8))
    assert full.plan.cost == 1


def test_bad_input_is_refused_in_words():
    with pytest.raises(ValueError, match=r"sparsity_ratio must be in \[0, 1\], got 90"):
        Draft(90)
    with pytest.raises(ValueError, match="pool_h must be at least 1, got 0"):
        Draft(pool_h=0)
    with pytest.raises(ValueError, match="draft has no option 'latent_h'"):
        make_method("draft", latent_h=48)
    q, k, v = tensors(64)
    with pytest.raises(ValueError, match="draft cannot be causal: its blocks are not in sequence"):
        attend(q, k, v, method="draft", causal=True)
