"""Importance from all queries on means of keys: PARK's score, against plain loops."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from jali import Blocks, Budget, Entropy, TokenGrid, attend, block_layout
from jali.planning import mass
from jali.planning.mass import pooled_masses
from jali.tokens.padding import KeyPadding
from oracle import blocks_of, tensors


def importance(q, k, q_block, k_block, means, scale, real):
    """Of one head, in plain loops. [M, N]."""
    groups = []  # (block, mean, how many)
    for n, keys in enumerate(blocks_of(len(k), k_block)):
        for start in range(keys.start, keys.start + k_block, k_block // means):
            own = [t for t in range(start, start + k_block // means) if t < len(k) and real[t]]
            if own:
                groups.append((n, k[own].mean(0), len(own)))
    found = torch.zeros(-(-len(q) // q_block), -(-len(k) // k_block), dtype=torch.float64)
    for m, rows in enumerate(blocks_of(len(q), q_block)):
        for t in rows:
            weights = [size * math.exp(float(q[t] @ mean) * scale) for _, mean, size in groups]
            for (n, _, _), weight in zip(groups, weights, strict=True):
                found[m, n] += weight / sum(weights) / len(rows)
    return found


@pytest.mark.parametrize("means", [1, 4])
@pytest.mark.parametrize("tokens", [64, 83])
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_what_loops_find(tokens, means, padded, monkeypatch):
    monkeypatch.setattr(mass, "numbers_at_once", lambda _: 2 * 4 * 32 * 30)  # a few rows at a time
    q, k, _ = tensors(tokens, B=2, H=4, kv=2, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(tokens), blocks=Blocks(32, 16))
    real = torch.ones(2, tokens, dtype=torch.bool)
    padding = None
    if padded:
        real[0, 50:], real[1, ::3] = False, False
        padding = KeyPadding(mask=real)
        k = torch.where(real[:, None, :, None], k, torch.nan)
    found = pooled_masses(q, k, layout, 0.25, padding, means)
    for b, h in itertools.product(range(2), range(4)):
        wanted = importance(q[b, h], k[b, h // 2], 32, 16, means, 0.25, real[b])
        torch.testing.assert_close(found[b, h], wanted)


def test_nothing_real_has_no_mass():
    q, k, _ = tensors(40, B=2)
    layout = block_layout(TokenGrid.flat(40), blocks=Blocks(16, 8))
    padding = KeyPadding(length=torch.tensor([0, 30], dtype=torch.int32))
    found = pooled_masses(q, k, layout, 0.25, padding)
    assert (found[0] == 0).all()
    torch.testing.assert_close(found[1].sum(-1), torch.ones(2, 3))


def test_as_many_means_as_keys_are_the_exact_masses():
    """Then no other choice of as many blocks keeps more of them."""
    q, k, v = tensors(512, H=3)
    exact = (q @ k.mT * 0.25).softmax(-1).unflatten(3, (16, 32)).sum(-1).unflatten(2, (16, 32))
    exact, kept = exact.mean(3), []
    for means in (1, 4, 32):
        method = Entropy(Budget(0.3), sharpness=0, means=means, q_block=32, k_block=32)
        plan = attend(q, k, v, method=method).plan
        assert plan.cost == pytest.approx(0.3, abs=1 / 16)
        kept.append(float((exact * plan.levels).sum()))
    assert kept[2] > max(kept[:2])
    assert max(kept[:2]) > float(exact.sum()) * 0.3


def test_what_it_takes_and_what_it_refuses():
    layout = block_layout(TokenGrid.flat(2048), blocks=Blocks(256, 128))
    assert Entropy(means=4).planning_share(layout) == 0.5 * 4 / 128
    q, k, v = tensors(96)
    with pytest.raises(ValueError, match="5 means do not divide a block of 32 keys"):
        attend(q, k, v, method=Entropy(means=5, q_block=32, k_block=32))
    with pytest.raises(ValueError, match="means must be at least 1, got 0"):
        Entropy(means=0)
    with pytest.raises(ValueError, match="entropy cannot be causal: its scores know keys to come"):
        attend(q, k, v, method=Entropy(means=1), causal=True)
