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

from jali import kernels
from jali.kernels.lists import MEAN, group_size
from jali.planning.plan import SKIP
from jali.planning.scoring import at_least_fp32
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

PER_OCTAVE = 4  # steps of a code in a factor of two


def numbers_at_once(device: torch.device) -> int:
    """How many are held at a time: on a CPU what its cache holds."""
    return 2**20 if device.type == "cpu" else 2**24


class ErrorTable(NamedTuple):
    """Errors of the levels above 1, one byte each: 255 is a head's largest, 4 less is half of it.

    codes uint8 [B, H, M, N, L], 0 for no error at all; top fp32 [B, H], the logarithm (base 2) of
    each head's largest error. `left` [B, prices] is the work that is left at every price, where
    that is known: the same for all budgets.
    """

    codes: Tensor
    top: Tensor
    levels: tuple[int, ...]
    left: Tensor | None = None

    def filled_with(self, other: ErrorTable) -> ErrorTable:
        """The other's errors, of the same shape, in this one's memory."""
        self.codes.copy_(other.codes)
        self.top.copy_(other.top)
        if self.left is None or other.left is None:
            return self._replace(levels=other.levels, left=other.left)
        self.left.copy_(other.left)
        return self._replace(levels=other.levels)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + (0 if self.left is None else self.left.nbytes)

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
    if _use_kernel(q, layout, positions, scale, padding):
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        errors = kernels.load("sampled_errors").sampled_errors(
            q, k, v, layout.blocks.k, scale, positions, levels, padding and padding.length
        )
    else:
        errors = _sampled_errors(q, k, v, layout, scale, positions, levels, padding)
    # Rows of text read everything; what they, or a query that is not finite, would lose is nothing.
    errors.masked_fill_(layout.text_rows[:, None, None], 0)
    return encode(errors.nan_to_num_(nan=0.0), levels)


def _use_kernel(
    q: Tensor, layout: BlockLayout, positions: Tensor, scale: float, padding: KeyPadding | None
) -> bool:  # fmt: skip
    """Whether the Triton kernel can do this."""
    if not kernels.available(q.device) or q.dtype == torch.float64 or not scale > 0:
        return False
    if padding is not None and padding.length is None:
        return False
    if not 16 <= q.shape[3] <= 256:
        return False
    return positions.shape[1] <= 64 and layout.blocks.k <= 128


def _sampled_errors(
    q: Tensor, k: Tensor, v: Tensor, layout: BlockLayout, scale: float, positions: Tensor,
    levels: tuple[int, ...], padding: KeyPadding | None,
) -> Tensor:  # fmt: skip
    """fp32 [B, H, M, N, L]; what the kernel is measured against."""
    B, H, _, D = q.shape
    M, P = positions.shape
    share = H // k.shape[1]
    N, k_block = layout.N, layout.blocks.k
    rows = q.index_select(2, positions.flatten()).unflatten(1, (-1, share))  # [B, Hkv, share, R, D]
    errors = q.new_empty(B, H, M, N, len(levels), dtype=torch.float32)
    sizes = [1, *(group_size(level, k_block) for level in levels if level != SKIP)]
    pools = _pools(k, v, layout, sizes, padding)
    at_once = max(1, numbers_at_once(q.device) // (share * P * N * k_block))  # query blocks
    for b, kv in itertools.product(range(B), range(k.shape[1])):
        own = [each.of_head(b, kv) for each in pools]
        for m in range(0, M, at_once):
            some = rows[b, kv, :, m * P : (m + at_once) * P]
            found = _row_errors(at_least_fp32(some).reshape(-1, D) * scale, own, levels)
            found = found.view(N, len(levels), share, -1, P).nanmean(-1)  # [N, L, share, m]
            into = errors[b, kv * share : (kv + 1) * share, m : m + at_once]
            into.copy_(found.permute(2, 3, 0, 1))
    return errors


def samples_share(layout: BlockLayout, samples: int, levels: tuple[int, ...]) -> float:
    """Its arithmetic as a share of dense attention's: sampled rows see all keys, values and their
    means once. By the kernel they see keys and values first and keys once more, and then the values
    of every level but the coarsest."""
    sizes = [group_size(level, layout.blocks.k) for level in levels if level != SKIP]
    rows = min(1.0, samples / layout.blocks.q)
    if not kernels.available(layout.device):
        return rows * (1 + sum(1 / size for size in sizes))
    seen = [1, *sizes]
    if MEAN in levels or SKIP not in levels:
        seen.pop()
    return rows * (1.5 + sum(0.5 / size for size in seen))


class _Pool(NamedTuple):
    """Keys in N blocks of groups; sums of their values, beside them how many keys each has."""

    keys: Tensor  # means, [B, Hkv, N, g, D]
    values: Tensor  # [B, Hkv, N, g, D + 1]
    empty: Tensor | None  # −inf for groups without a real key, else 0; [B|1, N, 1, g]

    @classmethod
    def of(cls, k: Tensor, v: Tensor, real: Tensor, size: int, whole: bool) -> _Pool:
        """Of padded keys [B, Hkv, N, k_block, D], of which some are `real` [B|1, 1, N, k_block]."""
        count = real.unflatten(3, (-1, size)).sum(-1)[..., None]
        keys, values = (x.unflatten(3, (-1, size)).sum(4) if size > 1 else x for x in (k, v))
        counts = count.expand(*values.shape[:-1], 1).to(values)
        empty = None if whole else torch.where(count > 0, 0.0, -torch.inf)[:, 0].mT.to(keys)
        means = keys if size == 1 else keys / count.clamp_min(1)
        return cls(means, torch.cat([values, counts], -1), empty)

    def of_head(self, b: int, kv: int) -> _Pool:
        """Of one sample and head: [N, g, D], [N, g, D + 1] and [N, 1, g]."""
        keys, values, empty = self
        return _Pool(keys[b, kv], values[b, kv], None if empty is None else empty[b % len(empty)])


def _pools(
    k: Tensor, v: Tensor, layout: BlockLayout, sizes: list[int], padding: KeyPadding | None
) -> list[_Pool]:
    N, k_block, S = layout.N, layout.blocks.k, k.shape[2]
    missing = N * k_block - S
    real = torch.ones(1, S, dtype=torch.bool, device=k.device)
    if padding is not None:
        real = padding.valid(S)
        k, v = (x.masked_fill(~real[:, None, :, None], 0) for x in (k, v))
    real = F.pad(real, (0, missing)).view(-1, 1, N, k_block)
    padded = (F.pad(x, (0, 0, 0, missing)) if missing else x for x in (k, v))
    keys, values = (at_least_fp32(x).unflatten(2, (N, k_block)) for x in padded)
    whole = padding is None and not missing
    return [_Pool.of(keys, values, real, size, whole) for size in sizes]


def _row_errors(rows: Tensor, pools: list[_Pool], levels: tuple[int, ...]) -> Tensor:
    """‖Δ‖² of every row, block and level. rows [R, D], scaled -> [N, L, R]."""
    full = pools[0]
    logits = _logits(rows, full)
    peak = logits.amax((0, 2))[:, None]  # [R, 1]
    peak = torch.where(peak == -torch.inf, 0, peak)  # a row that sees no real key
    parts = logits.sub_(peak).exp_() @ full.values  # [N, R, D + 1], the last is mass
    total = parts[..., -1:].sum(0).clamp_min(torch.finfo(parts.dtype).tiny)  # [R, 1]
    parts /= total
    lse, out = peak + total.log(), parts[..., :-1].sum(0)
    errors = parts.new_empty(len(levels), *parts.shape[:2])
    pooled = iter(pools[1:])
    memory = torch.empty_like(parts)
    for level, error in zip(levels, errors, strict=True):
        wrong = parts
        if level != SKIP:
            means = next(pooled)
            weights = _logits(rows, means).sub_(lse).exp_()
            wrong = torch.baddbmm(parts, weights, means.values, alpha=-1, out=memory)
        change = torch.addcmul(wrong[..., :-1], wrong[..., -1:], out, value=-1)
        torch.linalg.vector_norm(change, dim=-1, out=error)
    return errors.square_().transpose(0, 1)


def _logits(rows: Tensor, of: _Pool) -> Tensor:
    """[R, D] -> [N, R, g]."""
    found: Tensor = rows @ of.keys.mT
    return found if of.empty is None else found.add_(of.empty)
