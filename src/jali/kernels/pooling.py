"""Mean-pooled keys and values at ratios 2, 4 and 8, all made from one read of K and V."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, TensorSpec
from .score_tiles import cdiv, padded_dim

RATIOS = (2, 4, 8)
SECTION_ROWS = 32
"""Every section starts at a multiple of this many rows; the last so many rows are empty."""

_GROUPS = 8


class Sections(NamedTuple):
    """The rows of all pooled ratios in one buffer, a section per ratio, finest first.

    `starts`: each ratio and the first row of its section, which covers `tokens` tokens, as many as
    there are or more. `rows`: those of the whole buffer, the last SECTION_ROWS of which are empty.
    """

    starts: tuple[tuple[int, int], ...]
    tokens: int
    rows: int

    @property
    def empty_row(self) -> int:
        """The first of SECTION_ROWS rows that stand for no key at all."""
        return self.rows - SECTION_ROWS


def make_sections(seq: int, ratios: Iterable[int]) -> Sections:
    """Sections for `seq` tokens, each a multiple of SECTION_ROWS."""
    tokens = cdiv(seq, 8 * SECTION_ROWS) * 8 * SECTION_ROWS
    starts, row = [], 0
    for ratio in sorted(set(ratios)):
        if ratio not in RATIOS:
            raise ValueError(f"pooling ratio must be one of {RATIOS}, got {ratio}")
        starts.append((ratio, row))
        row += tokens // ratio
    if not starts:
        raise ValueError("no pooling ratio given")
    return Sections(tuple(starts), tokens, row + SECTION_ROWS)


@triton.jit
def _put(base, rows, start, mean, offs_d, d_ok, D: tl.constexpr):
    """Store `mean` [I, BLOCK_D] at `rows` of the section that begins at `start`."""
    at = (start + rows).to(tl.int64)
    tl.store(base + at[:, None] * D + offs_d[None, :], mean, mask=d_ok)


@triton.jit
def _store_level(
    k_out, v_out, bias, sum_k, sum_v, rows, start, left, offs_d, d_ok, write_bias,
    R: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Turn sums over R tokens, eighths of them, into means; `left` [I]: real tokens from the
    group's first one on."""
    count = tl.minimum(tl.maximum(left, 0), R).to(tl.float32)
    weight = 8.0 / tl.maximum(count, 1.0)
    _put(k_out, rows, start, sum_k * weight[:, None], offs_d, d_ok, D)
    _put(v_out, rows, start, sum_v * weight[:, None], offs_d, d_ok, D)
    if write_bias:
        tl.store(
            bias + start + rows, tl.where(count > 0, tl.log2(tl.maximum(count, 1.0)), float("-inf"))
        )


@triton.jit
def _load(base, tokens, stride_s, offs_d, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """An eighth of the rows `tokens` in fp32, so that no eight of them overflow when they are
    added; zero at and beyond `length`."""
    mask = (tokens < length)[:, None]
    if D != BLOCK_D:
        mask = mask & (offs_d < D)[None, :]
    at = tokens.to(tl.int64) * stride_s
    x = tl.load(base + at[:, None] + offs_d[None, :], mask=mask, other=0.0)
    return x.to(tl.float32) * 0.125


@triton.jit
def _pool_kernel(
    K, V, POOLED, BIAS, LENGTH,
    stride_kb, stride_kh, stride_ks, stride_vb, stride_vh, stride_vs,
    seq, rows_total, values_at, chunks, start2, start4, start8,
    H: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS2: tl.constexpr, HAS4: tl.constexpr, HAS8: tl.constexpr,
    HAS_LENGTH: tl.constexpr, GROUPS: tl.constexpr, EMPTY_ROWS: tl.constexpr,
):  # fmt: skip
    """One program pools GROUPS * 8 tokens of one head.

    Heads are the fastest grid axis: programs that run together read the same tokens, which are
    neighbours in memory when the order is BSHD. The groups' tokens come as eight loads of every
    eighth token, so that pooling is plain addition and nothing moves between threads.
    """
    h = tl.program_id(0)
    chunk = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    offs_d = tl.arange(0, BLOCK_D)
    group = tl.arange(0, GROUPS)
    head = (b * H + h) * rows_total * D
    k_out = POOLED + head
    v_out = POOLED + values_at + head
    if HAS_LENGTH:
        length = tl.minimum(tl.load(LENGTH + b), seq)
        bias = BIAS + b * rows_total
        write_bias = h == 0
    else:
        length = seq
        bias = BIAS
        write_bias = (h == 0) & (b == 0)

    if chunk == chunks:
        empty = tl.arange(0, EMPTY_ROWS)
        d_empty = (offs_d < D)[None, :] & (empty >= 0)[:, None]
        zero = tl.zeros((EMPTY_ROWS, BLOCK_D), dtype=tl.float32)
        _put(k_out, empty, rows_total - EMPTY_ROWS, zero, offs_d, d_empty, D)
        _put(v_out, empty, rows_total - EMPTY_ROWS, zero, offs_d, d_empty, D)
        if write_bias:
            nothing = tl.full((EMPTY_ROWS,), float("-inf"), dtype=tl.float32)
            tl.store(bias + rows_total - EMPTY_ROWS + empty, nothing)
    else:
        d_ok = (offs_d < D)[None, :] & (group >= 0)[:, None]
        rows8 = chunk * GROUPS + group
        first = rows8 * 8
        k_in = K + b * stride_kb + h.to(tl.int64) * stride_kh
        v_in = V + b * stride_vb + h.to(tl.int64) * stride_vh
        sum_k8 = tl.zeros((GROUPS, BLOCK_D), dtype=tl.float32)
        sum_v8 = tl.zeros((GROUPS, BLOCK_D), dtype=tl.float32)
        for half in tl.static_range(2):
            sum_k4 = tl.zeros((GROUPS, BLOCK_D), dtype=tl.float32)
            sum_v4 = tl.zeros((GROUPS, BLOCK_D), dtype=tl.float32)
            for pair in tl.static_range(2):
                token = first + half * 4 + pair * 2
                sum_k2 = _load(k_in, token, stride_ks, offs_d, length, D, BLOCK_D)
                sum_v2 = _load(v_in, token, stride_vs, offs_d, length, D, BLOCK_D)
                sum_k2 += _load(k_in, token + 1, stride_ks, offs_d, length, D, BLOCK_D)
                sum_v2 += _load(v_in, token + 1, stride_vs, offs_d, length, D, BLOCK_D)
                if HAS2:
                    _store_level(
                        k_out, v_out, bias, sum_k2, sum_v2, rows8 * 4 + half * 2 + pair, start2,
                        length - token, offs_d, d_ok, write_bias, 2, D,
                    )  # fmt: skip
                sum_k4 += sum_k2
                sum_v4 += sum_v2
            if HAS4:
                _store_level(
                    k_out, v_out, bias, sum_k4, sum_v4, rows8 * 2 + half, start4,
                    length - first - half * 4, offs_d, d_ok, write_bias, 4, D,
                )  # fmt: skip
            sum_k8 += sum_k4
            sum_v8 += sum_v4
        if HAS8:
            _store_level(
                k_out, v_out, bias, sum_k8, sum_v8, rows8, start8,
                length - first, offs_d, d_ok, write_bias, 8, D,
            )  # fmt: skip


class PoolLaunch(NamedTuple):
    """The launch that pools k and v, and the shapes of what it writes."""

    sections: Sections
    pooled: tuple[int, int, int, int, int]
    bias: tuple[int, int]
    launch: Launch

    def __call__(self, k: Tensor, v: Tensor, key_length: Tensor | None) -> tuple[Tensor, Tensor]:
        """Pool k, v [B, Hkv, S, D] over aligned groups of tokens: pooled keys and values, and bias.

        Pooled [2, B, Hkv, R, D], keys then values, contiguous, in k's dtype: row g of the section
        of ratio r holds the mean of the real keys among tokens g*r .. g*r + r - 1, summed in fp32.
        The last group may be short, and keys at or beyond key_length[b] (int32 [B], on the device)
        are not real. Bias fp32 [B or 1, R]: log2 of how many real keys a row stands for, -inf where
        there are none (and there keys and values are zero).
        """
        device = k.device
        pooled = torch.empty(*self.pooled, dtype=k.dtype, device=device)
        bias = torch.empty(*self.bias, dtype=torch.float32, device=device)
        self.launch(k, v, pooled, bias, key_length)
        return pooled, bias


@functools.lru_cache(maxsize=256)
def pool_launch(
    k: TensorSpec, v: TensorSpec, ratios: tuple[int, ...], has_length: bool
) -> PoolLaunch:
    """What pools k and v (any strides, last dim contiguous) at these ratios."""
    batch, heads, seq, dim = k.shape
    if v.shape != k.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)}, {tuple(v.shape)}")
    if k.stride[-1] != 1 or v.stride[-1] != 1:
        raise ValueError("the last dim of k and v must be contiguous")
    sections = make_sections(seq, ratios)
    starts, rows = dict(sections.starts), sections.rows
    chunks = sections.tokens // (8 * _GROUPS)
    numbers = (
        *k.stride[:3], *v.stride[:3], seq, rows, batch * heads * rows * dim, chunks,
        starts.get(2, 0), starts.get(4, 0), starts.get(8, 0),
    )  # fmt: skip
    constants = {
        "H": heads,
        "D": dim,
        "BLOCK_D": padded_dim(dim),
        "HAS2": 2 in starts,
        "HAS4": 4 in starts,
        "HAS8": 8 in starts,
        "HAS_LENGTH": has_length,
        "GROUPS": _GROUPS,
        "EMPTY_ROWS": SECTION_ROWS,
        "num_warps": 4,
    }
    launch = Launch(_pool_kernel, (heads, chunks + 1, batch), numbers, constants)
    bias = (batch if has_length else 1, rows)
    return PoolLaunch(sections, (2, batch, heads, rows, dim), bias, launch)
