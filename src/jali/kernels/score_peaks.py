"""Importance from sampled peaks: how close the best pair of two blocks comes to its row's top.

Sampled keys are gathered into a dense buffer, a matrix product with the sampled queries keeps only
the maximum per (sampled query, key block), and a second kernel compares it with the row's statistic
(its maximum, or its log-sum-exp) and pools over the query block. Every element costs one maximum;
an exponential per element is needed only for the log-sum-exp.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .descriptor import DescriptorTemplate, use_descriptors
from .launch import Launch, TensorSpec, spec_of
from .score_interleave import interleaved_column, run_max
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
def _gather_keys_kernel(
    k,
    positions,  # int [n, per_block], -1: no sample
    key_length,
    packed,  # [heads of this launch, columns, D_PAD]
    scratch,  # fp32: see _PeakScratch
    bias_at, sampled_at, first_head, heads, kv_group, keys, n, per_block, columns,
    k_b, k_h, k_s,
    D: tl.constexpr, D_PAD: tl.constexpr, RUN: tl.constexpr, KEYS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slot = tl.program_id(1)
    batch = (first_head + slot) // heads
    head = (first_head + slot) % heads
    limit = keys
    if HAS_LENGTH:
        limit = tl.minimum(limit, tl.load(key_length + batch))
    member = tl.arange(0, RUN)
    listed = (member < per_block) & (block < n)
    token = tl.load(positions + block * per_block + member, mask=listed, other=-1).to(tl.int32)
    real = (token >= 0) & (token < limit)
    # Fillers repeat a real sample of the block: a maximum does not notice. Without one they are 0.
    stand_in = tl.max(tl.where(real, token, -1), 0)
    token = tl.where(real, token, stand_in)
    d = tl.arange(0, D_PAD)
    at = k + batch.to(tl.int64) * k_b + (head // kv_group).to(tl.int64) * k_h
    at += token.to(tl.int64)[:, None] * k_s + d[None, :]
    value = tl.load(at, mask=(token >= 0)[:, None] & (d < D)[None, :], other=0.0)
    key = block * RUN + member
    column = (key // KEYS) * KEYS + interleaved_column(key % KEYS, RUN, KEYS)
    row = slot.to(tl.int64) * columns + column
    tl.store(packed + row[:, None] * D_PAD + d[None, :], value)
    tl.store(scratch + bias_at + row, tl.where(real, 0.0, _NEGATIVE))
    sampled = scratch + sampled_at + slot * n + block
    tl.store(sampled, (stand_in >= 0).to(tl.float32), mask=block < n)


@triton.jit
def _peak_kernel(
    q,
    positions,  # int [m, per_block]
    packed,
    matrix,  # descriptor of `packed` as [heads * columns, D_PAD], or unused
    scratch, bias_at, peaks_at, lse_at, first_head, heads, rows, per_block, m, columns, parts,
    tiles, tiles_per_split, scale,
    q_b, q_h, q_s,
    D: tl.constexpr, D_PAD: tl.constexpr, Q_RUN: tl.constexpr, RUN: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, NORMALISED: tl.constexpr, MATRIX: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    row_tile = tl.program_id(0)
    split = tl.program_id(1)
    slot = tl.program_id(2)
    batch = (first_head + slot) // heads
    head = (first_head + slot) % heads

    row = row_tile * ROWS + tl.arange(0, ROWS)
    # Rows that pad a query block to a power of two repeat its last sample: harmless in a maximum.
    block = tl.minimum(row // Q_RUN, m - 1)
    member = tl.minimum(row % Q_RUN, per_block - 1)
    token = tl.load(positions + block * per_block + member).to(tl.int64)
    d = tl.arange(0, D_PAD)
    q_at = q + batch.to(tl.int64) * q_b + head.to(tl.int64) * q_h + token[:, None] * q_s
    sample = tl.load(q_at + d[None, :], mask=(d < D)[None, :], other=0.0)

    GROUPS: tl.constexpr = KEYS // RUN
    n = tl.arange(0, KEYS)
    group = tl.arange(0, GROUPS)
    k_tile = n[:, None] * D_PAD + d[None, :]
    k_head = packed + slot.to(tl.int64) * columns * D_PAD
    bias = scratch + bias_at + slot * columns
    peak_rows = scratch + peaks_at + (slot.to(tl.int64) * rows + row)[:, None] * parts
    lse_rows = scratch + lse_at + (slot.to(tl.int64) * rows + row) * tiles

    first = split * tiles_per_split
    last = tl.minimum(first + tiles_per_split, tiles)
    for t in tl.range(first, last, num_stages=STAGES):
        if MATRIX:
            tile = matrix.load([slot * columns + t * KEYS, 0])
        else:
            tile = tl.load(k_head + t * (KEYS * D_PAD) + k_tile)
        logits = tl.dot(sample, tl.trans(tile), input_precision=PRECISION)
        if NORMALISED:
            logits += tl.load(bias + t * KEYS + n)[None, :]
        peak = run_max(logits, ROWS, RUN, KEYS)
        part = t * GROUPS + group
        tl.store(peak_rows + part[None, :], peak, mask=(row < rows)[:, None])
        if NORMALISED:
            top = tl.max(peak, 1) * scale
            top = tl.where(top == _NEGATIVE, 0.0, top)
            total = tl.sum(tl.exp2(logits * scale - top[:, None]), 1)
            tl.store(lse_rows + t, top + tl.log2(total), mask=row < rows)


@triton.jit
def _pool_peaks_kernel(
    scratch,
    out,  # fp32 [heads of this launch, m, n]
    sampled_at, peaks_at, lse_at, rows, parts, tiles, m, n, scale,
    Q_RUN: tl.constexpr, CHUNK: tl.constexpr, N_PAD: tl.constexpr, T_PAD: tl.constexpr,
    NORMALISED: tl.constexpr,
):  # fmt: skip
    block = tl.program_id(0)
    slot = tl.program_id(1)
    column = tl.arange(0, N_PAD)
    in_chunk = tl.arange(0, CHUNK)
    real = column < n
    real &= tl.load(scratch + sampled_at + slot * n + column, mask=column < n, other=0.0) != 0.0
    peaks = scratch + peaks_at
    lse = scratch + lse_at
    best = tl.zeros([N_PAD], tl.float32)
    for start in range(0, Q_RUN, CHUNK):
        row = slot.to(tl.int64) * rows + block * Q_RUN + start + in_chunk
        at = peaks + row[:, None] * parts + column[None, :]
        peak = tl.load(at, mask=(column < n)[None, :], other=_NEGATIVE)
        peak = tl.where(real[None, :], peak, _NEGATIVE) * scale
        if NORMALISED:
            t = tl.arange(0, T_PAD)
            logs = tl.load(lse + row[:, None] * tiles + t[None, :], (t < tiles)[None, :], _NEGATIVE)
            top = tl.max(logs, 1)
            top = tl.where(top == _NEGATIVE, 0.0, top)
            top += tl.log2(tl.sum(tl.exp2(logs - top[:, None]), 1))
        else:
            top = tl.max(peak, 1)
        top = tl.where(top == _NEGATIVE, 0.0, top)
        best = tl.maximum(best, tl.max(tl.exp2(peak - top[:, None]), 0))
    total = tl.sum(best, 0)
    best /= tl.where(total > 0.0, total, 1.0)
    tl.store(out + (slot.to(tl.int64) * m + block) * n + column, best, mask=column < n)


def peak_tile(q: TensorSpec, rows: int, run: int, tma: bool = False) -> Tile:
    """The configuration used unless the caller names one."""
    row_bytes = operand_bytes(q.dtype, padded_dim(q.shape[3]))
    if q.itemsize == 4:
        tile = Tile(64, 32, 4, 2)
    else:
        # A cap on registers lets a second program multiply while this one takes maxima.
        tile = Tile(128, 128, 8, 2, registers=128 if tma else None)
    if rows < tile.rows:
        tile = Tile(max(16, power_of_two(rows)), tile.keys, 4, tile.stages)
    least = max(16, run)  # a key block is pooled within one tile
    return fit(tile, row_bytes, shared_bytes(q.device), resident=True, least_keys=least)


def sampled_peak_scores(
    q: Tensor,
    k: Tensor,
    q_block: int,
    k_block: int,
    scale: float,
    q_positions: Tensor,
    k_positions: Tensor,
    key_length: Tensor | None = None,
    *,
    normalised: bool,
    tile: Tile | None = None,
    tma: bool | None = None,
) -> Tensor:
    """Peak importance of sampled queries and keys: fp32 [B,H,M,N], each row sums to 1.

    q [B,H,Sq,D], k [B,Hkv,Sk,D] (any strides, last dim contiguous). `q_positions` int [M,Pq] and
    `k_positions` int [N,Pk] name the sampled tokens; -1 (keys only) means no sample, and keys at or
    beyond `key_length` int32 [B] are no samples either. With `normalised` a pair weighs its softmax
    probability over the sampled keys; without, exp(its best logit - the row's best logit). A key
    block without a sample scores 0. Scratch is bounded: many heads are scored in several launches.
    No host synchronisation. `tma` asks for the gathered keys to be read through a descriptor, or
    forbids it (None: what is faster); it and `tile` tune speed only.
    """
    call = _prepare(
        spec_of(q), spec_of(k), q_block, k_block, scale, q_positions.shape, k_positions.shape,
        key_length is not None, normalised, tile, tma,
    )  # fmt: skip
    device = q.device
    out = torch.empty(*call.shape, dtype=torch.float32, device=device)
    packed = torch.empty(*call.packed, dtype=k.dtype, device=device)
    scratch = torch.empty(call.scratch, dtype=torch.float32, device=device)
    q_positions, k_positions = q_positions.contiguous(), k_positions.contiguous()
    matrix = None if call.matrix is None else call.matrix.bind(packed)
    by_head = out if len(call.parts) == 1 else out.flatten(0, 1)
    for (start, stop), gather, find, pool in call.parts:
        gather(k, k_positions, key_length, packed, scratch)
        find(q, q_positions, packed, matrix, scratch)
        pool(scratch, out if by_head is out else by_head[start:stop])
    return out


class _PeakScratch(NamedTuple):
    """Where in one tensor the kernels leave what they find for each other, per head of a launch:
    `bias` [columns], 0 for a sample and -inf for a filler; `sampled` [n], not 0 where a key block
    has a sample; `peaks` [rows, parts], the unscaled maxima; `lse` [rows, tiles], the log2-sum-exp
    per key tile, where it is asked for."""

    bias: int
    sampled: int
    peaks: int
    lse: int
    end: int

    @classmethod
    def of(cls, *sizes: int) -> _PeakScratch:
        """One part behind the other, each beginning at a multiple of 64 bytes."""
        starts = [0]
        for size in sizes:
            starts.append(cdiv(starts[-1] + size, 16) * 16)
        return cls(*starts)


class _PeakLaunches(NamedTuple):
    """How peak scores are made: the shapes of the scores and of scratch memory, and per `part` from
    which head, to which, and the three launches."""

    shape: tuple[int, int, int, int]
    packed: tuple[int, int, int]
    scratch: int
    matrix: DescriptorTemplate | None
    parts: tuple[tuple[tuple[int, int], Launch, Launch, Launch], ...]


@functools.lru_cache(maxsize=256)
def _prepare(
    q: TensorSpec, k: TensorSpec, q_block: int, k_block: int, scale: float,
    q_positions: tuple[int, ...], k_positions: tuple[int, ...], has_length: bool,
    normalised: bool, tile: Tile | None, tma: bool | None,
) -> _PeakLaunches:  # fmt: skip
    check_queries_keys(q, k)
    batch, heads, q_len, dim = q.shape
    kv_group, k_len = heads // k.shape[1], k.shape[2]
    m, n = cdiv(q_len, q_block), cdiv(k_len, k_block)
    if q_positions[0] != m or k_positions[0] != n:
        raise ValueError(f"need positions for {m} query and {n} key blocks")
    q_run = power_of_two(q_positions[1])
    run = power_of_two(k_positions[1])
    rows = m * q_run
    tma = use_descriptors(q.device, tma)
    tile = tile or peak_tile(q, rows, run, tma=tma)
    if run > tile.keys:
        raise ValueError(f"at most {tile.keys} sampled keys per block, got {k_positions[1]}")
    scale_log2 = positive_scale(scale)
    d_pad = padded_dim(dim)
    groups = tile.keys // run
    tiles = cdiv(n, groups)
    parts = tiles * groups
    columns = tiles * tile.keys

    bytes_each = rows * (parts + (tiles if normalised else 0)) * 4
    bytes_each += columns * (d_pad * q.itemsize + 4)
    launches = head_ranges(batch * heads, bytes_each)
    slots = launches[0][1] - launches[0][0]
    at = _PeakScratch.of(
        slots * columns, slots * n, slots * rows * parts, slots * rows * tiles if normalised else 0
    )
    row_tiles = cdiv(rows, tile.rows)
    per_split = even_splits(tiles, row_tiles * slots, 2 * processors(q.device))
    n_pad = power_of_two(n)
    t_pad = power_of_two(tiles)
    of_tile = {"D": dim, "D_PAD": d_pad, "RUN": run, "KEYS": tile.keys}
    to_gather = {**of_tile, "HAS_LENGTH": has_length, "num_warps": 2}
    to_find = {
        **of_tile, "Q_RUN": q_run, "ROWS": tile.rows, "NORMALISED": normalised, "MATRIX": tma,
        "STAGES": tile.stages, "PRECISION": precision(q.dtype), **tile.options,
    }  # fmt: skip
    to_pool = {
        "Q_RUN": q_run, "CHUNK": max(1, min(q_run, 4096 // max(n_pad, t_pad))), "N_PAD": n_pad,
        "T_PAD": t_pad, "NORMALISED": normalised, "num_warps": 4,
    }  # fmt: skip
    found = []
    for start, stop in launches:
        size = stop - start
        numbers: tuple[int | float, ...] = (
            at.bias, at.sampled, start, heads, kv_group, k_len, n, k_positions[1], columns,
            *k.stride[:3],
        )  # fmt: skip
        gather = Launch(_gather_keys_kernel, (parts, size), numbers, to_gather)
        numbers = (
            at.bias, at.peaks, at.lse, start, heads, rows, q_positions[1], m, columns, parts,
            tiles, per_split, scale_log2, *q.stride[:3],
        )  # fmt: skip
        grid = (row_tiles, cdiv(tiles, per_split), size)
        find = Launch(_peak_kernel, grid, numbers, to_find)
        numbers = (at.sampled, at.peaks, at.lse, rows, parts, tiles, m, n, scale_log2)
        pool = Launch(_pool_peaks_kernel, (m, size), numbers, to_pool)
        found.append(((start, stop), gather, find, pool))
    matrix = None
    if tma:
        matrix = DescriptorTemplate((slots * columns, d_pad), d_pad, (tile.keys, d_pad), k.dtype)
    packed = (slots, columns, d_pad)
    return _PeakLaunches((batch, heads, m, n), packed, at.end, matrix, tuple(found))
