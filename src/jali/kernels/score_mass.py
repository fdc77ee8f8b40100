"""Second level of a two-level softmax: from per-block log-sums to the mean mass per key block."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .score_tiles import power_of_two

_NEGATIVE = tl.constexpr(float("-inf"))


@triton.jit
def _mass_kernel(
    lse,  # fp32 [heads, rows, n * PARTS]: log2 of the exponential sum of each part of a key block
    out,  # fp32 [heads, m, n]
    rows, n, m,
    ROWS: tl.constexpr,  # rows of one query block
    PARTS: tl.constexpr,  # parts of one key block
    CHUNK: tl.constexpr,  # rows handled together
    N_PAD: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, N_PAD)
    in_chunk = tl.arange(0, CHUNK)
    first = block * ROWS
    count = tl.minimum(ROWS, rows - first)
    mass = tl.zeros([N_PAD], tl.float32)
    for start in range(0, count, CHUNK):
        row = start + in_chunk
        real = (row < count)[:, None] & (column < n)[None, :]
        base = lse + head * rows * (n * PARTS) + (first + row)[:, None] * (n * PARTS)
        base += column[None, :] * PARTS
        if PARTS == 1:
            logs = tl.load(base, mask=real, other=_NEGATIVE)
            top = tl.max(logs, 1)
            # A row without a single real key has no maximum; it must come out as zeros, not NaN.
            top = tl.where(top == _NEGATIVE, 0.0, top)
            share = tl.exp2(logs - top[:, None])
        else:
            top = tl.full([CHUNK], _NEGATIVE, tl.float32)
            for part in tl.static_range(PARTS):
                top = tl.maximum(top, tl.max(tl.load(base + part, mask=real, other=_NEGATIVE), 1))
            top = tl.where(top == _NEGATIVE, 0.0, top)
            share = tl.zeros([CHUNK, N_PAD], tl.float32)
            for part in tl.static_range(PARTS):
                share += tl.exp2(tl.load(base + part, mask=real, other=_NEGATIVE) - top[:, None])
        total = tl.sum(share, 1)
        total = tl.where(total > 0.0, total, 1.0)
        mass += tl.sum(share / total[:, None], 0)
    tl.store(out + (head * m + block) * n + column, mass / count, mask=column < n)


@functools.lru_cache(maxsize=256)
def mass_launch(heads: int, rows: int, m: int, n: int, rows_per_block: int, parts: int) -> Launch:
    """Turns log-sums into the mean softmax mass of every (query block, key block).

    Its tensors: `lse` fp32 [heads, rows, n * parts] contiguous, log2 units, -inf for "no key",
    where runs of `rows_per_block` rows form a query block (the last may be short); and `out` fp32
    [heads, m, n] contiguous, each row of which then sums to 1.
    """
    n_pad = power_of_two(n)
    chunk = max(1, min(power_of_two(rows_per_block), 4096 // n_pad))
    constants = {
        "ROWS": rows_per_block,
        "PARTS": parts,
        "CHUNK": chunk,
        "N_PAD": n_pad,
        "num_warps": 4 if n_pad * chunk >= 2048 else 2,
    }
    return Launch(_mass_kernel, (m, heads), (rows, n, m), constants)


class MassLaunches(NamedTuple):
    """How scores are made, some heads at a time: one launch writes log-sums into scratch memory,
    `mass_launch` turns them into mass.

    `shape`: that of the scores [B, H, M, N]. `scratch`: that of the log-sums [heads of a launch,
    rows, parts]. `parts`: from which head, to which, and the two launches.
    """

    shape: tuple[int, int, int, int]
    scratch: tuple[int, int, int]
    parts: tuple[tuple[int, int, Launch, Launch], ...]

    def __call__(self, device: torch.device, *tensors: Any) -> Tensor:
        """The scores, fp32. `tensors`: those of the first launch, but for the log-sums."""
        out = torch.empty(*self.shape, dtype=torch.float32, device=device)
        lse = torch.empty(*self.scratch, dtype=torch.float32, device=device)
        if len(self.parts) == 1:
            _, _, score, mass = self.parts[0]
            score(*tensors, lse)
            mass(lse, out)
            return out
        by_head = out.flatten(0, 1)
        for start, stop, score, mass in self.parts:
            score(*tensors, lse)
            mass(lse[: stop - start], by_head[start:stop])
        return out
