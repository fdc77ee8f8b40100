"""Importance from a few sampled queries per block: the softmax mass each key block receives.

Two kernels. The first multiplies a tile of gathered samples with every key and keeps, per (sample,
key block), only the log of the exponential sum. The second turns those logs into mean mass. No
[samples, keys] matrix exists.
"""

from __future__ import annotations

import functools
import math

import triton
import triton.language as tl
from torch import Tensor

from .descriptor import DescriptorTemplate, matrix_view, use_descriptors
from .launch import Launch, TensorSpec, spec_of
from .score_mass import MassLaunches, mass_launch
from .score_tiles import (
    Tile,
    cdiv,
    check_queries_keys,
    even_splits,
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
def _log_sums(logits, scale, GROUPS: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr):
    """log2 of the exponential sums of each of GROUPS equal column runs: [ROWS, GROUPS].

    One maximum serves the whole tile: a run that underflows against it has no mass worth keeping.
    """
    top = tl.max(logits, 1) * scale
    top = tl.where(top == _NEGATIVE, 0.0, top)
    weight = tl.exp2(logits * scale - top[:, None])
    if GROUPS == 1:
        result = (top + tl.log2(tl.sum(weight, 1)))[:, None]
    else:
        sums = tl.sum(tl.reshape(weight, [ROWS, GROUPS, KEYS // GROUPS]), 2)
        result = top[:, None] + tl.log2(sums)
    return result


@triton.jit
def _sampled_lse_kernel(
    q, k,
    k_matrix,  # descriptor of all keys, see MatrixView, or unused
    positions,  # int [rows]: the token every sample row reads
    key_length,  # int32 [B] or unused
    lse,  # fp32 [heads of this launch, rows, parts]
    first_head, heads, kv_group, rows, keys, parts, tiles_per_split, scale,
    q_b, q_h, q_s, k_b, k_h, k_s, k_row_b, k_row_h, k_col_h,
    D: tl.constexpr, D_PAD: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    GROUPS: tl.constexpr, HAS_LENGTH: tl.constexpr, MATRIX: tl.constexpr, STAGES: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.program_id(2)
    batch = (first_head + slot) // heads
    head = (first_head + slot) % heads

    limit = keys
    if HAS_LENGTH:
        limit = tl.minimum(limit, tl.load(key_length + batch))

    d = tl.arange(0, D_PAD)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    token = tl.load(positions + row, mask=row < rows, other=0).to(tl.int64)
    q_rows = q + batch.to(tl.int64) * q_b + head.to(tl.int64) * q_h + token[:, None] * q_s
    sample = tl.load(q_rows + d[None, :], mask=(row < rows)[:, None] & (d < D)[None, :], other=0.0)

    n = tl.arange(0, KEYS)
    k_head = k + batch.to(tl.int64) * k_b + (head // kv_group).to(tl.int64) * k_h
    k_tile = n[:, None] * k_s + d[None, :]
    lse_rows = lse + slot.to(tl.int64) * rows * parts + row[:, None].to(tl.int64) * parts
    group = tl.arange(0, GROUPS)
    k_row = batch * k_row_b + (head // kv_group) * k_row_h
    k_column = (head // kv_group) * k_col_h

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tl.cdiv(parts, GROUPS))
    # Only the tile that holds the end of the sequence needs a mask, so it is peeled off the loop.
    full = tl.minimum(last, limit // KEYS)
    for t in tl.range(first, full, num_stages=STAGES):
        at = k_head + tl.cast(t * KEYS, tl.int64) * k_s
        if MATRIX:
            tile = k_matrix.load([k_row + t * KEYS, k_column])
        elif D == D_PAD:
            tile = tl.load(at + k_tile)
        else:
            tile = tl.load(at + k_tile, mask=(d < D)[None, :], other=0.0)
        logits = tl.dot(sample, tl.trans(tile), input_precision=PRECISION)
        value = _log_sums(logits, scale, GROUPS, ROWS, KEYS)
        part = t * GROUPS + group
        tl.store(lse_rows + part[None, :], value, mask=(row < rows)[:, None])
    for t in tl.range(tl.maximum(first, full), last, num_stages=1):
        at = k_head + tl.cast(t * KEYS, tl.int64) * k_s
        real = t * KEYS + n < limit
        tile = tl.load(at + k_tile, mask=real[:, None] & (d < D)[None, :], other=0.0)
        logits = tl.dot(sample, tl.trans(tile), input_precision=PRECISION)
        logits = tl.where(real[None, :], logits, _NEGATIVE)
        value = _log_sums(logits, scale, GROUPS, ROWS, KEYS)
        part = t * GROUPS + group
        mask = (row < rows)[:, None] & (part < parts)[None, :]
        tl.store(lse_rows + part[None, :], value, mask=mask)


def sampled_tile(q: TensorSpec, rows: int, tma: bool = False) -> Tile:
    """The configuration used unless the caller names one."""
    row_bytes = operand_bytes(q.dtype, padded_dim(q.shape[3]))
    if q.itemsize == 4:
        tile = Tile(64, 32, 4, 2)
    elif tma:
        # Small programs, several per multiprocessor: one multiplies while others take exponentials.
        tile = Tile(64, 128, 4, 3)
    elif rows >= 1024:
        tile = Tile(64, 128, 4, 3)
    else:
        tile = Tile(128, 128, 8, 2)
    if rows < tile.rows:
        tile = Tile(max(16, power_of_two(rows)), tile.keys, 4, tile.stages)
    return fit(tile, row_bytes, shared_bytes(q.device), resident=True)


def sampled_scores(
    q: Tensor,
    k: Tensor,
    q_block: int,
    k_block: int,
    scale: float,
    positions: Tensor,
    key_length: Tensor | None = None,
    *,
    tile: Tile | None = None,
    tma: bool | None = None,
) -> Tensor:
    """Mean softmax mass of each key block over the sampled queries of each query block.

    q [B,H,Sq,D], k [B,Hkv,Sk,D] (any strides, last dim contiguous); `positions` int [M,P] names the
    query tokens sampled from each block, all in [0, Sq). `key_length` int32 [B]: keys at or beyond
    it never count. Returns fp32 [B,H,M,N] whose rows sum to 1. No host synchronisation. `tma` asks
    for keys to be read through a descriptor where strides allow, or forbids it (None: what is
    faster); it and `tile` tune speed only.
    """
    launches, keys = _prepare(
        spec_of(q), spec_of(k), q_block, k_block, scale, positions.shape, key_length is not None,
        tile, tma,
    )  # fmt: skip
    matrix = None if keys is None else keys.bind(k)
    return launches(q.device, q, k, matrix, positions.contiguous(), key_length)


@functools.lru_cache(maxsize=256)
def _prepare(
    q: TensorSpec, k: TensorSpec, q_block: int, k_block: int, scale: float,
    positions: tuple[int, ...], has_length: bool, tile: Tile | None, tma: bool | None,
) -> tuple[MassLaunches, DescriptorTemplate | None]:  # fmt: skip
    """The launches of such calls, and what makes the descriptor of their keys."""
    check_queries_keys(q, k)
    batch, heads, q_len, dim = q.shape
    kv_heads, k_len = k.shape[1], k.shape[2]
    m, n = cdiv(q_len, q_block), cdiv(k_len, k_block)
    if len(positions) != 2 or positions[0] != m:
        raise ValueError(f"positions must be [{m}, P], got {tuple(positions)}")
    per_block = positions[1]
    rows = m * per_block
    view = matrix_view(k) if use_descriptors(q.device, tma) and padded_dim(dim) == dim else None
    tile = tile or sampled_tile(q, rows, tma=view is not None)
    scale_log2 = positive_scale(scale)

    # A tile covers whole parts, a key block is made of whole parts: any block size fits any tile.
    part = math.gcd(tile.keys, k_block)
    parts_per_block = k_block // part
    parts = n * parts_per_block
    groups = tile.keys // part
    tiles = cdiv(parts, groups)

    launches = head_ranges(batch * heads, rows * parts * 4)
    slots = launches[0][1] - launches[0][0]
    row_tiles = cdiv(rows, tile.rows)
    per_split = even_splits(tiles, row_tiles * slots, 2 * processors(q.device))
    constants = {
        "D": dim,
        "D_PAD": padded_dim(dim),
        "ROWS": tile.rows,
        "KEYS": tile.keys,
        "GROUPS": groups,
        "HAS_LENGTH": has_length,
        "MATRIX": view is not None,
        "STAGES": tile.stages,
        "PRECISION": precision(q.dtype),
        **tile.options,
    }
    steps = (0, 0, 0) if view is None else view.steps
    found = []
    for start, stop in launches:
        numbers = (
            start, heads, heads // kv_heads, rows, k_len, parts, per_split, scale_log2,
            *q.stride[:3], *k.stride[:3], *steps,
        )  # fmt: skip
        grid = (row_tiles, cdiv(tiles, per_split), stop - start)
        mass = mass_launch(stop - start, rows, m, n, per_block, parts_per_block)
        score = Launch(_sampled_lse_kernel, grid, numbers, constants)
        found.append((start, stop, score, mass))
    keys = None if view is None else view.template(tile.keys, dim, k.dtype)
    return MassLaunches((batch, heads, m, n), (slots, rows, parts), tuple(found)), keys
