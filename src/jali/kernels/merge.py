"""Two attentions over different keys become one: their outputs, weighed by their sums."""

from __future__ import annotations

import functools

import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch
from .score_tiles import cdiv, power_of_two


@triton.jit
def _merge_kernel(
    A, LSE_A, B, LSE_B,
    heads, seq, rows,
    ab, ah, as_, bb, bh, bs,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A and LSE_A are overwritten. Rows run over tokens, then heads: neighbours in BSHD memory."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    real = row < rows
    h = row % heads
    s = row // heads % seq
    b = row // heads // seq
    at_lse = (b * heads + h) * seq + s
    lse_a = tl.load(LSE_A + at_lse, mask=real, other=0.0)
    lse_b = tl.load(LSE_B + at_lse, mask=real, other=0.0)
    top = tl.maximum(lse_a, lse_b)
    top = tl.where(top == float("-inf"), 0.0, top)  # neither has a key
    weight_a = tl.exp(lse_a - top)
    weight_b = tl.exp(lse_b - top)
    total = weight_a + weight_b
    norm = tl.where(total == 0.0, 1.0, total)
    d = tl.arange(0, BLOCK_D)
    mask = real[:, None] & (d < D)[None, :]
    at_a = A + (b * ab + h * ah + s * as_)[:, None] + d[None, :]
    a = tl.load(at_a, mask=mask, other=0.0).to(tl.float32)
    at_b = B + (b * bb + h * bh + s * bs)[:, None] + d[None, :]
    other = tl.load(at_b, mask=mask, other=0.0).to(tl.float32)
    out = (a * weight_a[:, None] + other * weight_b[:, None]) / norm[:, None]
    tl.store(at_a, out.to(A.dtype.element_ty), mask=mask)
    tl.store(LSE_A + at_lse, tl.log(total) + top, mask=real)


def merge_attention(a: Tensor, lse_a: Tensor, b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over the union of two disjoint sets of keys, in place of `a` and `lse_a`.

    a, b [B, H, S, D] (any strides, last dim contiguous) with their natural log-sum-exps, fp32
    [B, H, S] contiguous. A row that is −inf in both stays 0 and −inf.
    """
    if b.shape != a.shape or lse_a.shape != a.shape[:3] or lse_b.shape != a.shape[:3]:
        raise ValueError(f"{tuple(a.shape)} and {tuple(b.shape)} do not match")
    if not (lse_a.is_contiguous() and lse_b.is_contiguous()):
        raise ValueError("both log-sum-exps must be contiguous")
    _launch(a.shape, a.stride(), b.stride())(a, lse_a, b, lse_b)
    return a, lse_a


@functools.lru_cache(maxsize=256)
def _launch(shape: tuple[int, ...], a_stride: tuple[int, ...], b_stride: tuple[int, ...]) -> Launch:
    batch, heads, seq, dim = shape
    block_d = power_of_two(dim)
    rows_each = max(1, 4096 // block_d)
    rows = batch * heads * seq
    numbers = (heads, seq, rows, *a_stride[:3], *b_stride[:3])
    constants = {"D": dim, "BLOCK_D": block_d, "ROWS": rows_each, "num_warps": 4}
    return Launch(_merge_kernel, (cdiv(rows, rows_each),), numbers, constants)
