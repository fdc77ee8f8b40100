"""What reading a block less finely does to the output: the table behind rate–distortion planning.

For a row with attention p over values v, output o and log-sum-exp lse, reading key block n as
means of groups g instead of in full changes the output, to first order, by

    Δ = Σ_{j in n} p_j (v_j − o) − Σ_{g in n} p̃_g (v̄_g − o),   p̃_g = exp(s q·k̄_g + ln|g| − lse),

and skipping it by the first sum alone. The table holds the mean of ‖Δ‖² over a few rows of each
query block, for every key block and level.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.kernels.lists import group_size
from jali.planning.plan import SKIP
from jali.planning.scoring import at_least_fp32
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

PER_OCTAVE = 4  # steps of a code in a factor of two
LOGITS = 2**24  # so many are held at a time


class ErrorTable(NamedTuple):
    """Errors of the levels above 1, one byte each: 255 is a head's largest, 4 less is half of it.

    codes uint8 [B, H, M, N, L], 0 for no error at all; top fp32 [B, H], the logarithm (base 2) of
    each head's largest error.
    """

    codes: Tensor
    top: Tensor
    levels: tuple[int, ...]

    def errors(self) -> Tensor:
        """fp32 [B, H, M, N, L]."""
        power = (self.codes.float() - 255) / PER_OCTAVE + self.top[..., None, None, None]
        return torch.where(self.codes == 0, 0, power.exp2())


def encode(errors: Tensor, levels: tuple[int, ...]) -> ErrorTable:
    """A table of errors fp32 [B, H, M, N, L] in bytes."""
    largest = errors.amax((2, 3, 4)).clamp_min(torch.finfo(torch.float32).tiny)
    top = largest.log2()
    below = (errors / largest[..., None, None, None]).log2() * PER_OCTAVE  # −inf for 0
    codes = (255 + below).round().clamp(0, 255).to(torch.uint8)
    return ErrorTable(codes, top, levels)


def error_table(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: BlockLayout,
    scale: float,
    positions: Tensor,
    levels: tuple[int, ...],
    padding: KeyPadding | None = None,
) -> ErrorTable:
    """Errors by the sampled rows of each query block; `positions` int64 [M, P], `levels` without 1.

    Every sampled row sees every key once. q [B, H, Sq, D], k and v [B, Hkv, Sk, D].
    """
    B, H, _, D = q.shape
    M, P = positions.shape
    share = H // k.shape[1]
    N, k_block = layout.N, layout.blocks.k
    rows = q.index_select(2, positions.flatten()).unflatten(1, (-1, share))  # [B, Hkv, share, R, D]
    errors = q.new_empty(B, H, M, N, len(levels), dtype=torch.float32)
    sizes = [1, *(group_size(level, k_block) for level in levels if level != SKIP)]
    pools = [_Pool.of(k, v, size, layout, padding) for size in sizes]
    at_once = max(1, LOGITS // (share * P * N * k_block))  # query blocks
    for b, kv in itertools.product(range(B), range(k.shape[1])):
        own = [each.of_head(b, kv) for each in pools]
        for m in range(0, M, at_once):
            some = rows[b, kv, :, m * P : (m + at_once) * P]
            found = _row_errors(at_least_fp32(some).reshape(-1, D) * scale, own, levels)
            found = found.view(N, len(levels), share, -1, P).nanmean(-1)  # [N, L, share, m]
            into = errors[b, kv * share : (kv + 1) * share, m : m + at_once]
            into.copy_(found.permute(2, 3, 0, 1))
    # Rows of text read everything; what they, or a query that is not finite, would lose is nothing.
    errors.masked_fill_(layout.text_rows[:, None, None], 0)
    return encode(errors.nan_to_num_(nan=0.0), levels)


def samples_share(layout: BlockLayout, samples: int, levels: tuple[int, ...]) -> float:
    """Its arithmetic as a share of dense attention's: sampled rows see all keys, values and their
    means once."""
    sizes = (group_size(level, layout.blocks.k) for level in levels if level != SKIP)
    return min(1.0, samples / layout.blocks.q) * (1 + sum(1 / size for size in sizes))


class _Pool(NamedTuple):
    """Keys, values and the logarithm of how many tokens each stands for, cut into N blocks."""

    keys: Tensor  # [B, Hkv, N, g, D]
    values: Tensor  # [B, Hkv, N, g, D]
    log_count: Tensor  # [B|1, N, 1, g]

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, size: int, layout: BlockLayout, padding: KeyPadding | None
    ) -> _Pool:
        N, k_block, S = layout.N, layout.blocks.k, k.shape[2]
        real = torch.ones(1, S, dtype=torch.bool, device=k.device)
        if padding is not None:
            real = padding.valid(S)
            k, v = (x.masked_fill(~real[:, None, :, None], 0) for x in (k, v))
        count = F.pad(real, (0, N * k_block - S)).view(-1, N, k_block // size, size).sum(-1)
        each = count.clamp_min(1)[:, None, ..., None]
        shape = (N, k_block // size, size)
        padded = (F.pad(at_least_fp32(x), (0, 0, 0, N * k_block - S)) for x in (k, v))
        keys, values = (x.unflatten(2, shape).sum(4) / each for x in padded)
        return cls(keys, values, count[:, :, None].log())

    def of_head(self, b: int, kv: int) -> _Pool:
        """Of one sample and head: [N, g, D] and [N, 1, g]."""
        keys, values, log_count = self
        return _Pool(keys[b, kv], values[b, kv], log_count[b % len(log_count)])


def _row_errors(rows: Tensor, pools: list[_Pool], levels: tuple[int, ...]) -> Tensor:
    """‖Δ‖² of every row, block and level. rows [R, D], scaled -> [N, L, R]."""
    full = pools[0]
    logits = _logits(rows, full)
    lse = logits.logsumexp((0, 2))  # [R]
    lse = torch.where(lse == -torch.inf, 0, lse)  # a row that sees no real key
    weights = (logits - lse[:, None]).exp_()
    parts = weights @ full.values  # [N, R, D]
    out = parts.sum(0)
    exact = parts - weights.sum(-1, keepdim=True) * out
    errors = []
    pooled = iter(pools[1:])
    for level in levels:
        change = exact
        if level != SKIP:
            means = next(pooled)
            weights = (_logits(rows, means) - lse[:, None]).exp_()
            change = exact - (weights @ means.values - weights.sum(-1, keepdim=True) * out)
        errors.append(change.square().sum(-1))
    return torch.stack(errors, dim=1)


def _logits(rows: Tensor, of: _Pool) -> Tensor:
    """[R, D] -> [N, R, g]."""
    found: Tensor = rows @ of.keys.mT
    return found.add_(of.log_count)
