"""Probes on a GPU: their dense attention, spread over the device; what they say of a head, by one
program; and the correction of all rows in one pass."""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.lists import BlockList

from .attention import block_sparse_attention
from .launch import Launch, TensorSpec, spec_of
from .score_tiles import (
    cdiv,
    even_splits,
    padded_dim,
    power_of_two,
    precision,
    processors,
    shared_bytes,
)

MOST_ROWS = 64  # more would leave the registers
MOST_DIM = 128
_K_BLOCK = 128
_TILE = 64  # rows; H200, 32,760 tokens: 0.09 ms, of 128 rows 0.10
_SHARED = 116 * 1024  # bytes that a head dim of 128 takes
_COLUMNS = 32  # at once: all of a row would leave the registers


def fits(device: torch.device, rows: int, dim: int) -> bool:
    """Whether there is a kernel for so many rows of such heads, and room for it on a device."""
    shapes = rows % 16 == 0 and rows <= MOST_ROWS and 16 <= dim <= MOST_DIM
    return shapes and (dim <= MOST_DIM // 2 or shared_bytes(device) >= _SHARED)


def rows_attention(
    q: Tensor, k: Tensor, v: Tensor, rows: Tensor, scale: float, key_length: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Dense attention of a few rows, in parts of the keys: a head has too few rows to fill a GPU.

    Returns out [B, H, parts, R, D] and log-sum-exps [B, H, parts, R] of `rows` int64 [R]; R is a
    multiple of 16.
    """
    B, H, _, D = q.shape
    count = len(rows)
    stretches = _stretches(cdiv(k.shape[2], _K_BLOCK), B * H, q.device)
    parts = stretches.counts.shape[2]
    some = q.index_select(2, rows.repeat(parts))
    out, lse = block_sparse_attention(
        some, k, v, {1: stretches}, count, _K_BLOCK, scale, key_length
    )  # fmt: skip
    return out.view(B, H, parts, count, D), lse.view(B, H, parts, count)


@functools.lru_cache(maxsize=64)
def _stretches(blocks: int, programs: int, device: torch.device) -> BlockList:
    """Lists of equally many neighbouring key blocks, so that `programs` times as many fill a GPU;
    the last one of those that are left."""
    each = even_splits(blocks, programs, 2 * processors(device))
    block = torch.arange(cdiv(blocks, each) * each, dtype=torch.int32).view(-1, each)
    counts = (block < blocks).sum(-1, dtype=torch.int32)
    block = block.where(block < blocks, 0)
    return BlockList(counts[None, None].to(device), block[None, None].to(device))


@triton.jit
def _inverse(matrix, same, largest, STEPS: tl.constexpr):
    """Of a symmetric matrix with eigenvalues from 1 to `largest`, by Newton's steps: each squares
    what is missing to the identity. Elimination would be a chain of R small ones."""
    inverse = tl.where(same, 2 / (1 + largest), 0.0)
    for _ in range(STEPS):
        product = tl.dot(matrix, inverse, input_precision="tf32x3")
        inverse = 2 * inverse - tl.dot(inverse, product, input_precision="tf32x3")
    return inverse


@triton.jit
def _columns(base, at, out_s, first, counted, number, size, D: tl.constexpr, C: tl.constexpr):
    """C columns of the sparse rows from `first` on, less their means; and these [C]."""
    d = first + tl.arange(0, C)
    within = counted[:, None] & (d < D)[None, :]
    x = tl.load(base + at[:, None] * out_s + d[None, :], mask=within, other=0.0)
    x = x.to(tl.float32) / size
    mean = tl.sum(x, 0) / number
    return tl.where(counted[:, None], x - mean[None, :], 0.0), mean


@triton.jit
def _exact(parts, lses, slot, i, d, within, count, splits, D: tl.constexpr):
    """The rows' attention over all parts of the keys. fp32 [R, D_PAD]."""
    peak = tl.where(i < count, 0.0, 0.0) + float("-inf")
    total = tl.zeros_like(peak)
    exact = tl.where(within, 0.0, 0.0)
    for part in range(splits):
        first = (slot * splits + part) * count
        lse = tl.load(lses + first + i, mask=i < count, other=float("-inf"))
        some = tl.load(parts + (first + i)[:, None] * D + d[None, :], mask=within, other=0.0)
        higher = tl.maximum(peak, lse)
        top = tl.where(higher == float("-inf"), 0.0, higher)  # no real key so far
        before, now = tl.exp(peak - top), tl.exp(lse - top)
        exact = exact * before[:, None] + some.to(tl.float32) * now[:, None]
        total = total * before + now
        peak = higher
    return exact / tl.where(total == 0, 1.0, total)[:, None]


@triton.jit
def _fit_kernel(
    out,  # [B, H, S, D], sparse
    parts, lses,  # [B, H, P, R, D] and fp32 [B, H, P, R], contiguous
    rows,  # int64 [R]
    sparse,  # bool [B|1, H|1, M]: query blocks that do not read everything
    key_length,  # of the queries too; or unused
    weight, shift,  # [B, H, D_PAD, D_PAD] and fp32 [B, H, D_PAD]
    heads, count, splits, q_block, sparse_b, sparse_h, out_b, out_h, out_s,
    ridge, least, tiny, rounding, fewest,
    D: tl.constexpr, D_PAD: tl.constexpr, R: tl.constexpr, C: tl.constexpr, STEPS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
):  # fmt: skip
    """What is lacking as an affine function of what is there, as far as it is believed: W = Xᵀ L,
    where L = (X Xᵀ + s)⁻¹ Y, for there are fewer rows than columns. s L is what the fit leaves of
    Y, and s times the inverse's diagonal how little a row decides itself."""
    slot = tl.program_id(0).to(tl.int64)
    batch, head = slot // heads, slot % heads
    i, d = tl.arange(0, R), tl.arange(0, D_PAD)
    within = (i < count)[:, None] & (d < D)[None, :]
    at = tl.load(rows + i, mask=i < count, other=0)
    base = out + batch * out_b + head * out_h
    x = tl.load(base + at[:, None] * out_s + d[None, :], mask=within, other=0.0).to(tl.float32)
    y = _exact(parts, lses, slot, i, d, within, count, splits, D) - x

    asked = sparse + batch * sparse_b + head * sparse_h + at // q_block
    counted = (i < count) & (tl.load(asked, mask=i < count, other=0) != 0)
    if HAS_LENGTH:
        counted &= at < tl.load(key_length + batch)
    counted &= tl.sum(y * 0.0, 1) == 0.0  # 0 · x is 0 of numbers alone
    number = tl.maximum(tl.sum(counted.to(tl.float32), 0), 1.0)
    largest = tl.where(counted[:, None], tl.maximum(tl.abs(x), tl.abs(y)), 0.0)
    size = tl.maximum(tl.max(largest), tiny)
    y = tl.where(counted[:, None], y / size, 0.0)
    whole = tl.where(counted[:, None], x / size, 0.0)
    whole = tl.sum(whole * whole)
    y_mean = tl.sum(y, 0) / number
    centred = tl.where(counted[:, None], y - y_mean[None, :], 0.0)

    square = tl.zeros([R, R], tl.float32)
    for first in tl.static_range(0, D_PAD, C):
        some, _ = _columns(base, at, out_s, first, counted, number, size, D, C)
        square = tl.dot(some, tl.trans(some), acc=square, input_precision="tf32x3")
    same = i[:, None] == i[None, :]
    varied = tl.sum(tl.where(same, square, 0.0))
    strength = (ridge * varied + rounding * whole) / D + tiny
    square = square / strength + tl.where(same, 1.0, 0.0)
    inverse = _inverse(square, same, 1 + D / ridge, STEPS)
    left = tl.dot(inverse, centred, input_precision="tf32x3")
    own = tl.sum(tl.where(same, inverse, 0.0), 1) - 1 / number
    told = tl.where(counted[:, None], y - left / tl.maximum(own, least)[:, None], 0.0)
    norm = tl.maximum(tl.sum(told * told), tiny)
    believed = tl.sum(y * told) / norm
    believed = tl.minimum(tl.maximum(tl.where(believed == believed, believed, 0.0), 0.0), 1.0)
    believed = tl.where(number < fewest, 0.0, believed)

    left = left * (believed / strength)
    constant = y_mean * believed
    for first in tl.static_range(0, D_PAD, C):
        some, mean = _columns(base, at, out_s, first, counted, number, size, D, C)
        fitted = tl.dot(tl.trans(some), left, input_precision="tf32x3")
        fitted = tl.where(fitted * 0.0 == 0.0, fitted, 0.0)
        constant -= tl.sum(mean[:, None] * fitted, 0)
        row = (first + tl.arange(0, C))[:, None]
        into = weight + slot * D_PAD * D_PAD + row * D_PAD + d[None, :]
        tl.store(into, fitted.to(weight.dtype.element_ty))
    constant = tl.where(constant * 0.0 == 0.0, constant, 0.0) * size
    tl.store(shift + slot * D_PAD + d, constant)


@triton.jit
def _apply_kernel(
    out, sparse, weight, shift,
    heads, tokens, q_block, sparse_b, sparse_h, out_b, out_h, out_s,
    D: tl.constexpr, D_PAD: tl.constexpr, TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add to sparse rows what they lack, in place."""
    slot = tl.program_id(1).to(tl.int64)
    batch, head = slot // heads, slot % heads
    row, d = tl.program_id(0) * TILE + tl.arange(0, TILE), tl.arange(0, D_PAD)
    wanted = tl.load(
        sparse + batch * sparse_b + head * sparse_h + row // q_block, mask=row < tokens, other=0
    )
    within = (wanted != 0)[:, None] & (d < D)[None, :]
    at = out + batch * out_b + head * out_h + row.to(tl.int64)[:, None] * out_s + d[None, :]
    x = tl.load(at, mask=within, other=0.0)
    w = tl.load(weight + slot * D_PAD * D_PAD + d[:, None] * D_PAD + d[None, :])
    added = tl.dot(x, w, input_precision=PRECISION) + tl.load(shift + slot * D_PAD + d)[None, :]
    corrected = (x.to(tl.float32) + added).to(out.dtype.element_ty)
    in_range = corrected.to(tl.float32) * 0.0 == 0.0
    tl.store(at, tl.where(in_range, corrected, x), mask=within)


def _steps(largest: float) -> int:
    """After how many of Newton's steps the least eigenvalue is inverted to seven digits."""
    missing = -math.log1p(-2 / (1 + largest))
    return math.ceil(math.log2(math.log(1e7) / missing))


def correct_rows(
    out: Tensor, parts: Tensor, lse: Tensor, rows: Tensor, sparse: Tensor, q_block: int,
    key_length: Tensor | None, ridge: float, least: float, tiny: float, rounding: float,
    fewest: int,
) -> Tensor:  # fmt: skip
    """`jali.correction.correct` for at most MOST_ROWS rows and a head dim of at most MOST_DIM.

    out [B, H, S, D] (the last dim contiguous) is overwritten and returned; `parts` and `lse` are
    those of `rows_attention`; `sparse` bool [B|1, H|1, M], of blocks of `q_block` queries; queries
    at or beyond `key_length` are not asked. Where fewer than `fewest` of a head are asked, it
    keeps what it has.
    """
    B, H, _, D = out.shape
    fit, apply = _launches(
        spec_of(out), tuple(parts.shape), tuple(sparse.shape), q_block, key_length is not None,
        ridge, least, tiny, rounding, fewest,
    )  # fmt: skip
    wide = padded_dim(D)
    weight = out.new_empty(B, H, wide, wide)
    shift = torch.empty(B, H, wide, dtype=torch.float32, device=out.device)
    sparse = sparse.contiguous()
    fit(out, parts, lse, rows, sparse, key_length, weight, shift)
    apply(out, sparse, weight, shift)
    return out


@functools.lru_cache(maxsize=256)
def _launches(
    out: TensorSpec, parts: tuple[int, ...], sparse: tuple[int, ...], q_block: int,
    has_length: bool, ridge: float, least: float, tiny: float, rounding: float, fewest: int,
) -> tuple[Launch, Launch]:  # fmt: skip
    B, H, S, D = out.shape
    splits, count = parts[2:4]
    if count > MOST_ROWS or D > MOST_DIM or out.stride[3] != 1:
        raise ValueError(f"{count} rows of {D} numbers, strides {out.stride}")
    m = sparse[2]
    steps = 0 if sparse[0] == 1 else sparse[1] * m, 0 if sparse[1] == 1 else m
    height = max(16, power_of_two(count))
    wide = padded_dim(D)
    constants = {"D": D, "D_PAD": wide}
    fit = Launch(
        _fit_kernel, (B * H,),
        (H, count, splits, q_block, *steps, *out.stride[:3], ridge, least, tiny,
         rounding, fewest),
        {**constants, "R": height, "C": min(_COLUMNS, wide), "STEPS": _steps(1 + D / ridge),
         "HAS_LENGTH": has_length, "num_warps": 4, "num_stages": 1},
    )  # fmt: skip
    apply = Launch(
        _apply_kernel, (cdiv(S, _TILE), B * H), (H, S, q_block, *steps, *out.stride[:3]),
        {**constants, "TILE": _TILE, "PRECISION": precision(out.dtype),
         "num_warps": 4, "num_stages": 1},
    )  # fmt: skip
    return fit, apply
