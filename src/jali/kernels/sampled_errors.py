"""What sampled rows would lose if a key block were read less finely: errors of all levels in one
pass.

The rows' attention comes first, by the attention kernel. Then a tile of rows meets every key block
once more, in full and as means, and only the squared change of the output leaves the registers.
No [samples, keys] matrix exists.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from jali.kernels.lists import MEAN, BlockList

from .attention import block_sparse_attention
from .descriptor import DescriptorTemplate, MatrixView, matrix_view, use_descriptors
from .launch import Launch, TensorSpec, spec_of
from .pooling import PoolLaunch, pool_launch
from .score_means import block_means
from .score_tiles import (
    LOG2E,
    Tile,
    cdiv,
    check_queries_keys,
    even_splits,
    padded_dim,
    power_of_two,
    precision,
    processors,
)

MOST_SAMPLES = 64
MOST_KEYS = 128
_BLOCK = 128  # of the rows' own attention, which reads everything: any size will do
_LOG2E = tl.constexpr(LOG2E)
_MEAN = tl.constexpr(MEAN)
_NEGATIVE = tl.constexpr(float("-inf"))


@triton.jit
def _rows_of(base, first, count, stride, column, columns, R: tl.constexpr):
    """R rows from `first` on, zeros behind the first `count` and behind the last column."""
    row = tl.arange(0, R)
    at = base + (first + row).to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=(row < count)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def _weights(
    sample, lse, pooled, matrix, bias, row, d, scale,
    D: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """What G means weigh, negative, and their sum. Tiles have at least sixteen rows."""
    if MATRIX:
        mean = matrix.load([row, 0])
    else:
        mean = _rows_of(pooled, row, G, D, d, D, G_PAD if G_PAD > 16 else 16)
    g = tl.arange(0, G_PAD if G_PAD > 16 else 16)
    count = tl.load(bias + g, mask=g < G, other=float("-inf"))  # log2 of real keys
    logits = tl.dot(sample, tl.trans(mean), input_precision=PRECISION) * scale
    weight = tl.exp2(logits + count[None, :] - lse[:, None])
    return (-weight).to(mean.dtype), tl.sum(weight, 1)


@triton.jit
def _pooled_error(
    skipped, out, weight, mass, pooled, matrix, row, column, first_column,
    D: tl.constexpr, G: tl.constexpr, G_PAD: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The squared change in some columns if G means are read, from that of skipping the block."""
    if MATRIX:
        value = matrix.load([row, first_column])
    else:
        value = _rows_of(pooled, row, G, D, column, D, G_PAD if G_PAD > 16 else 16)
    change = tl.dot(weight, value, acc=skipped, input_precision=PRECISION) + mass[:, None] * out
    return tl.sum(change * change, 1)


@triton.jit
def _store_mean(
    into, error, counted, there, ROWS: tl.constexpr, PER_BLOCK: tl.constexpr
):  # fmt: skip
    """The mean over the samples of a block that count and are numbers."""
    usable = counted & (error == error)
    error = tl.where(usable, error, 0.0)
    sums = tl.sum(tl.reshape(error, [ROWS // PER_BLOCK, PER_BLOCK]), 1)
    number = tl.sum(tl.reshape(usable.to(tl.float32), [ROWS // PER_BLOCK, PER_BLOCK]), 1)
    tl.store(into, sums / tl.maximum(number, 1.0), mask=there)


@triton.jit
def _block_errors(
    into, sample, lse, outs, first, left, counted, there, k_head, v_head, k_s, v_s,
    k_matrix, v_matrix, k_row, v_row, k_column, v_column,
    pooled, keys2, keys4, keys8, values2, values4, values8, pool_row, values_at, bias,
    start2, start4, start8,
    k_mean, v_mean, j, here, scale,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    PER_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, KEYS: tl.constexpr, HAS2: tl.constexpr,
    HAS4: tl.constexpr, HAS8: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_SKIP: tl.constexpr,
    MATRIX: tl.constexpr,  # read means through descriptors
    WHOLE: tl.constexpr,  # and keys and values, of which none is missing
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Errors of the levels of one key block, of which the first `here` keys are real.

    Weights of all levels come first; then the output's columns in parts, so that the changes of
    some rows at several levels fit the registers.
    """
    d = tl.arange(0, D_PAD)
    key = tl.arange(0, KEYS)
    if WHOLE:
        tile = k_matrix.load([k_row + j * K_BLOCK, k_column])
        logits = tl.dot(sample, tl.trans(tile), input_precision=PRECISION) * scale
    else:
        tile = _rows_of(k_head, j * K_BLOCK, here, k_s, d, D, KEYS)
        logits = tl.dot(sample, tl.trans(tile), input_precision=PRECISION) * scale
        logits = tl.where((key < here)[None, :], logits, _NEGATIVE)
    exact = tl.exp2(logits - lse[:, None])
    mass = tl.sum(exact, 1)
    weight = exact.to(sample.dtype)
    row2 = start2 + j * (K_BLOCK // 2)
    row4 = start4 + j * (K_BLOCK // 4)
    row8 = start8 + j * (K_BLOCK // 8)
    if HAS2:
        weight2, mass2 = _weights(
            sample, lse, pooled, keys2, bias + row2, pool_row + row2, d, scale,
            D, K_BLOCK // 2, KEYS // 2, MATRIX, PRECISION,
        )  # fmt: skip
    if HAS4:
        weight4, mass4 = _weights(
            sample, lse, pooled, keys4, bias + row4, pool_row + row4, d, scale,
            D, K_BLOCK // 4, KEYS // 4, MATRIX, PRECISION,
        )  # fmt: skip
    if HAS8:
        weight8, mass8 = _weights(
            sample, lse, pooled, keys8, bias + row8, pool_row + row8, d, scale,
            D, K_BLOCK // 8, KEYS // 8, MATRIX, PRECISION,
        )  # fmt: skip
    if HAS_MEAN:
        # One mean among sixteen rows: a product of tensor cores needs no fp32 copy of the samples.
        mean = _rows_of(k_mean + j * D, 0, 1, D, d, D, 16).to(sample.dtype)
        logit = tl.sum(tl.dot(sample, tl.trans(mean), input_precision=PRECISION), 1) * scale
        count = tl.where(here > 0, tl.log2(tl.maximum(here, 1).to(tl.float32)), _NEGATIVE)
        share = tl.exp2(logit + count - lse)

    error2 = tl.zeros([ROWS], tl.float32)
    error4 = tl.zeros([ROWS], tl.float32)
    error8 = tl.zeros([ROWS], tl.float32)
    error_mean = tl.zeros([ROWS], tl.float32)
    error_skip = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(D_PAD // WIDE):
        column = part * WIDE + tl.arange(0, WIDE)
        out = _rows_of(outs, first, left, D, column, D, ROWS).to(tl.float32)
        if WHOLE:
            value = v_matrix.load([v_row + j * K_BLOCK, v_column + part * WIDE])
        else:
            value = _rows_of(v_head, j * K_BLOCK, here, v_s, column, D, KEYS)
        skipped = tl.dot(weight, value, input_precision=PRECISION) - mass[:, None] * out
        if HAS2:
            error2 += _pooled_error(
                skipped, out, weight2, mass2, pooled, values2, pool_row + values_at + row2, column,
                part * WIDE, D, K_BLOCK // 2, KEYS // 2, MATRIX, PRECISION,
            )  # fmt: skip
        if HAS4:
            error4 += _pooled_error(
                skipped, out, weight4, mass4, pooled, values4, pool_row + values_at + row4, column,
                part * WIDE, D, K_BLOCK // 4, KEYS // 4, MATRIX, PRECISION,
            )  # fmt: skip
        if HAS8:
            error8 += _pooled_error(
                skipped, out, weight8, mass8, pooled, values8, pool_row + values_at + row8, column,
                part * WIDE, D, K_BLOCK // 8, KEYS // 8, MATRIX, PRECISION,
            )  # fmt: skip
        if HAS_MEAN:
            of_block = tl.load(v_mean + j * D + column, mask=column < D, other=0.0)
            change = skipped - share[:, None] * (of_block[None, :] - out)
            error_mean += tl.sum(change * change, 1)
        if HAS_SKIP:
            error_skip += tl.sum(skipped * skipped, 1)

    into += j * (HAS2 + HAS4 + HAS8 + HAS_MEAN + HAS_SKIP)
    if HAS2:
        _store_mean(into, error2, counted, there, ROWS, PER_BLOCK)
    if HAS4:
        _store_mean(into + HAS2, error4, counted, there, ROWS, PER_BLOCK)
    if HAS8:
        _store_mean(into + HAS2 + HAS4, error8, counted, there, ROWS, PER_BLOCK)
    if HAS_MEAN:
        _store_mean(into + HAS2 + HAS4 + HAS8, error_mean, counted, there, ROWS, PER_BLOCK)
    if HAS_SKIP:
        at = into + HAS2 + HAS4 + HAS8 + HAS_MEAN
        _store_mean(at, error_skip, counted, there, ROWS, PER_BLOCK)


@triton.jit
def _error_kernel(
    rows,  # [B * H, m * PER_BLOCK, D]
    outs,  # their attention
    lses,  # fp32, natural
    k, v,
    pooled,  # [2 * B * Hkv * pool_rows, D], keys before values
    k_matrix, v_matrix, keys2, keys4, keys8, values2, values4, values8,  # descriptors, or unused
    bias,  # fp32 [B or 1, pool_rows]
    k_means, v_means,  # fp32 [B * Hkv, n, D]
    key_length,
    errors,  # fp32 [B * H, m, n, levels]
    heads, kv_group, m, n, keys, per_split, values_at, pool_rows, bias_b, start2, start4, start8,
    scale, k_b, k_h, k_s, v_b, v_h, v_s, k_row_b, k_row_h, k_col_h, v_row_b, v_row_h, v_col_h,
    D: tl.constexpr, D_PAD: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr,
    PER_BLOCK: tl.constexpr, SAMPLES: tl.constexpr, K_BLOCK: tl.constexpr, KEYS: tl.constexpr,
    HAS2: tl.constexpr, HAS4: tl.constexpr, HAS8: tl.constexpr, HAS_MEAN: tl.constexpr,
    HAS_SKIP: tl.constexpr, HAS_LENGTH: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    slot = tl.program_id(2)
    batch = slot // heads
    head = slot % heads // kv_group
    kv_head = batch * (heads // kv_group) + head
    limit = keys
    if HAS_LENGTH:
        limit = tl.minimum(limit, tl.load(key_length + batch))

    r = tl.arange(0, ROWS)
    left = m * PER_BLOCK - tile * ROWS
    counted = (r < left) & (r % PER_BLOCK < SAMPLES)
    first = slot.to(tl.int64) * m * PER_BLOCK + tile * ROWS
    sample = _rows_of(rows, first, left, D, tl.arange(0, D_PAD), D, ROWS)
    lse = tl.load(lses + first + r, mask=r < left, other=0.0) * _LOG2E
    k_head = k + batch.to(tl.int64) * k_b + head.to(tl.int64) * k_h
    v_head = v + batch.to(tl.int64) * v_b + head.to(tl.int64) * v_h
    block = tile * (ROWS // PER_BLOCK) + tl.arange(0, ROWS // PER_BLOCK)
    levels: tl.constexpr = HAS2 + HAS4 + HAS8 + HAS_MEAN + HAS_SKIP
    into = errors + (slot.to(tl.int64) * m + block) * n * levels
    mean_at = kv_head.to(tl.int64) * n * D

    whole = tl.program_id(1) * per_split
    end = tl.minimum(whole + per_split, n)
    if MATRIX:
        # Only whole blocks are read through descriptors, which know nothing of what is not real.
        start = whole
        whole = tl.maximum(start, tl.minimum(end, limit // K_BLOCK))
        for j in range(start, whole):
            _block_errors(
                into, sample, lse, outs, first, left, counted, block < m, k_head, v_head, k_s, v_s,
                k_matrix, v_matrix, batch * k_row_b + head * k_row_h,
                batch * v_row_b + head * v_row_h, head * k_col_h, head * v_col_h,
                pooled, keys2, keys4, keys8, values2, values4, values8, kv_head * pool_rows,
                values_at, bias + batch * bias_b, start2, start4, start8,
                k_means + mean_at, v_means + mean_at, j, K_BLOCK, scale,
                D, D_PAD, WIDE, ROWS, PER_BLOCK, K_BLOCK, KEYS, HAS2, HAS4, HAS8, HAS_MEAN,
                HAS_SKIP, True, True, PRECISION,
            )  # fmt: skip
    for j in range(whole, end):
        here = tl.minimum(tl.maximum(limit - j * K_BLOCK, 0), K_BLOCK)
        _block_errors(
            into, sample, lse, outs, first, left, counted, block < m, k_head, v_head, k_s, v_s,
            k_matrix, v_matrix, 0, 0, 0, 0, pooled, keys2, keys4, keys8, values2, values4,
            values8, kv_head * pool_rows, values_at, bias + batch * bias_b, start2, start4, start8,
            k_means + mean_at, v_means + mean_at, j, here, scale,
            D, D_PAD, WIDE, ROWS, PER_BLOCK, K_BLOCK, KEYS, HAS2, HAS4, HAS8, HAS_MEAN,
            HAS_SKIP, False, False, PRECISION,
        )  # fmt: skip


def sampled_errors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_block: int,
    scale: float,
    positions: Tensor,
    levels: tuple[int, ...],
    key_length: Tensor | None = None,
    *,
    tile: Tile | None = None,
    tma: bool | None = None,
) -> Tensor:
    """Mean of ‖Δ‖² over the sampled rows of each query block, see `planning.distortion`.

    q [B,H,Sq,D], k and v [B,Hkv,Sk,D] (any strides, last dim contiguous); `positions` int64 [M,P]
    with at most MOST_SAMPLES a block; `levels` of 2, 4, 8, MEAN and 0 (skip), a k_block of at most
    MOST_KEYS that they divide; a positive scale. Keys at or beyond `key_length` int32 [B] do not
    exist. Returns fp32 [B,H,M,N,L]; 0 where no sampled row gives a number. Never waits for the
    device. `tile` and `tma` tune speed only.
    """
    per_block = power_of_two(positions.shape[1])
    rows = _gathered(q, positions, per_block)
    batch, heads, count, _ = rows.shape
    lists = {1: _everything(cdiv(count, _BLOCK), cdiv(k.shape[2], _BLOCK), q.device)}
    out, lse = block_sparse_attention(rows, k, v, lists, _BLOCK, _BLOCK, scale, key_length)
    call = _prepare(
        spec_of(rows), spec_of(k), spec_of(v), positions.shape, k_block, scale, levels,
        key_length is not None, tile, tma,
    )  # fmt: skip
    # Where there are none, pointers into anything: they are moved, not read.
    pooled = (k, lse) if call.pool is None else call.pool(k, v, key_length)
    means = (lse, lse)
    if MEAN in levels:
        means = block_means(k, k_block, key_length), block_means(v, k_block, key_length)
    sources = k, v, *(pooled[0],) * 6
    matrices = (
        None if template is None else template.bind(x)
        for template, x in zip(call.matrices, sources, strict=True)
    )
    shape = batch, heads, positions.shape[0], cdiv(k.shape[2], k_block), len(levels)
    errors = torch.empty(shape, dtype=torch.float32, device=q.device)
    call.launch(
        rows, out.contiguous(), lse, k, v, pooled[0], *matrices, pooled[1], *means, key_length,
        errors,
    )  # fmt: skip
    return errors


def _gathered(q: Tensor, positions: Tensor, per_block: int) -> Tensor:
    """The sampled rows, a power of two for every block: the last one again where there are fewer.
    [B, H, M · per_block, D], contiguous."""
    missing = per_block - positions.shape[1]
    if missing:
        positions = torch.cat([positions, positions[:, -1:].expand(-1, missing)], dim=1)
    return q.index_select(2, positions.flatten()).contiguous()


@functools.lru_cache(maxsize=64)
def _everything(rows: int, n: int, device: torch.device) -> BlockList:
    """Lists of all key blocks."""
    every = torch.arange(n, dtype=torch.int32, device=device).expand(1, 1, rows, n).contiguous()
    return BlockList(torch.full((1, 1, rows), n, dtype=torch.int32, device=device), every)


class _ErrorLaunches(NamedTuple):
    """How errors are made; `matrices` of k and v, of means of 2, 4 and 8 keys, and of as many
    values, where they are used."""

    pool: PoolLaunch | None
    matrices: tuple[DescriptorTemplate | None, ...]
    launch: Launch


def error_tile(rows: int, itemsize: int) -> Tile:
    """The configuration used unless the caller names one."""
    height = 64 if itemsize < 4 else 32
    return Tile(min(height, max(16, power_of_two(rows))), warps=4, stages=1, depth=64)


@functools.lru_cache(maxsize=256)
def _prepare(
    rows: TensorSpec, k: TensorSpec, v: TensorSpec, positions: tuple[int, int], k_block: int,
    scale: float, levels: tuple[int, ...], has_length: bool, tile: Tile | None, tma: bool | None,
) -> _ErrorLaunches:  # fmt: skip
    check_queries_keys(rows, k)
    m, samples = positions
    per_block = power_of_two(samples)
    if samples > MOST_SAMPLES or k_block > MOST_KEYS or not scale > 0:
        raise ValueError(f"{samples} samples, blocks of {k_block} keys, scale {scale}")
    batch, heads, count, dim = rows.shape
    kv_heads, tokens = k.shape[1:3]
    tile = tile or error_tile(count, rows.itemsize)
    height = max(tile.rows, per_block)
    wide = min(tile.depth, padded_dim(dim))
    n = cdiv(tokens, k_block)
    tiles = cdiv(count, height)
    per_split = even_splits(n, tiles * batch * heads, 2 * processors(rows.device))
    ratios = tuple(level for level in levels if level in (2, 4, 8))
    pool = pool_launch(k, v, ratios, has_length) if ratios else None
    pool_numbers: tuple[int, ...] = (0,) * 6
    if pool is not None:
        starts = dict(pool.sections.starts)
        values_at = batch * kv_heads * pool.sections.rows
        bias_b = 0 if pool.bias[0] == 1 else pool.bias[1]
        pool_numbers = (
            values_at, pool.sections.rows, bias_b, *(starts.get(ratio, 0) for ratio in (2, 4, 8)),
        )  # fmt: skip
    views = _views(k, v, k_block, tma)
    matrices: tuple[DescriptorTemplate | None, ...] = (None,) * 8
    if views is not None:
        keys, values = views
        matrices = (
            keys.template(k_block, dim, k.dtype), values.template(k_block, wide, k.dtype),
            *_pool_templates(pool, k_block, dim, k.dtype),
            *_pool_templates(pool, k_block, wide, k.dtype),
        )  # fmt: skip
    constants = {
        "D": dim,
        "D_PAD": padded_dim(dim),
        "WIDE": wide,
        "ROWS": height,
        "PER_BLOCK": per_block,
        "SAMPLES": samples,
        "K_BLOCK": k_block,
        "KEYS": max(16, power_of_two(k_block)),
        **{f"HAS{ratio}": int(ratio in levels) for ratio in (2, 4, 8)},
        "HAS_MEAN": int(MEAN in levels),
        "HAS_SKIP": int(0 in levels),
        "HAS_LENGTH": has_length,
        "MATRIX": views is not None,
        "PRECISION": precision(rows.dtype),
        **tile.options,
    }
    numbers = (
        heads, heads // kv_heads, m, n, tokens, per_split, *pool_numbers, scale * LOG2E,
        *k.stride[:3], *v.stride[:3],
        *((0,) * 6 if views is None else (*views[0].steps, *views[1].steps)),
    )  # fmt: skip
    grid = (tiles, cdiv(n, per_split), batch * heads)
    return _ErrorLaunches(pool, matrices, Launch(_error_kernel, grid, numbers, constants))


def _views(
    k: TensorSpec, v: TensorSpec, k_block: int, tma: bool | None
) -> tuple[MatrixView, MatrixView] | None:
    """Of keys and values, where blocks of them can be read through descriptors: 16 means of eight
    fill the narrowest tile."""
    if not use_descriptors(k.device, tma) or padded_dim(k.shape[3]) != k.shape[3] or k_block != 128:
        return None
    keys, values = matrix_view(k), matrix_view(v)
    return None if keys is None or values is None else (keys, values)


def _pool_templates(
    pool: PoolLaunch | None, k_block: int, columns: int, dtype: torch.dtype
) -> Iterator[DescriptorTemplate | None]:
    """Of the means of 2, 4 and 8 keys in a block; None for what is not pooled."""
    for ratio in (2, 4, 8):
        if pool is None or ratio not in dict(pool.sections.starts):
            yield None
        else:
            *outer, dim = pool.pooled
            tile = k_block // ratio, columns
            yield DescriptorTemplate((math.prod(outer), dim), dim, tile, dtype)
