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
    shared_bytes,
)

MOST_SAMPLES = 64
MOST_KEYS = 128
_BLOCK = 128  # of the rows' own attention, which reads everything: any size will do
_LARGE = 230_448  # bytes that two stages of a head dim of 128 take
_LOG2E = tl.constexpr(LOG2E)


@triton.jit
def _rows_of(base, first, count, stride, column, columns, R: tl.constexpr):
    """R rows from `first` on, zeros behind the first `count` and behind the last column."""
    row = tl.arange(0, R)
    at = base + (first + row).to(tl.int64)[:, None] * stride + column[None, :]
    return tl.load(at, mask=(row < count)[:, None] & (column < columns)[None, :], other=0.0)


@triton.jit
def _coarser(logit, share, count, lse, WHOLE: tl.constexpr, STEP: tl.constexpr):
    """Mean logits and weights of groups of STEP groups, of which `share` [G] is each one's part in
    its coarser group and `count` how many keys that has: a mean key's logit is its keys' mean."""
    mean = tl.reshape(
        logit * share[None, :], [logit.shape[0], logit.shape[1] // STEP, STEP]
    )  # fmt: skip
    mean = tl.sum(mean, 2)
    weight = count[None, :] * tl.exp2(mean - lse[:, None])
    if not WHOLE:
        weight = tl.where((count > 0)[None, :], weight, 0.0)
    return mean, weight


@triton.jit
def _spread(weight, share, STEP: tl.constexpr):
    """Weights of groups dealt out to the STEP parts of each."""
    each = tl.broadcast_to(weight[:, :, None], [weight.shape[0], weight.shape[1], STEP])
    return tl.reshape(each, [weight.shape[0], weight.shape[1] * STEP]) * share[None, :]


@triton.jit
def _changed(acc, mass, weight, value, out, PRECISION: tl.constexpr):
    """The change so far and its squared size, when values lose as much weight more."""
    weight = weight.to(value.dtype)
    acc = tl.dot(weight, value, acc=acc, input_precision=PRECISION)
    mass += tl.sum(weight.to(tl.float32), 1)
    return acc, mass, _size(acc, mass, out)


@triton.jit
def _size(acc, mass, out):
    """The squared size of a change, where the other weights take over what was lost."""
    change = acc - mass[:, None] * out.to(tl.float32)
    return tl.sum(change * change, 1)


@triton.jit
def _counts(here, G: tl.constexpr, RATIO: tl.constexpr, WHOLE: tl.constexpr):
    """Real keys of every group of RATIO. fp32 [G]."""
    if WHOLE:
        return tl.full([G], RATIO, tl.float32)
    left = here - tl.arange(0, G) * RATIO
    return tl.minimum(tl.maximum(left, 0), RATIO).to(tl.float32)


@triton.jit
def _shares(fine, count, STEP: tl.constexpr):
    """Of groups in the coarser ones that hold STEP of them."""
    each = tl.broadcast_to(tl.maximum(count, 1.0)[:, None], [count.shape[0], STEP])
    return fine / tl.reshape(each, [count.shape[0] * STEP])


@triton.jit
def _level(
    acc, mass, logit, weight, fine, value, out, lse, here, values, matrix, row,
    RATIO: tl.constexpr, STEP: tl.constexpr, READ: tl.constexpr, GROUPS: tl.constexpr,
    D: tl.constexpr, D_PAD: tl.constexpr, KEYS: tl.constexpr, MATRIX: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The error of reading means of RATIO keys, and what a coarser level starts from: where READ
    the means themselves, else what was there before, with the weights dealt out to it."""
    count = _counts(here, KEYS // RATIO, RATIO, MATRIX)
    share = _shares(fine, count, STEP)
    mean, heavier = _coarser(logit, share, count, lse, MATRIX, STEP)
    dealt = _spread(heavier, share, STEP)
    acc, mass, error = _changed(acc, mass, weight - dealt, value, out, PRECISION)
    if READ:
        if MATRIX:
            coarse = matrix.load([row, 0])
        else:
            real = tl.minimum(GROUPS, (here + RATIO - 1) // RATIO)
            coarse = _rows_of(values, row, real, D, tl.arange(0, D_PAD), D, KEYS // RATIO)
        return error, acc, mass, mean, heavier, count, coarse
    else:  # noqa: RET505 – the compiler follows one of both only so
        return error, acc, mass, logit, dealt, fine, value


@triton.jit
def _block_errors(
    into, sample, lse, out, counted, number, there, k_head, v_head, k_s, v_s,
    k_matrix, v_matrix, k_row, v_row, k_column, v_column,
    values, values2, values4, values8, value_row, mean_value, start2, start4, start8, j, here,
    scale, D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, PER_BLOCK: tl.constexpr,
    K_BLOCK: tl.constexpr, KEYS: tl.constexpr, HAS2: tl.constexpr, HAS4: tl.constexpr,
    HAS8: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_SKIP: tl.constexpr, READ2: tl.constexpr,
    READ4: tl.constexpr, READ8: tl.constexpr,
    MATRIX: tl.constexpr,  # read through descriptors, whole blocks only
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Errors of the levels of one key block, of which the first `here` keys are real.

    From each level to the next coarser one only the weights' difference is multiplied, and added to
    the change so far: one accumulator serves all levels.
    """
    d = tl.arange(0, D_PAD)
    if MATRIX:
        tile = k_matrix.load([k_row + j * K_BLOCK, k_column])
        value = v_matrix.load([v_row + j * K_BLOCK, v_column])
    else:
        tile = _rows_of(k_head, j * K_BLOCK, here, k_s, d, D, KEYS)
        value = _rows_of(v_head, j * K_BLOCK, here, v_s, d, D, KEYS)
    logit = tl.dot(sample, tl.trans(tile), input_precision=PRECISION) * scale
    weight = tl.exp2(logit - lse[:, None])
    fine = _counts(here, KEYS, 1, MATRIX)
    if not MATRIX:
        weight = tl.where((fine > 0)[None, :], weight, 0.0)
    acc = tl.zeros([ROWS, D_PAD], tl.float32)
    mass = tl.zeros([ROWS], tl.float32)
    error2 = mass
    error4 = mass
    error8 = mass
    error_mean = mass
    error_skip = mass
    step4: tl.constexpr = 2 if READ2 else 4
    step8: tl.constexpr = 2 if READ4 else (4 if READ2 else 8)
    if HAS2:
        error2, acc, mass, logit, weight, fine, value = _level(
            acc, mass, logit, weight, fine, value, out, lse, here,
            values, values2, value_row + start2 + j * (K_BLOCK // 2),
            2, 2, READ2, K_BLOCK // 2, D, D_PAD, KEYS, MATRIX, PRECISION,
        )  # fmt: skip
    if HAS4:
        error4, acc, mass, logit, weight, fine, value = _level(
            acc, mass, logit, weight, fine, value, out, lse, here,
            values, values4, value_row + start4 + j * (K_BLOCK // 4),
            4, step4, READ4, K_BLOCK // 4, D, D_PAD, KEYS, MATRIX, PRECISION,
        )  # fmt: skip
    if HAS8:
        error8, acc, mass, logit, weight, fine, value = _level(
            acc, mass, logit, weight, fine, value, out, lse, here,
            values, values8, value_row + start8 + j * (K_BLOCK // 8),
            8, step8, READ8, K_BLOCK // 8, D, D_PAD, KEYS, MATRIX, PRECISION,
        )  # fmt: skip
    if HAS_MEAN:
        keys = tl.maximum(here, 1).to(tl.float32)
        share = fine / keys
        mean = tl.sum(logit * share[None, :], 1)
        all_keys = tl.where(here > 0, keys * tl.exp2(mean - lse), 0.0)
        dealt = all_keys[:, None] * share[None, :]
        acc, mass, error_mean = _changed(acc, mass, weight - dealt, value, out, PRECISION)
        if HAS_SKIP:  # what is left is one weight for all keys: their mean value, no product
            acc += all_keys[:, None] * tl.load(mean_value + d, mask=d < D, other=0.0)[None, :]
            mass += all_keys
            error_skip = _size(acc, mass, out)
    elif HAS_SKIP:
        acc, mass, error_skip = _changed(acc, mass, weight, value, out, PRECISION)

    # Every second one is of 2, 4, 8 and all keys, the one behind the first of skipping.
    pooled = tl.join(tl.join(error2, error8), tl.join(error4, error_mean))
    rest = tl.join(tl.join(error_skip, mass), tl.join(mass, mass))
    error = tl.reshape(tl.join(pooled, rest), [ROWS, 8])
    error = tl.where(counted[:, None] & (error == error), error, 0.0)
    error = tl.sum(tl.reshape(error, [ROWS // PER_BLOCK, PER_BLOCK, 8]), 1) / number[:, None]
    slot = tl.arange(0, 8)
    has = tl.where(slot == 0, HAS2, 0) + tl.where(slot == 2, HAS4, 0)
    has += tl.where(slot == 4, HAS8, 0) + tl.where(slot == 6, HAS_MEAN, 0)
    has += tl.where(slot == 1, HAS_SKIP, 0)
    at = tl.where(slot > 0, HAS2, 0) + tl.where(slot > 2, HAS4, 0) + tl.where(slot > 4, HAS8, 0)
    at = tl.where(slot == 1, HAS2 + HAS4 + HAS8 + HAS_MEAN, at)
    levels: tl.constexpr = HAS2 + HAS4 + HAS8 + HAS_MEAN + HAS_SKIP
    tl.store(
        into[:, None] + (j * levels + at)[None, :], error, mask=there[:, None] & (has > 0)[None, :]
    )


@triton.jit
def _error_kernel(
    rows,  # [B * H, m * PER_BLOCK, D]
    outs,  # their attention
    lses,  # fp32, natural
    k, v,
    pooled,  # [2 * B * Hkv * pool_rows, D], keys before values
    k_matrix, v_matrix, values2, values4, values8,  # descriptors, or unused
    means,  # fp32 [B * Hkv, n, D], of the values of every block; or unused
    key_length,
    errors,  # fp32 [B * H, m, n, levels]
    heads, kv_group, m, n, keys, per_split, values_at, pool_rows, start2, start4, start8,
    scale, k_b, k_h, k_s, v_b, v_h, v_s, k_row_b, k_row_h, k_col_h, v_row_b, v_row_h, v_col_h,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, PER_BLOCK: tl.constexpr,
    SAMPLES: tl.constexpr, K_BLOCK: tl.constexpr, KEYS: tl.constexpr, HAS2: tl.constexpr,
    HAS4: tl.constexpr, HAS8: tl.constexpr, HAS_MEAN: tl.constexpr, HAS_SKIP: tl.constexpr,
    READ2: tl.constexpr, READ4: tl.constexpr, READ8: tl.constexpr,  # means of values, where made
    HAS_LENGTH: tl.constexpr, MATRIX: tl.constexpr, PRECISION: tl.constexpr,
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
    first = slot.to(tl.int64) * m * PER_BLOCK + tile * ROWS
    d = tl.arange(0, D_PAD)
    sample = _rows_of(rows, first, left, D, d, D, ROWS)
    out = _rows_of(outs, first, left, D, d, D, ROWS)
    lse = tl.load(lses + first + r, mask=r < left, other=0.0) * _LOG2E
    # Samples that are no numbers do not count; elsewhere what is none stands for no change.
    counted = (r < left) & (r % PER_BLOCK < SAMPLES) & (lse == lse)
    number = tl.reshape(counted.to(tl.float32), [ROWS // PER_BLOCK, PER_BLOCK])
    number = tl.maximum(tl.sum(number, 1), 1.0)
    k_head = k + batch.to(tl.int64) * k_b + head.to(tl.int64) * k_h
    v_head = v + batch.to(tl.int64) * v_b + head.to(tl.int64) * v_h
    block = tile * (ROWS // PER_BLOCK) + tl.arange(0, ROWS // PER_BLOCK)
    levels: tl.constexpr = HAS2 + HAS4 + HAS8 + HAS_MEAN + HAS_SKIP
    into = errors + (slot.to(tl.int64) * m + block) * n * levels
    value_row = values_at + kv_head * pool_rows
    mean_values = means + kv_head.to(tl.int64) * n * D

    whole = tl.program_id(1) * per_split
    end = tl.minimum(whole + per_split, n)
    if MATRIX:
        # Only whole blocks are read through descriptors, which know nothing of what is not real.
        start = whole
        whole = tl.maximum(start, tl.minimum(end, limit // K_BLOCK))
        for j in range(start, whole):
            _block_errors(
                into, sample, lse, out, counted, number, block < m, k_head, v_head, k_s, v_s,
                k_matrix, v_matrix, batch * k_row_b + head * k_row_h,
                batch * v_row_b + head * v_row_h, head * k_col_h, head * v_col_h,
                pooled, values2, values4, values8, value_row, mean_values + j * D, start2, start4,
                start8, j, K_BLOCK, scale, D, D_PAD, ROWS, PER_BLOCK, K_BLOCK, KEYS, HAS2, HAS4,
                HAS8, HAS_MEAN, HAS_SKIP, READ2, READ4, READ8, True, PRECISION,
            )  # fmt: skip
    for j in range(whole, end):
        here = tl.minimum(tl.maximum(limit - j * K_BLOCK, 0), K_BLOCK)
        _block_errors(
            into, sample, lse, out, counted, number, block < m, k_head, v_head, k_s, v_s,
            k_matrix, v_matrix, 0, 0, 0, 0, pooled, values2, values4, values8, value_row,
            mean_values + j * D, start2, start4, start8, j, here, scale, D, D_PAD, ROWS, PER_BLOCK,
            K_BLOCK, KEYS, HAS2, HAS4, HAS8, HAS_MEAN, HAS_SKIP, READ2, READ4, READ8, False,
            PRECISION,
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
    pooled = v if call.pool is None else call.pool(k, v, key_length)[0]  # not read if there is none
    sources = k, v, *(pooled,) * 3
    matrices = (
        None if template is None else template.bind(x)
        for template, x in zip(call.matrices, sources, strict=True)
    )
    shape = batch, heads, positions.shape[0], cdiv(k.shape[2], k_block), len(levels)
    errors = torch.empty(shape, dtype=torch.float32, device=q.device)
    means = block_means(v, k_block, key_length) if {MEAN, 0} <= set(levels) else v
    call.launch(rows, out.contiguous(), lse, k, v, pooled, *matrices, means, key_length, errors)
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
    """How errors are made; `matrices` of k, v and means of 2, 4 and 8 values, where they are
    used."""

    pool: PoolLaunch | None
    matrices: tuple[DescriptorTemplate | None, ...]
    launch: Launch


def error_tile(rows: TensorSpec) -> Tile:
    """The configuration used unless the caller names one. H200, 4 samples of 32,760 tokens, head
    dim 128: 2.75 ms with the first, 3.00 with the second."""
    _, _, count, dim = rows.shape
    if rows.itemsize < 4 and count >= 128 and dim <= 128 and shared_bytes(rows.device) >= _LARGE:
        return Tile(128, warps=8, stages=2)
    height = 64 if rows.itemsize < 4 else 32
    return Tile(min(height, max(16, power_of_two(count))), warps=4, stages=1)


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
    tile = tile or error_tile(rows)
    height = max(tile.rows, per_block)
    n = cdiv(tokens, k_block)
    tiles = cdiv(count, height)
    per_split = even_splits(n, tiles * batch * heads, 2 * processors(rows.device))
    wide = max(16, power_of_two(k_block))
    # Means of values are read where a tile of them has sixteen rows, which a product needs.
    ratios = tuple(level for level in levels if level in (2, 4, 8) and wide // level >= 16)
    pool = pool_launch(k, v, ratios, has_length) if ratios else None
    pool_numbers: tuple[int, ...] = (0,) * 5
    if pool is not None:
        starts = dict(pool.sections.starts)
        rows_each = pool.sections.rows
        sections = (starts.get(ratio, 0) for ratio in (2, 4, 8))
        pool_numbers = (batch * kv_heads * rows_each, rows_each, *sections)
    views = _views(k, v, k_block, tma)
    matrices: tuple[DescriptorTemplate | None, ...] = (None,) * 5
    if views is not None:
        keys, values = views
        matrices = (
            keys.template(k_block, dim, k.dtype), values.template(k_block, dim, k.dtype),
            *_pool_templates(pool, k_block, k.dtype),
        )  # fmt: skip
    constants = {
        "D": dim,
        "D_PAD": padded_dim(dim),
        "ROWS": height,
        "PER_BLOCK": per_block,
        "SAMPLES": samples,
        "K_BLOCK": k_block,
        "KEYS": wide,
        **{f"HAS{ratio}": int(ratio in levels) for ratio in (2, 4, 8)},
        "HAS_MEAN": int(MEAN in levels),
        "HAS_SKIP": int(0 in levels),
        **{f"READ{ratio}": ratio in ratios for ratio in (2, 4, 8)},
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
    """Of keys and values, where blocks of them can be read through descriptors."""
    if not use_descriptors(k.device, tma) or padded_dim(k.shape[3]) != k.shape[3] or k_block != 128:
        return None
    keys, values = matrix_view(k), matrix_view(v)
    return None if keys is None or values is None else (keys, values)


def _pool_templates(
    pool: PoolLaunch | None, k_block: int, dtype: torch.dtype
) -> Iterator[DescriptorTemplate | None]:
    """Of the means of 2, 4 and 8 keys in a block; None for what is not pooled."""
    for ratio in (2, 4, 8):
        if pool is None or ratio not in dict(pool.sections.starts):
            yield None
        else:
            *outer, dim = pool.pooled
            yield DescriptorTemplate((math.prod(outer), dim), dim, (k_block // ratio, dim), dtype)
