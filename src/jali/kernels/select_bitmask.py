"""From one bit per block to ascending lists: what replaying a book costs a layer."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .score_tiles import power_of_two
from .select_lists import row_options
from .select_rank import running_count


@triton.jit
def _bitmask_lists_kernel(
    bits,  # uint8 [lines, row_bytes]
    counts,  # int32 [lines]
    indices,  # int32 [lines, n]
    n,
    row_bytes,
    N_PAD: tl.constexpr,
):
    line = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, N_PAD)
    real = column < n
    byte = tl.load(bits + line * row_bytes + (column >> 3), mask=real, other=0).to(tl.int32)
    chosen = ((byte >> (column & 7)) & 1) != 0
    place = running_count(chosen, N_PAD) - 1
    count = tl.sum(chosen.to(tl.int32), 0)
    tl.store(counts + line, count)
    tl.store(indices + line * n + place, column, mask=chosen)
    # What lies behind the count is never read, but stays a valid index whoever reads it.
    tl.store(indices + line * n + column, 0, mask=real & (column >= count))


def bitmask_lists(bits: Tensor, blocks: int, *, warps: int | None = None) -> tuple[Tensor, Tensor]:
    """The blocks whose bit is set, ascending, in one launch.

    bits uint8 [B,H,M,⌈N/8⌉], block j being bit j % 8 of byte j // 8 -> counts int32 [B,H,M] and
    indices int32 [B,H,M,N], 0 behind the count. Bits behind block N - 1 are ignored.
    """
    batch, heads, m, row_bytes = bits.shape
    if bits.dtype != torch.uint8 or row_bytes != -(-blocks // 8):
        raise ValueError(
            f"{blocks} blocks need uint8 rows of {-(-blocks // 8)} bytes, got {bits.dtype} rows of "
            f"{row_bytes}"
        )
    counts = torch.empty(*bits.shape[:3], dtype=torch.int32, device=bits.device)
    indices = torch.empty(batch, heads, m, blocks, dtype=torch.int32, device=bits.device)
    _launch(batch * heads * m, blocks, row_bytes, warps)(bits.contiguous(), counts, indices)
    return counts, indices


@functools.lru_cache(maxsize=256)
def _launch(lines: int, blocks: int, row_bytes: int, warps: int | None) -> Launch:
    n_pad = power_of_two(blocks)
    constants = {"N_PAD": n_pad, **row_options(n_pad, warps)}
    return Launch(_bitmask_lists_kernel, (lines,), (blocks, row_bytes), constants)
