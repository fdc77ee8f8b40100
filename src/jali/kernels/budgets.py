"""Per-head budgets from the entropy of block scores, solved on the device, exactly."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .score_tiles import cdiv, power_of_two

# Scalars reach a kernel as fp32, too coarse where a share times N must round exactly: they travel
# as fixed-point integers instead.
_FIXED = 1 << 40
_UNIT = tl.constexpr(1.0 / _FIXED)


@triton.jit
def _row_entropy_kernel(scores, out, rows, n, factor, CHUNK: tl.constexpr, N_PAD: tl.constexpr):
    row = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    column = tl.arange(0, N_PAD)
    at = scores + row.to(tl.int64)[:, None] * n + column[None, :]
    p = tl.load(at, mask=(row < rows)[:, None] & (column < n)[None, :], other=0.0)
    terms = tl.where(p > 0.0, p * tl.log2(tl.where(p > 0.0, p, 1.0)), 0.0)
    tl.store(out + row, -tl.sum(terms, 1) * factor, mask=row < rows)


def row_entropy(scores: Tensor) -> Tensor:
    """Entropy of each row of scores [B,H,M,N] divided by ln N, in [0, 1]: fp32 [B,H,M].

    Rows are distributions (non-negative, sum 1). N = 1 has no entropy to speak of and counts as 1.
    """
    shape = scores.shape
    if shape[3] == 1:
        return torch.ones(shape[:3], dtype=torch.float32, device=scores.device)
    out = torch.empty(*shape[:3], dtype=torch.float32, device=scores.device)
    _entropy_launch(shape)(scores.contiguous(), out)
    return out


@functools.lru_cache(maxsize=256)
def _entropy_launch(shape: tuple[int, ...]) -> Launch:
    rows, n = math.prod(shape[:3]), shape[3]
    n_pad = power_of_two(n)
    chunk = max(1, 2048 // n_pad)
    constants = {"CHUNK": chunk, "N_PAD": n_pad, "num_warps": 4}
    return Launch(
        _row_entropy_kernel, (cdiv(rows, chunk),), (rows, n, 1.0 / math.log2(n)), constants
    )


@triton.jit(do_not_specialize=["heads", "m", "n", "total", "floor", "ceiling", "sharpness"])
def _budget_kernel(
    entropy,  # fp32 [B, H, m]
    rows,  # bool or uint8 [m], or unused
    keep,  # int32 [B, H]
    heads, m, n, total, floor, ceiling, sharpness,
    HEADS: tl.constexpr, CHUNK: tl.constexpr, HAS_ROWS: tl.constexpr,
):  # fmt: skip
    batch = tl.program_id(0)
    h = tl.arange(0, HEADS)
    in_chunk = tl.arange(0, CHUNK)
    head_real = h < heads

    # Mean entropy per head over the rows that take part.
    sums = tl.zeros([HEADS, CHUNK], tl.float32)
    used = tl.zeros([CHUNK], tl.int32)
    for start in range(0, m, CHUNK):
        row = start + in_chunk
        take = row < m
        if HAS_ROWS:
            take &= tl.load(rows + row, mask=row < m, other=0) != 0
        at = entropy + ((batch * heads + h) * m)[:, None] + row[None, :]
        sums += tl.load(at, mask=head_real[:, None] & take[None, :], other=0.0)
        used += take.to(tl.int32)
    count = tl.maximum(tl.sum(used, 0), 1)
    mean = tl.sum(sums, 1).to(tl.float64) / count

    # Bounds, relaxed where the asked total could not be met within them.
    all_blocks = (heads * n).to(tl.float64)
    target = total.to(tl.float64) / all_blocks
    low = tl.maximum(floor.to(tl.float64) * _UNIT, 1.0 / n.to(tl.float64))
    low = tl.minimum(low, target)
    high = tl.maximum(ceiling.to(tl.float64) * _UNIT, target)

    power = sharpness.to(tl.float64) * _UNIT * tl.log(tl.maximum(mean, 0.0) + 1e-6)
    power = tl.where(head_real, power, float("-inf"))
    # The strongest head weighs 1; the weakest one must stay above 0 for its bend to exist.
    weight = tl.exp(tl.maximum(power - tl.max(power, 0), -600.0))

    # The mean of clip(x * weight, low, high) is piecewise linear in x and bends only where a head
    # meets a bound: evaluate every bend at once, then interpolate between its two neighbours.
    safe = tl.where(head_real, weight, 1.0)
    bend_low = low / safe
    bend_high = high / safe
    zero = tl.zeros([HEADS, HEADS], tl.float64)
    all_real = head_real[None, :] & head_real[:, None]
    clipped = tl.minimum(tl.maximum(bend_low[:, None] * weight[None, :], low), high)
    at_low = tl.sum(tl.where(all_real, clipped, zero), 1)
    clipped = tl.minimum(tl.maximum(bend_high[:, None] * weight[None, :], low), high)
    at_high = tl.sum(tl.where(all_real, clipped, zero), 1)
    want = target * heads
    tiny = want * 1e-13
    far = float("inf")
    below_low = head_real & (at_low <= want + tiny)
    below_high = head_real & (at_high <= want + tiny)
    above_low = head_real & (at_low >= want - tiny)
    above_high = head_real & (at_high >= want - tiny)
    x0 = tl.maximum(
        tl.max(tl.where(below_low, bend_low, 0.0), 0),
        tl.max(tl.where(below_high, bend_high, 0.0), 0),
    )
    y0 = tl.maximum(
        tl.max(tl.where(below_low, at_low, 0.0), 0),
        tl.max(tl.where(below_high, at_high, 0.0), 0),
    )
    x1 = tl.minimum(
        tl.min(tl.where(above_low, bend_low, far), 0),
        tl.min(tl.where(above_high, bend_high, far), 0),
    )
    y1 = tl.minimum(
        tl.min(tl.where(above_low, at_low, far), 0),
        tl.min(tl.where(above_high, at_high, far), 0),
    )
    rise = tl.where((y1 - y0 > tiny) & (x1 > x0), y1 - y0, 1.0)
    step = tl.where((y1 - y0 > tiny) & (x1 > x0), (want - y0) * (x1 - x0) / rise, 0.0)
    share = tl.minimum(tl.maximum((x0 + step) * weight, low), high)

    # Whole blocks: floors first, then what is left goes to the largest fractions, lower head first.
    ideal = share * n
    whole = tl.floor(ideal + 1e-6).to(tl.int32)
    whole = tl.where(head_real, tl.minimum(tl.maximum(whole, 1), n), 0)
    rest = (ideal - whole.to(tl.float64)) * 1048576.0
    rest = tl.where(head_real & (whole < n), tl.floor(rest + 0.5), -2147483647.0).to(tl.int32)
    left = total - tl.sum(whole, 0)
    order = rest.to(tl.int64) * 256 - h
    ahead = tl.sum((order[None, :] > order[:, None]).to(tl.int32), 1)
    tl.store(keep + batch * heads + h, whole + (ahead < left).to(tl.int32), mask=head_real)


def entropy_budgets(
    scores: Tensor,
    mean: float,
    floor: float,
    ceiling: float,
    sharpness: float,
    rows: Tensor | None = None,
    *,
    entropy: Tensor | None = None,
) -> Tensor:
    """Key blocks per head in proportion to the entropy of its scores: int32 [B,H].

    scores [B,H,M,N] with rows that sum to 1; `rows` bool [M] marks the query blocks that take part
    in the entropy (None: all). share_h = clip(x * (E_h + 1e-6)^sharpness, max(floor, 1/N), ceiling)
    with x such that the mean share is `mean`. The sum over heads is exactly
    clamp(floor(mean * N * H + 0.5), H, N * H) per batch element, every head gets between 1 and N.
    `entropy` fp32 [B,H,M] replaces the rows' own (see `row_entropy`). No host synchronisation.
    """
    shape = scores.shape
    launch = _budget_launch(shape, mean, floor, ceiling, sharpness, rows is not None)
    entropy = row_entropy(scores) if entropy is None else entropy.contiguous()
    keep = torch.empty(*shape[:2], dtype=torch.int32, device=scores.device)
    launch(entropy, None if rows is None else rows.contiguous(), keep)
    return keep


@functools.lru_cache(maxsize=256)
def _budget_launch(
    shape: tuple[int, ...], mean: float, floor: float, ceiling: float, sharpness: float,
    has_rows: bool,
) -> Launch:  # fmt: skip
    batch, heads, m, n = shape
    if not 0 <= mean <= 1 or sharpness < 0 or heads > 128:
        raise ValueError("need 0 <= mean <= 1, sharpness >= 0 and at most 128 heads")
    total = min(max(math.floor(mean * n * heads + 0.5), heads), n * heads)
    fixed = (round(floor * _FIXED), round(ceiling * _FIXED), round(sharpness * _FIXED))
    padded = max(2, power_of_two(heads))
    constants = {
        "HEADS": padded,
        "CHUNK": max(16, min(256, 4096 // padded)),
        "HAS_ROWS": has_rows,
        "num_warps": 4 if padded <= 32 else 8,
    }
    return Launch(_budget_kernel, (batch,), (heads, m, n, total, *fixed), constants)
