"""Shares of a row's attention: of all queries, on all keys or on means of them, and what is left of
it when the heaviest blocks are taken first."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jali import kernels
from jali.planning.distortion import numbers_at_once
from jali.planning.scoring import (
    at_least_fp32,
    block_means,
    block_sums,
    by_heads,
    guarded_softmax,
    products,
    sampled_scores,
    use_kernels,
)
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding


def pooled_masses(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    scale: float,
    padding: KeyPadding | None = None,
    means: int = 1,
) -> Tensor:
    """Softmax mass of each key block, averaged over all queries of each query block, where `means`
    means of a block's keys stand for them, each with the weight of its real keys. [B, H, M, N].

    Every row sums to 1 (to 0 where no key is real).
    """
    group = layout.blocks.k // means
    valid = None if padding is None else padding.valid(layout.k.tokens)
    if use_kernels(q, k, scale, padding, causal=False):
        length = None if padding is None else padding.length
        keys: Tensor = kernels.load("scores").block_means(k, group, length)
    else:
        keys = block_means(k, group, valid)
    real = torch.ones_like(k[:1, 0, :, 0]) if valid is None else valid
    weight = block_sums(real.to(keys), group).log()[:, None, None]  # −inf for what holds no key
    B, H, block = q.shape[0], q.shape[1], layout.blocks.q
    out = keys.new_empty(B, H, layout.M, layout.N)
    each = max(1, numbers_at_once(q.device) // (B * H * block * keys.shape[2]))
    for first in range(0, layout.M, each):
        part = at_least_fp32(q[:, :, first * block : (first + each) * block])
        logits = products(part * scale, keys).add_(weight)
        mass = block_sums(guarded_softmax(logits, padding is not None), means)
        out[:, :, first : first + each] = block_means(mass, block)
    return out


def exact_masses(
    q: Tensor, k: Tensor, layout: BlockLayout, scale: float, padding: KeyPadding | None = None
) -> Tensor:
    """Softmax mass of each key block, averaged over all queries of each query block: a dense pass
    that never holds it. [B, H, M, N]; every row sums to 1 (to 0 where no key is real)."""
    if use_kernels(q, k, scale, padding, causal=False):
        return _exact_masses(q, k, layout, scale, padding)
    some = functools.partial(_exact_masses, layout=layout, scale=scale, padding=padding)
    return by_heads(some, q, k, layout, layout.blocks.q * layout.k.tokens)


def _exact_masses(
    q: Tensor, k: Tensor, layout: BlockLayout, scale: float, padding: KeyPadding | None
) -> Tensor:
    tokens, block = layout.q.tokens, layout.blocks.q
    whole = tokens // block * block
    found = []
    for part, size in ((q[:, :, :whole], block), (q[:, :, whole:], tokens - whole)):
        if part.shape[2]:
            at = torch.arange(part.shape[2], device=q.device).view(-1, size)
            found.append(sampled_scores(part, k, layout, scale, at, padding))
    return torch.cat(found, dim=2)


class MassTable(NamedTuple):
    """In which order blocks are read, and what is then left: see `ranked_by_mass`. fp16
    [B, H, M, N]."""

    codes: Tensor
    levels: tuple[int, ...] = ()

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes

    def filled_with(self, other: MassTable) -> MassTable:
        """The other's numbers, of the same shape, in this one's memory."""
        self.codes.copy_(other.codes)
        return self


def ranked_by_mass(log_mass: Tensor, after: bool = False) -> Tensor:
    """`log_mass_left`, but for the heaviest block of every row its share, which is above 0: it is
    read before all others, and no two of them alike. [B, H, M, N] -> like it."""
    share, heaviest = log_mass.softmax(-1).max(-1, keepdim=True)
    return log_mass_left(log_mass, after).scatter_(-1, heaviest, share)


def log_mass_left(log_mass: Tensor, after: bool = False) -> Tensor:
    """The log of the share of its row's mass that is left when a block's turn comes, or `after` it,
    heaviest first. [B, H, M, N] -> like it.

    Equal blocks come in their order. Logs, and sums that begin with the smallest, tell blocks apart
    whose share no float holds.
    """
    heaviest = log_mass.sort(dim=-1, descending=True, stable=True)
    left = heaviest.values.flip(-1).logcumsumexp(-1).flip(-1)
    left = left - left[..., :1].clamp_min(torch.finfo(left.dtype).min)
    if after:
        left = F.pad(left[..., 1:], (0, 1), value=-torch.inf)
    return left.scatter(-1, heaviest.indices, left)


def log_rest(share: float) -> float:
    """The log of what a share leaves."""
    return math.log(1 - share) if share < 1 else -math.inf
