"""Importance from antidiagonals: groups of tokens, one logit per pair of groups.

A matrix product whose inner dimension runs over (token of the group, head dim), queries reversed
within their group, followed by the same two-level softmax as the sampled scores.
"""

from __future__ import annotations

import functools
import math

import triton
import triton.language as tl
from torch import Tensor

from .descriptor import DescriptorTemplate, matrix_view, use_descriptors
from .launch import Launch, TensorSpec, spec_of
from .score_interleave import interleaved_key, run_sum
from .score_mass import MassLaunches, mass_launch
from .score_tiles import (
    Tile,
    cdiv,
    check_queries_keys,
    fit,
    head_ranges,
    operand_bytes,
    padded_dim,
    positive_scale,
    power_of_two,
    precision,
    processors,
    shared_bytes,
)

_NEGATIVE = tl.constexpr(float("-inf"))


@triton.jit
def _banded(index, row_tiles, column_tiles, BAND: tl.constexpr):
    """Row and column of the index-th tile of a head, in bands of BAND row tiles.

    So what a wave of programs reads stays in the L2 cache.
    """
    band = index // (BAND * column_tiles)
    band_rows = tl.minimum(BAND, row_tiles - band * BAND)
    inside = index % (BAND * column_tiles)
    return band * BAND + inside % band_rows, inside // band_rows


@triton.jit
def _antidiagonal_lse_kernel(
    q, k, key_length,
    lse,  # fp32 [heads of this launch, q_groups, parts]
    first_head, heads, kv_group, queries, keys, q_groups, parts,
    scale,  # log2 units, not yet divided by the group size
    q_b, q_h, q_s, k_b, k_h, k_s,
    STRIDE: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, RUN: tl.constexpr, BAND: tl.constexpr, HAS_LENGTH: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1)
    batch = (first_head + slot) // heads
    head = (first_head + slot) % heads
    GROUPS: tl.constexpr = KEYS // RUN
    row_tiles = tl.cdiv(q_groups, ROWS)
    column_tiles = tl.cdiv(parts, GROUPS)
    row_tile, column_tile = _banded(tl.program_id(0), row_tiles, column_tiles, BAND)

    limit = keys
    if HAS_LENGTH:
        limit = tl.minimum(limit, tl.load(key_length + batch))

    # Addresses inside a tile stay 32 bit; only the tile's corner needs 64.
    q_first = row_tile * ROWS * STRIDE
    k_first = column_tile * KEYS * STRIDE
    q_tile = q + batch.to(tl.int64) * q_b + head.to(tl.int64) * q_h + q_first.to(tl.int64) * q_s
    k_head = k + batch.to(tl.int64) * k_b + (head // kv_group).to(tl.int64) * k_h
    k_tile = k_head + k_first.to(tl.int64) * k_s
    row = tl.arange(0, ROWS)
    group = interleaved_key(tl.arange(0, KEYS), RUN, KEYS)
    depth = tl.arange(0, DEPTH)
    q_last = queries - 1 - q_first
    k_left = limit - k_first

    STEPS: tl.constexpr = (D + DEPTH - 1) // DEPTH
    logits = tl.zeros([ROWS, KEYS], tl.float32)
    for step in tl.range(0, STRIDE * STEPS, num_stages=STAGES):
        token = step // STEPS
        d = (step % STEPS) * DEPTH + depth
        q_token = tl.minimum(row * STRIDE + (STRIDE - 1 - token), q_last)
        k_token = group * STRIDE + token
        q_at = q_tile + q_token[:, None] * q_s + d[None, :]
        k_at = k_tile + k_token[:, None] * k_s + d[None, :]
        k_mask = (k_token < k_left)[:, None]
        if D % DEPTH == 0:
            a = tl.load(q_at)
            b = tl.load(k_at, mask=k_mask, other=0.0)
        else:
            a = tl.load(q_at, mask=(d < D)[None, :], other=0.0)
            b = tl.load(k_at, mask=k_mask & (d < D)[None, :], other=0.0)
        logits = tl.dot(a, tl.trans(b), logits, input_precision=PRECISION)

    # A short last group is a mean over its real keys and weighs by how many it has.
    real = tl.minimum(tl.maximum(k_left - group * STRIDE, 0), STRIDE).to(tl.float32)
    column_scale = tl.where(real > 0, scale / tl.maximum(real, 1.0), 0.0)
    column_bias = tl.where(real > 0, tl.log2(tl.maximum(real, 1.0) / STRIDE), _NEGATIVE)
    logits = logits * column_scale[None, :] + column_bias[None, :]
    top = tl.max(logits, 1)
    top = tl.where(top == _NEGATIVE, 0.0, top)
    sums = run_sum(tl.exp2(logits - top[:, None]), ROWS, RUN, KEYS)
    value = top[:, None] + tl.log2(sums)

    q_group = row_tile * ROWS + row
    part = column_tile * GROUPS + tl.arange(0, GROUPS)
    at = lse + (slot.to(tl.int64) * q_groups + q_group)[:, None] * parts + part[None, :]
    tl.store(at, value, mask=(q_group < q_groups)[:, None] & (part < parts)[None, :])


@triton.jit
def _write_log_sums(
    logits, lse, slot, row_tile, column_tile, q_groups, k_groups, parts, scale,
    ROWS: tl.constexpr, KEYS: tl.constexpr, RUN: tl.constexpr,
):  # fmt: skip
    """log2 of the exponential sums over runs of RUN whole groups, in their natural order."""
    column = column_tile * KEYS + tl.arange(0, KEYS)
    logits = tl.where((column < k_groups)[None, :], logits, _NEGATIVE)
    top = tl.max(logits, 1) * scale
    top = tl.where(top == _NEGATIVE, 0.0, top)
    weight = tl.exp2(logits * scale - top[:, None])
    sums = tl.sum(tl.reshape(weight, [ROWS, KEYS // RUN, RUN]), 2)
    value = top[:, None] + tl.log2(sums)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    part = column_tile * (KEYS // RUN) + tl.arange(0, KEYS // RUN)
    at = lse + (slot.to(tl.int64) * q_groups + row)[:, None] * parts + part[None, :]
    tl.store(at, value, mask=(row < q_groups)[:, None] & (part < parts)[None, :])


@triton.jit
def _antidiagonal_matrix_kernel(
    q,  # descriptors of matrices whose rows are groups: see MatrixView
    k,
    lse,  # fp32 [heads of this launch, q_groups, parts]
    first_head, slots, heads, kv_group, q_groups, k_groups, parts,
    scale,  # log2 units, divided by the group size
    q_row_b, q_row_h, q_col_h, q_token, k_row_b, k_row_h, k_col_h, k_token,
    STRIDE: tl.constexpr, D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr,
    KEYS: tl.constexpr, RUN: tl.constexpr, BAND: tl.constexpr, PERSISTENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row_tiles = tl.cdiv(q_groups, ROWS)
    column_tiles = tl.cdiv(parts, KEYS // RUN)
    tiles = row_tiles * column_tiles
    STEPS: tl.constexpr = D // DEPTH
    if PERSISTENT:
        # One loop over all tiles of a program: the next tile's first reads are under way while
        # this one takes its exponentials.
        for index in tl.range(tl.program_id(0), tiles * slots, tl.num_programs(0), flatten=True):
            slot = index // tiles
            batch = (first_head + slot) // heads
            head = (first_head + slot) % heads
            kv = head // kv_group
            row_tile, column_tile = _banded(index % tiles, row_tiles, column_tiles, BAND)
            q_row = batch * q_row_b + head * q_row_h + row_tile * ROWS
            k_row = batch * k_row_b + kv * k_row_h + column_tile * KEYS
            logits = tl.zeros([ROWS, KEYS], tl.float32)
            for step in tl.range(0, STRIDE * STEPS):
                token = step // STEPS
                d = (step % STEPS) * DEPTH
                a = q.load([q_row, head * q_col_h + (STRIDE - 1 - token) * q_token + d])
                b = k.load([k_row, kv * k_col_h + token * k_token + d])
                logits = tl.dot(a, tl.trans(b), logits, input_precision=PRECISION)
            _write_log_sums(
                logits, lse, slot, row_tile, column_tile, q_groups, k_groups, parts, scale,
                ROWS, KEYS, RUN,
            )  # fmt: skip
    else:
        index = tl.program_id(0)
        slot = tl.program_id(1)
        batch = (first_head + slot) // heads
        head = (first_head + slot) % heads
        kv = head // kv_group
        row_tile, column_tile = _banded(index, row_tiles, column_tiles, BAND)
        q_row = batch * q_row_b + head * q_row_h + row_tile * ROWS
        k_row = batch * k_row_b + kv * k_row_h + column_tile * KEYS
        logits = tl.zeros([ROWS, KEYS], tl.float32)
        for step in tl.range(0, STRIDE * STEPS):
            token = step // STEPS
            d = (step % STEPS) * DEPTH
            a = q.load([q_row, head * q_col_h + (STRIDE - 1 - token) * q_token + d])
            b = k.load([k_row, kv * k_col_h + token * k_token + d])
            logits = tl.dot(a, tl.trans(b), logits, input_precision=PRECISION)
        _write_log_sums(
            logits, lse, slot, row_tile, column_tile, q_groups, k_groups, parts, scale,
            ROWS, KEYS, RUN,
        )  # fmt: skip


def antidiagonal_tile(q: TensorSpec, q_groups: int, tma: bool = False) -> Tile:
    """The configuration used unless the caller names one."""
    depth = min(64 if q.itemsize == 2 else 32, padded_dim(q.shape[3]))
    if q.itemsize == 4:
        tile = Tile(64, 64, 4, 2, depth)
    elif q_groups < 512:
        tile = Tile(128, 128, 4, 3, depth)
    else:
        # The product is long enough to be bound by what the L2 cache delivers: large tiles.
        tile = Tile(128, 256, 8, 4, depth) if tma else Tile(256, 128, 8, 3, depth)
    if q_groups < tile.rows:
        tile = Tile(max(16, power_of_two(q_groups)), 128, 4, tile.stages, depth)
    return fit(tile, operand_bytes(q.dtype, depth), shared_bytes(q.device), resident=False)


def antidiagonal_scores(
    q: Tensor,
    k: Tensor,
    q_block: int,
    k_block: int,
    scale: float,
    stride: int = 8,
    key_length: Tensor | None = None,
    *,
    tile: Tile | None = None,
    band: int | None = None,
    tma: bool | None = None,
    persistent: int = 1,
) -> Tensor:
    """Mean softmax mass per key block of the antidiagonal estimator: fp32 [B,H,M,N], rows sum to 1.

    q [B,H,Sq,D], k [B,Hkv,Sk,D] (any strides, last dim contiguous). Tokens form groups of `stride`;
    the logit of groups (a, b) is scale times the mean over i of q[a, stride-1-i] . k[b, i]. A short
    last query group repeats its last token; a short key group is averaged over its `c` real keys
    and weighs c/stride. `q_block` and `k_block` are multiples of `stride`. Scratch is bounded: many
    heads are scored in several launches. No host synchronisation.

    Where lengths are multiples of `stride`, strides allow and there is no `key_length`, q and k are
    read as matrices through descriptors; `tma` asks for that or forbids it (None: what is faster).
    `persistent` (with descriptors only): so many programs per multiprocessor take tile after tile;
    0 gives each tile its own. `tile`, `band`, `tma` and `persistent` tune speed only.
    """
    launches, matrices = _prepare(
        spec_of(q), spec_of(k), q_block, k_block, scale, stride, key_length is not None, tile, band,
        tma, persistent,
    )  # fmt: skip
    if matrices is None:
        return launches(q.device, q, k, key_length)
    return launches(q.device, matrices[0].bind(q), matrices[1].bind(k))


@functools.lru_cache(maxsize=256)
def _prepare(
    q: TensorSpec, k: TensorSpec, q_block: int, k_block: int, scale: float, stride: int,
    has_length: bool, tile: Tile | None, band: int | None, tma: bool | None, persistent: int,
) -> tuple[MassLaunches, tuple[DescriptorTemplate, DescriptorTemplate] | None]:  # fmt: skip
    """The launches of such calls, and what makes the descriptors of q and k."""
    check_queries_keys(q, k)
    if stride < 1 or stride & (stride - 1) or q_block % stride or k_block % stride:
        raise ValueError("stride must be a power of two that divides both blocks")
    batch, heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1], k.shape[2]
    m, n = cdiv(q_len, q_block), cdiv(k_len, k_block)
    q_groups = cdiv(q_len, stride)
    views = None
    if use_descriptors(q.device, tma) and not has_length:
        q_view, k_view = matrix_view(q, stride), matrix_view(k, stride)
        views = None if q_view is None or k_view is None else (q_view, k_view)
    tile = tile or antidiagonal_tile(q, q_groups, tma=views is not None)
    if dim % tile.depth:
        views = None
    scale_log2 = positive_scale(scale)

    run = math.gcd(tile.keys, k_block // stride)
    parts_per_block = k_block // stride // run
    parts = n * parts_per_block
    tiles = cdiv(q_groups, tile.rows) * cdiv(parts, tile.keys // run)

    launches = head_ranges(batch * heads, q_groups * parts * 4)
    slots = launches[0][1] - launches[0][0]
    constants = {
        "STRIDE": stride,
        "D": dim,
        "DEPTH": tile.depth,
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "RUN": run,
        "BAND": band or (8 if views is None else 16),
        "PRECISION": precision(q.dtype),
        **tile.options,
    }
    found = []
    for start, stop in launches:
        grid: tuple[int, ...] = (tiles, stop - start)
        if views is not None:
            if persistent:
                grid = (min(tiles * (stop - start), persistent * processors(q.device)),)
            q_view, k_view = views
            numbers: tuple[int | float, ...] = (
                start, stop - start, heads, heads // kv_heads, q_groups, k_len // stride, parts,
                scale_log2 / stride, *q_view.steps, q_view.token, *k_view.steps, k_view.token,
            )  # fmt: skip
            own = {**constants, "PERSISTENT": persistent > 0}
            score = Launch(_antidiagonal_matrix_kernel, grid, numbers, own)
        else:
            numbers = (
                start, heads, heads // kv_heads, q_len, k_len, q_groups, parts, scale_log2,
                *q.stride[:3], *k.stride[:3],
            )  # fmt: skip
            own = {**constants, "HAS_LENGTH": has_length, "STAGES": tile.stages}
            score = Launch(_antidiagonal_lse_kernel, grid, numbers, own)
        mass = mass_launch(stop - start, q_groups, m, n, q_block // stride, parts_per_block)
        found.append((start, stop, score, mass))
    matrices = None
    if views is not None:
        q_view, k_view = views
        matrices = (
            q_view.template(tile.rows, tile.depth, q.dtype),
            k_view.template(tile.keys, tile.depth, k.dtype),
        )
    return MassLaunches((batch, heads, m, n), (slots, q_groups, parts), tuple(found)), matrices
