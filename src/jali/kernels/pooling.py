"""Mean-pooled keys and values at ratios 2, 4 and 8, all made from one read of K and V."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, TensorSpec, spec_of
from .score_tiles import cdiv, padded_dim

RATIOS = (2, 4, 8)
SECTION_ROWS = 32
"""Every section starts at a multiple of this many rows; the last so many rows are empty."""

_GROUPS = 8


class Sections(NamedTuple):
    """Where the rows of each ratio begin, for how many tokens, and how many rows there are."""

    starts: tuple[tuple[int, int], ...]
    tokens: int
    rows: int

    @property
    def empty_row(self) -> int:
        """The first of SECTION_ROWS rows that stand for no key at all."""
        return self.rows - SECTION_ROWS


@dataclass(frozen=True, slots=True)
class Pyramid:
    """All pooled levels of one K and V, one section of rows per ratio, finest first.

    `both` is [2, B, Hkv, R, D], keys then values, contiguous: a run of pooled rows is one run of
    memory. The row of ratio r that is g behind the start of its section holds the mean of the real
    keys among tokens g*r .. g*r + r - 1. `bias` is [B or 1, R]: log2 of how many real keys a row
    stands for, -inf where there are none (and there keys and values are zero). The last
    SECTION_ROWS rows are always empty. Sections cover as many tokens as there are, or more.
    """

    both: Tensor
    bias: Tensor
    sections: Sections

    @property
    def k(self) -> Tensor:
        return self.both[0]

    @property
    def v(self) -> Tensor:
        return self.both[1]

    @property
    def starts(self) -> dict[int, int]:
        return dict(self.sections.starts)

    @property
    def empty_row(self) -> int:
        return self.sections.empty_row

    @property
    def log_count(self) -> Tensor:
        """ln(number of real keys) per row, [B or 1, R], -inf where there are none."""
        return self.bias * math.log(2.0)

    def section_rows(self, ratio: int) -> int:
        """How many rows the section of `ratio` has, its padding included."""
        return self.sections.tokens // ratio


@triton.jit
def _put(base, rows, start, mean, offs_d, d_ok, D: tl.constexpr):
    """Store `mean` [I, BLOCK_D] at `rows` of the section that begins at `start`."""
    at = (start + rows).to(tl.int64)
    tl.store(base + at[:, None] * D + offs_d[None, :], mean, mask=d_ok)


@triton.jit
def _store_level(
    k_out,
    v_out,
    bias,
    sum_k,
    sum_v,
    rows,
    start,
    left,
    offs_d,
    d_ok,
    write_bias,
    R: tl.constexpr,
    D: tl.constexpr,
):
    """Turn sums over R tokens into means; `left` [I]: real tokens from the group's first one on."""
    count = tl.minimum(tl.maximum(left, 0), R).to(tl.float32)
    weight = 1.0 / tl.maximum(count, 1.0)
    _put(k_out, rows, start, sum_k * weight[:, None], offs_d, d_ok, D)
    _put(v_out, rows, start, sum_v * weight[:, None], offs_d, d_ok, D)
    if write_bias:
        tl.store(
            bias + start + rows, tl.where(count > 0, tl.log2(tl.maximum(count, 1.0)), float("-inf"))
        )


@triton.jit
def _load(base, tokens, stride_s, offs_d, length, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows `tokens` in fp32, zero at and beyond `length`."""
    mask = (tokens < length)[:, None]
    if D != BLOCK_D:
        mask = mask & (offs_d < D)[None, :]
    at = tokens.to(tl.int64) * stride_s
    return tl.load(base + at[:, None] + offs_d[None, :], mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _pool_kernel(
    K, V, BOTH, BIAS, LENGTH,
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
    k_out = BOTH + head
    v_out = BOTH + values_at + head
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
                        k_out,
                        v_out,
                        bias,
                        sum_k2,
                        sum_v2,
                        rows8 * 4 + half * 2 + pair,
                        start2,
                        length - token,
                        offs_d,
                        d_ok,
                        write_bias,
                        2,
                        D,
                    )
                sum_k4 += sum_k2
                sum_v4 += sum_v2
            if HAS4:
                _store_level(
                    k_out,
                    v_out,
                    bias,
                    sum_k4,
                    sum_v4,
                    rows8 * 2 + half,
                    start4,
                    length - first - half * 4,
                    offs_d,
                    d_ok,
                    write_bias,
                    4,
                    D,
                )
            sum_k8 += sum_k4
            sum_v8 += sum_v4
        if HAS8:
            _store_level(
                k_out,
                v_out,
                bias,
                sum_k8,
                sum_v8,
                rows8,
                start8,
                length - first,
                offs_d,
                d_ok,
                write_bias,
                8,
                D,
            )


def padded_tokens(seq: int) -> int:
    """The tokens that sections cover: enough that each section is a multiple of SECTION_ROWS."""
    return cdiv(seq, 8 * SECTION_ROWS) * 8 * SECTION_ROWS


def section_starts(seq: int, ratios: Iterable[int]) -> tuple[dict[int, int], int]:
    """The first row of each ratio's section, finest first, and the rows of the whole buffer."""
    padded = padded_tokens(seq)
    starts, row = {}, 0
    for ratio in sorted(set(ratios)):
        if ratio not in RATIOS:
            raise ValueError(f"pooling ratio must be one of {RATIOS}, got {ratio}")
        starts[ratio] = row
        row += padded // ratio
    return starts, row + SECTION_ROWS


def pool_pyramid(
    k: Tensor, v: Tensor, ratios: Iterable[int], key_length: Tensor | None = None
) -> Pyramid:
    """Pool k, v [B, Hkv, S, D] (any strides, last dim contiguous) over aligned groups of tokens.

    A group's mean counts real keys only: the last group may be short, and keys at or beyond
    key_length[b] (int32 [B], on the device) do not exist. Sums are fp32, the result has k's dtype.
    """
    made = pooling(spec_of(k), spec_of(v), tuple(ratios), key_length is not None)
    both, bias = made(k, v, key_length)
    return Pyramid(both, bias, made.sections)


class Pooling(NamedTuple):
    """What of pooling follows from shapes: those of the pooled keys and values, and of the bias."""

    sections: Sections
    both: tuple[int, int, int, int, int]
    bias: tuple[int, int]
    launch: Launch

    def __call__(self, k: Tensor, v: Tensor, key_length: Tensor | None) -> tuple[Tensor, Tensor]:
        """A Pyramid's `both` and `bias`."""
        device = k.device
        both = torch.empty(*self.both, dtype=k.dtype, device=device)
        bias = torch.empty(*self.bias, dtype=torch.float32, device=device)
        self.launch(k, v, both, bias, key_length)
        return both, bias


@functools.lru_cache(maxsize=256)
def pooling(k: TensorSpec, v: TensorSpec, ratios: tuple[int, ...], has_length: bool) -> Pooling:
    batch, heads, seq, dim = k.shape
    if v.shape != k.shape:
        raise ValueError(f"k and v must have one shape, got {tuple(k.shape)}, {tuple(v.shape)}")
    if k.stride[-1] != 1 or v.stride[-1] != 1:
        raise ValueError("the last dim of k and v must be contiguous")
    starts, rows = section_starts(seq, ratios)
    if not starts:
        raise ValueError("no pooling ratio given")
    tokens = padded_tokens(seq)
    chunks = tokens // (8 * _GROUPS)
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
    sections = Sections(tuple(starts.items()), tokens, rows)
    return Pooling(sections, (2, batch, heads, rows, dim), bias, launch)
