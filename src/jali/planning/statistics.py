"""The table of errors from means and variances of groups of keys, instead of from all keys.

A few rows of each query block see the means of groups of eight keys, and how much keys and values
differ inside. With logits x_j = x̄ + δ_j in a group of n keys, δ of mean 0 and variance σ²:

- Its mass is that of its mean times the mean of e^δ, which is e^(σ²/2) as long as σ² ≤ 2 ln n;
  above that the largest of n normal numbers decides, and it is e^(σ √(2 ln n)) / n. Masses m of all
  groups give lse and output o, and with those what skipping a block or reading it as one mean
  changes.
- Reading the group as its mean loses that factor, m (1 − e^(−…)) (v̄ − o): always mass too little,
  so a block loses that share of what skipping it would cost; and m s Cov(k, v)ᵀ q, to first order.
  Of this only the size is taken, m² σ² ‖Cov(k, v)‖² / tr Cov(k), exact where keys differ in one
  direction; sizes of a block's groups add up as far as their covariances point the same way.
- Finer groups inside it lose the same with their own variances, from their traces.

σ² = s² Σ_d q_d² Var_d(k) for every row. Nothing here is fitted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.kernels.lists import MEAN
from jali.planning.distortion import ErrorTable, encode, numbers_at_once
from jali.planning.plan import SKIP
from jali.planning.scoring import at_least_fp32
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

GROUP = 8  # keys, where a block has so many
TINY = 1e-30


def statistics_table(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    positions: Tensor,
    levels: tuple[int, ...],
    padding: KeyPadding | None = None,
) -> ErrorTable:
    """Like `distortion.error_table`, from statistics of groups."""
    B, H, _, D = q.shape
    M, P = positions.shape
    Hkv, N = k.shape[1], layout.N
    share = H // Hkv
    rows = q.index_select(2, positions.flatten()).view(B, Hkv, share, M, P, D)
    errors = q.new_empty(B, Hkv, share, M, N, len(levels), dtype=torch.float32)
    held = share * P * N * layout.blocks.k // group_of(layout.blocks.k)
    block_rows = max(1, numbers_at_once(q.device) // held)
    heads = max(1, block_rows // M)
    for b in range(B):
        for kv in range(0, Hkv, heads):
            some = slice(kv, kv + heads)
            found = KeyStatistics.of(k[b, some], v[b, some], b, layout, levels, padding)
            for m in range(0, M, block_rows):
                part = at_least_fp32(rows[b, some, :, m : m + block_rows]) * scale
                each = _row_errors(part.flatten(1, 3), found, levels)  # [h, N, L, R]
                each = each.unflatten(-1, (share, -1, P)).nanmean(-1)  # [h, N, L, share, m]
                errors[b, some, :, m : m + block_rows] = each.permute(0, 3, 4, 1, 2)
    errors = errors.flatten(1, 2)
    # Rows of text read everything; what they, or a query that is not finite, would lose is nothing.
    errors.masked_fill_(layout.text_rows[:, None, None], 0)
    return encode(errors.nan_to_num_(nan=0.0), levels)


def group_of(k_block: int) -> int:
    """Keys in a group: eight, or as many as divide the block."""
    return math.gcd(GROUP, k_block)


def _sizes(levels: tuple[int, ...], group: int) -> tuple[int, ...]:
    """Of the groups whose statistics count: of levels within a group, and its own."""
    return (*(level for level in levels if level not in (MEAN, SKIP) and level < group), group)


class KeyStatistics(NamedTuple):
    """What there is to know of some heads' keys and values, without a query. G groups in a block.

    For the pooled levels within a group, `covariance` is what σ² becomes as an error of the values,
    and `finer` the part of σ² that their own groups have.
    """

    keys: Tensor  # [h, N, G, D]
    values: Tensor  # [h, N, G, D]
    log_count: Tensor  # [N, 1, G]
    variance: Tensor  # of the keys, [h, N, G, D]
    block_keys: Tensor  # [h, N, 1, D]
    block_values: Tensor  # [h, N, 1, D]
    block_log_count: Tensor  # [N, 1, 1]
    part: Tensor  # of a block's keys, [N, 1, G]
    sizes: tuple[int, ...]  # of the groups of pooled levels; the last is that of all of a group
    covariance: Tensor  # [h, N, G, sizes]
    together: Tensor  # how far covariances of a block's groups are equal, [h, N, 1, 1]
    finer: Tensor  # [sizes, h, N, 1, G]
    most: Tensor  # the σ² at which values of a group lie as far off as they can, [h, N, 1, G]

    @classmethod
    def of(
        cls,
        k: Tensor,
        v: Tensor,
        b: int,
        layout: BlockLayout,
        levels: tuple[int, ...],
        padding: KeyPadding | None,
    ) -> KeyStatistics:
        """Of k and v [h, Sk, D] of sample b."""
        group, k_block = group_of(layout.blocks.k), layout.blocks.k
        shape = (layout.N, k_block // group, group)
        missing = layout.N * k_block - k.shape[1]
        real = torch.ones(1, k.shape[1], dtype=torch.bool, device=k.device)
        if padding is not None:
            real = padding.valid(k.shape[1])
            real = real[b % len(real)][None]
        real = F.pad(real, (0, missing)).view(1, *shape, 1)
        keys, values = (F.pad(at_least_fp32(x), (0, 0, 0, missing)) for x in (k, v))
        keys, values = (x.unflatten(1, shape).masked_fill(~real, 0) for x in (keys, values))
        count, block_count = real.sum(3), real.sum((2, 3))[:, :, None]  # [1, N, G, 1], [1, N, 1, 1]
        k_off, v_off = (_off_mean(x, real, group) for x in (keys, values))
        variance = k_off.square().sum(3) / count.clamp_min(1)
        spread = variance.sum(-1).clamp_min(TINY)  # [h, N, G]
        sizes = _sizes(levels, group)
        together = _together(k_off, v_off)
        covariance, finer = [], []
        for size in sizes:
            ours, theirs = (
                (k_off, v_off)
                if size == group
                else (_off_mean(x, real, size) for x in (keys, values))
            )
            squared = _products(ours, theirs) / count.squeeze(-1).clamp_min(1) ** 2
            covariance.append(squared / spread)
            own = ours.square().sum((3, 4)) / count.squeeze(-1).clamp_min(1)
            finer.append((own / spread)[:, :, None])
        apart = v_off.square().sum((3, 4)) / count.squeeze(-1).clamp_min(1)  # of the values
        alike = squared / (spread * apart).clamp_min(TINY)
        return cls(
            keys.sum(3) / count.clamp_min(1),
            values.sum(3) / count.clamp_min(1),
            count[0].mT.log(),
            variance,
            keys.sum((2, 3))[:, :, None] / block_count.clamp_min(1),
            values.sum((2, 3))[:, :, None] / block_count.clamp_min(1),
            block_count[0].log(),
            (count / block_count.clamp_min(1))[0].mT,
            sizes,
            torch.stack(covariance, -1),
            together,
            torch.stack(finer),
            1 / alike.clamp_min(TINY)[:, :, None],
        )


def _off_mean(x: Tensor, real: Tensor, size: int) -> Tensor:
    """How far each token is off the mean of its group of `size`; 0 where it is not real.

    x [h, N, G, group, D], real [1, N, G, group, 1].
    """
    if size == 1:
        return torch.zeros_like(x)
    groups = x.unflatten(3, (-1, size))
    there = real.unflatten(3, (-1, size))
    mean = groups.sum(4, keepdim=True) / there.sum(4, keepdim=True).clamp_min(1)
    return (groups - mean).masked_fill(~there, 0).flatten(3, 4)


def _products(k_off: Tensor, v_off: Tensor) -> Tensor:
    """‖Σ k vᵀ‖² of every group, as Σ (k_i · k_j)(v_i · v_j). [h, N, G]."""
    return ((k_off @ k_off.mT) * (v_off @ v_off.mT)).sum((-2, -1)).clamp_min(0)


def _together(k_off: Tensor, v_off: Tensor) -> Tensor:
    """How far the covariances of a block's groups point the same way [h, N, 1, 1]: 1 where they are
    alike, 0 where they have nothing to do with each other."""
    whole = (k_off.flatten(2, 3).mT @ v_off.flatten(2, 3)).square().sum((-2, -1))  # of [D, D]
    each = _products(k_off, v_off)
    apart, alike = each.sum(-1), each.sqrt().sum(-1).square()
    return ((whole - apart) / (alike - apart).clamp_min(TINY)).clamp(0, 1)[..., None, None]


def _row_errors(rows: Tensor, of: KeyStatistics, levels: tuple[int, ...]) -> Tensor:
    """Estimated ‖Δ‖² of every row, block and level. rows [h, R, D], scaled -> [h, N, L, R]."""
    rows = rows[:, None]
    square = rows.square() @ of.variance.mT  # σ² [h, N, R, G]
    logits = (rows @ of.keys.mT).add_(of.log_count)
    logits += _log_gain(square, of.log_count.clamp_min(0))
    lse = logits.logsumexp((1, 3))
    lse = torch.where(lse == -torch.inf, 0, lse)[:, None, :, None]  # a row that sees no real key
    mass = (logits - lse).exp_()
    total = mass.sum(-1)  # [h, N, R]
    out = torch.einsum("hnrg,hngd->hrd", mass, of.values)
    change = _Change.of(out, of)
    skipped = change.squared(mass)
    size = mass * square.minimum(of.most).sqrt()
    apart, alike = size.square() @ of.covariance, (size @ of.covariance.sqrt()).square()
    off = torch.lerp(apart, alike, of.together)  # [h, N, R, sizes]
    errors = []
    for level in levels:
        if level == SKIP:
            errors.append(skipped + off[..., -1])
        elif level == MEAN:
            weight = (rows @ of.block_keys.mT + of.block_log_count - lse).exp_()  # [h, N, R, 1]
            errors.append(change.squared(mass - weight * of.part) + off[..., -1])
        else:
            i = of.sizes.index(level)
            gain = _log_gain(square * of.finer[i], of.log_count.clamp(0, math.log(level)))
            lost = -(mass * torch.expm1(-gain)).sum(-1) / total.clamp_min(TINY)
            errors.append(lost.square() * skipped + off[..., i])
    return torch.stack(errors, dim=2)


class _Change(NamedTuple):
    """‖Σ_g a_g (v̄_g − o)‖² for weights a of a block's groups, by products of what they are off the
    block's mean: a vector for every row and block would be several times as much to hold."""

    products: Tensor  # (v̄_g − v̄)·(v̄_g' − v̄) [h, N, G, G]
    with_mean: Tensor  # (v̄_g − v̄)·(v̄ − o) [h, N, R, G]
    mean: Tensor  # ‖v̄ − o‖² [h, N, R]

    @classmethod
    def of(cls, out: Tensor, of: KeyStatistics) -> _Change:
        """For outputs [h, R, D]."""
        off, means = of.values - of.block_values, of.block_values.squeeze(2)
        far = torch.cdist(means, out, compute_mode="donot_use_mm_for_euclid_dist").square()
        inner = (off @ of.block_values.mT).mT - out[:, None] @ off.mT
        return cls(off @ off.mT, inner, far)

    def squared(self, weights: Tensor) -> Tensor:
        """[h, N, R, G] -> [h, N, R]."""
        total = weights.sum(-1)
        inside = weights @ self.products + 2 * total[..., None] * self.with_mean
        return (torch.linalg.vecdot(inside, weights) + total.square() * self.mean).clamp_min(0)


def _log_gain(square: Tensor, log_count: Tensor) -> Tensor:
    """The logarithm of the mean of e^δ for so many normal δ of this variance."""
    most = 2 * log_count
    return torch.where(square <= most, square / 2, (square * most).sqrt() - log_count)


def statistics_share(layout: BlockLayout, samples: int, levels: tuple[int, ...]) -> float:
    """Its arithmetic as a share of dense attention's, for heads of 128: sampled rows see the means
    of groups (two products with keys, two with values, and up to two of a block's groups with each
    other) and of blocks, and every block of keys has one covariance, every group some products with
    itself."""
    k_block, group = layout.blocks.k, group_of(layout.blocks.k)
    seen = (2 + k_block / group / 128) / group + 1 / k_block
    once = (128 / 2 + group * len(_sizes(levels, group))) / layout.q.tokens
    return min(1.0, samples / layout.blocks.q) * seen + once
