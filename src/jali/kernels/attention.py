"""Block-sparse attention over lists of key blocks, read in full or mean-pooled, in one softmax."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .granules import Packing, broadcast_strides, count_below, packing
from .launch import Kind, Launch, capability, kind
from .pooling import RATIOS, Pooling, Pyramid, Sections, pooling
from .row_views import RowView, Tiles, row_view
from .score_tiles import cdiv, power_of_two

_LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Config:
    """How the kernel is cut up; never changes the result beyond rounding.

    `block_m`: most query rows per program. `block_n`: keys per tile of the full-resolution loop; a
    tile wider than a key block gathers several. `pool_n`: rows per tile of the pooled loop.
    `stages`, `pool_stages`: tiles in flight, K and V each. `tma`: read whole key blocks through
    tensor descriptors where strides allow. `max_registers`: cap per thread, to fit a second program
    on a multiprocessor.
    """

    block_m: int = 128
    block_n: int = 64
    pool_n: int = 64
    num_warps: int = 8
    stages: int = 2
    pool_stages: int = 2
    tma: bool = False
    max_registers: int | None = None


def default_config(
    head_dim: int, k_block: int, capability: tuple[int, int], itemsize: int = 2
) -> Config:
    """A configuration that fits the registers and the shared memory of the device.

    Hopper runs two programs per multiprocessor: within one, all warps wait at the same barriers,
    so it takes a second one for the tensor cores to work while the first takes exponentials.
    """
    width = power_of_two(head_dim)
    if itemsize == 4:
        tile = 32 if width <= 128 else 16
        return Config(64 if width <= 64 else tile, tile, tile, 4, 1, 1)
    if capability[0] == 9:
        if width > 128:
            return Config(128, 64, 64, 8, 2, 2, tma=True)
        tile = min(64, k_block)
        if width == 128:
            return Config(128, tile, 64, 8, 2, 2, tma=True, max_registers=128)
        return Config(128, tile, 64, 8, 3, 3, tma=True, max_registers=128)
    if capability[0] == 10:
        tile = 64 if width > 128 else min(128, k_block)
        return Config(128, tile, 64, 8, 2, 2, tma=True)
    if width > 128:
        return Config(64, 32, 32, 4, 2, 2)
    return Config(128, 64, 64, 8, 2, 2)


@triton.jit
def _accumulate(acc, total, p, alpha, v, PRECISION: tl.constexpr):
    total = total * alpha + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision=PRECISION)
    return acc, total


@triton.jit
def _step(acc, total, top, q, k, v, scale, weight, PRECISION: tl.constexpr):
    """One tile of real keys, each standing for 2**weight; `scale` >= 0 is in log2 units.

    Scale and weight ride on the exponent: one multiply-add per logit, and none for the maximum.
    """
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    new_top = tl.maximum(top, tl.max(s, 1) * scale + weight)
    p = tl.exp2(s * scale - (new_top - weight)[:, None])
    acc, total = _accumulate(acc, total, p, tl.exp2(top - new_top), v, PRECISION)
    return acc, total, new_top


@triton.jit
def _step_biased(acc, total, top, q, k, v, scale, bias, PRECISION: tl.constexpr):
    """One tile whose keys carry an additive `bias` in log2 units, -inf for a key that is none."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale + bias[None, :]
    new_top = tl.maximum(top, tl.max(s, 1))
    p = tl.exp2(s - new_top[:, None])
    acc, total = _accumulate(acc, total, p, tl.exp2(top - new_top), v, PRECISION)
    return acc, total, new_top


@triton.jit
def _offsets(rows, stride, offs_d, WIDE: tl.constexpr):
    """Element offsets of whole rows. 32 bits save registers wherever they suffice."""
    if WIDE:
        rows = rows.to(tl.int64)
    return rows[:, None] * stride + offs_d[None, :]


@triton.jit
def _gather(base, rows, stride, offs_d, D: tl.constexpr, BLOCK_D: tl.constexpr, WIDE: tl.constexpr):
    """Rows of a matrix, each D wide, zero-filled to BLOCK_D."""
    at = base + _offsets(rows, stride, offs_d, WIDE)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=(offs_d < D)[None, :], other=0.0)


@triton.jit
def _attention_kernel(
    Q, K, V, Q_DESC, K_DESC, V_DESC, OUT, LSE,
    COUNT, INDEX, ENDS, GRANULES, POOL_K, POOL_V, BIAS, LENGTH, HEAD_ORDER,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os,
    cb, ch, cm, ib, ih, im, eb, eh, em, gb, gh, gm, pb, ph, bb,
    q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, v_row_b, v_row_h, v_col_h,
    seq_q, seq_k, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, GRANULE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, POOL_N: tl.constexpr,
    STAGES: tl.constexpr, POOL_STAGES: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_POOLED: tl.constexpr, EVEN: tl.constexpr,
    HAS_LENGTH: tl.constexpr, HAS_ORDER: tl.constexpr, TMA: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one query block of one head, over everything its lists name.

    Query tiles are the fastest grid axis, so programs that run together share one head's K and V
    in the L2 cache.
    """
    tile_m = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
    if HAS_ORDER:
        h = tl.load(HEAD_ORDER + h)
    h_kv = h // GROUP
    m = tile_m * BLOCK_M // Q_BLOCK
    h64 = h.to(tl.int64)
    h_kv64 = h_kv.to(tl.int64)

    offs_m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    rows_ok = offs_m < seq_q
    q_mask = rows_ok[:, None]
    if D != BLOCK_D:
        q_mask = q_mask & (offs_d < D)[None, :]
    if TMA:
        q_row = (b * q_row_b + h * q_row_h).to(tl.int32) + tile_m * BLOCK_M
        q = Q_DESC.load([q_row, h * q_col_h])
    else:
        q_at = _offsets(offs_m, qs, offs_d, WIDE)
        q = tl.load(Q + b * qb + h64 * qh + q_at, mask=q_mask, other=0.0)

    # A finite start lets a tile without any real key leave the sums untouched, with no NaN.
    top = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)

    length = seq_k
    if HAS_LENGTH:
        length = tl.minimum(tl.load(LENGTH + b), seq_k)

    if HAS_FULL:
        count = tl.load(COUNT + b * cb + h64 * ch + m * cm)
        index = INDEX + b * ib + h64 * ih + m.to(tl.int64) * im
        k_base = K + b * kb + h_kv64 * kh
        v_base = V + b * vb + h_kv64 * vh
        offs_n = tl.arange(0, BLOCK_N)

        # Lists ascend, so blocks that lie wholly inside the length come first, then at most one
        # that straddles it; whatever follows does not exist.
        whole = length // K_BLOCK
        if EVEN:
            full = count
            real = count
        else:
            if HAS_LENGTH:
                full = count_below(index, count, whole, 1024)
            else:
                last = tl.load(index + count - 1, mask=count > 0, other=0)
                full = count - ((count > 0) & (last >= whole)).to(tl.int32)
            next_block = tl.load(index + full, mask=full < count, other=-1)
            straddles = (next_block == whole) & (length % K_BLOCK != 0)
            real = full + straddles.to(tl.int32)

        full_tiles = full * K_BLOCK // BLOCK_N
        # Each index is fetched one tile before its keys are: with the index in a register the
        # pipeliner sees no chain of two loads, and all its stages hold keys.
        if BLOCK_N > K_BLOCK:
            first = offs_n // K_BLOCK
            ahead = tl.load(index + first, mask=first < full, other=0)
        else:
            ahead = tl.load(index, mask=full_tiles > 0, other=0)
        for t in tl.range(0, full_tiles, num_stages=STAGES):
            if BLOCK_N > K_BLOCK:
                rows = ahead * K_BLOCK + offs_n % K_BLOCK
                following = (t + 1) * (BLOCK_N // K_BLOCK) + offs_n // K_BLOCK
                ahead = tl.load(index + following, mask=following < full, other=0)
                k = _gather(k_base, rows, ks, offs_d, D, BLOCK_D, WIDE)
                v = _gather(v_base, rows, vs, offs_d, D, BLOCK_D, WIDE)
            else:
                block = ahead
                following = (t + 1) // (K_BLOCK // BLOCK_N)
                ahead = tl.load(index + following, mask=following < full, other=0)
                row = block * K_BLOCK + (t % (K_BLOCK // BLOCK_N)) * BLOCK_N
                if TMA:
                    k_row = (b * k_row_b + h_kv * k_row_h).to(tl.int32) + row
                    v_row = (b * v_row_b + h_kv * v_row_h).to(tl.int32) + row
                    k = K_DESC.load([k_row, h_kv * k_col_h])
                    v = V_DESC.load([v_row, h_kv * v_col_h])
                else:
                    row64 = row.to(tl.int64)
                    k = _gather(k_base + row64 * ks, offs_n, ks, offs_d, D, BLOCK_D, False)
                    v = _gather(v_base + row64 * vs, offs_n, vs, offs_d, D, BLOCK_D, False)
            acc, total, top = _step(acc, total, top, q, k, v, scale, 0.0, PRECISION)

        if not EVEN or BLOCK_N > K_BLOCK:
            # At most max(2, K_BLOCK / BLOCK_N) tiles: what does not fill a tile, and the tail.
            for t in tl.range(full_tiles, tl.cdiv(real * K_BLOCK, BLOCK_N), num_stages=1):
                at = t * BLOCK_N + offs_n
                entry = at // K_BLOCK
                listed = entry < real
                block = tl.load(index + entry, mask=listed, other=0)
                rows = block * K_BLOCK + at % K_BLOCK
                exists = listed & (rows < length)
                mask = exists[:, None]
                if D != BLOCK_D:
                    mask = mask & (offs_d < D)[None, :]
                k_at = k_base + _offsets(rows, ks, offs_d, WIDE)
                v_at = v_base + _offsets(rows, vs, offs_d, WIDE)
                k = tl.load(k_at, mask=mask, other=0.0)
                v = tl.load(v_at, mask=mask, other=0.0)
                bias = tl.where(exists, 0.0, float("-inf"))
                acc, total, top = _step_biased(acc, total, top, q, k, v, scale, bias, PRECISION)

    if HAS_POOLED:
        ends = ENDS + b * eb + h64 * eh + m.to(tl.int64) * em
        end2 = tl.load(ends)
        end4 = tl.load(ends + 1)
        end8 = tl.load(ends + 2)
        granules = GRANULES + b * gb + h64 * gh + m.to(tl.int64) * gm
        pool_k = POOL_K + b * pb + h_kv64 * ph
        pool_v = POOL_V + b * pb + h_kv64 * ph
        offs_p = tl.arange(0, POOL_N)
        offs_g = offs_p // GRANULE
        ahead_g = tl.load(granules + offs_g, mask=(offs_p >= 0) & (end8 > 0), other=0)
        for t in tl.range(0, end8, num_stages=POOL_STAGES):
            rows = ahead_g * GRANULE + offs_p % GRANULE
            following_g = granules + (t + 1) * (POOL_N // GRANULE) + offs_g
            ahead_g = tl.load(following_g, mask=(offs_p >= 0) & (t + 1 < end8), other=0)
            k = _gather(pool_k, rows, D, offs_d, D, BLOCK_D, WIDE)
            v = _gather(pool_v, rows, D, offs_d, D, BLOCK_D, WIDE)
            weight = 1.0 + (t >= end2).to(tl.float32) + (t >= end4).to(tl.float32)
            acc, total, top = _step(acc, total, top, q, k, v, scale, weight, PRECISION)

        for t in tl.range(end8, tl.load(ends + 3), num_stages=1):
            granule = tl.load(granules + t * (POOL_N // GRANULE) + offs_g)
            rows = granule * GRANULE + offs_p % GRANULE
            k = _gather(pool_k, rows, D, offs_d, D, BLOCK_D, WIDE)
            v = _gather(pool_v, rows, D, offs_d, D, BLOCK_D, WIDE)
            bias = tl.load(BIAS + b * bb + rows)
            acc, total, top = _step_biased(acc, total, top, q, k, v, scale, bias, PRECISION)

    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    out = acc * (1.0 / norm)[:, None]
    o_at = _offsets(offs_m, os, offs_d, WIDE)
    tl.store(OUT + b * ob + h64 * oh + o_at, out.to(OUT.dtype.element_ty), mask=q_mask)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(norm)) * 0.6931471805599453)
    lse_at = (b * tl.num_programs(1) + h) * seq_q + offs_m
    tl.store(LSE + lse_at, lse, mask=rows_ok)


_Views = tuple[RowView, RowView, RowView]


def _views(q: Kind, k: Kind, v: Kind) -> _Views | None:
    """Views of q, k and v for tensor descriptors; None where one of them has none."""
    dim = q.shape[3]
    q_view, k_view, v_view = row_view(q), row_view(k), row_view(v)
    if dim & (dim - 1) or q_view is None or k_view is None or v_view is None:
        return None
    return q_view, k_view, v_view


def _fit(config: Config, q_block: int, k_block: int, views: _Views | None) -> Config:
    """Narrow a configuration to what the blocks and strides of this call allow.

    Query tiles must not straddle query blocks; key tiles hold whole key blocks or divide one.
    """
    block_m = min(config.block_m, q_block & -q_block)
    divisor = k_block & -k_block
    block_n = min(config.block_n, divisor) if divisor != k_block else config.block_n
    tma = config.tma and block_n <= k_block and views is not None
    # Tensor-core instructions take 64 rows per four warps, so fewer rows cannot feed eight.
    num_warps = config.num_warps if block_m >= 128 else min(config.num_warps, 4)
    return replace(config, block_m=block_m, block_n=block_n, num_warps=num_warps, tma=tma)


Listed = tuple[tuple[int, Kind, Kind], ...]


def _check(
    q: Kind, k: Kind, v: Kind, lists: Listed, q_block: int, k_block: int, key_length: Kind | None
) -> None:
    batch, heads, seq_q, dim = q.shape
    if k.shape != v.shape or k.shape[0] != batch or k.shape[3] != dim or heads % k.shape[1]:
        raise ValueError(
            f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"q, k and v must have one dtype, got {q.dtype}, {k.dtype}, {v.dtype}")
    if any(x.stride[-1] != 1 for x in (q, k, v)):
        raise ValueError("the last dim of q, k and v must be contiguous")
    if not 16 <= dim <= 256:
        raise ValueError(f"head dim must be in 16..256, got {dim}")
    if q_block % 16 or k_block % 16 or q_block < 16 or k_block < 16:
        raise ValueError(f"blocks must be multiples of 16, got {q_block} and {k_block}")
    if key_length is not None and (key_length.shape != (batch,) or key_length.dtype != torch.int32):
        raise ValueError(
            f"key_length must be int32 [{batch}], got {key_length.dtype} {list(key_length.shape)}"
        )
    if not lists:
        raise ValueError("no list of key blocks given")
    rows = cdiv(seq_q, q_block)
    for ratio, counts, indices in lists:
        if ratio != 1 and (ratio not in RATIOS or k_block % ratio):
            raise ValueError(f"ratio {ratio} must be 1 or one of {RATIOS} and divide {k_block}")
        if counts.dtype != torch.int32 or indices.dtype != torch.int32:
            raise ValueError(f"lists must be int32, got {counts.dtype}, {indices.dtype}")
        if counts.shape != indices.shape[:3] or counts.shape[2] != rows:
            raise ValueError(
                f"ratio {ratio}: need counts [B, H, {rows}] and indices [B, H, {rows}, W], got "
                f"{tuple(counts.shape)} and {tuple(indices.shape)}"
            )
        if counts.shape[0] not in (1, batch) or counts.shape[1] not in (1, heads):
            raise ValueError(f"ratio {ratio}: {tuple(counts.shape)} does not broadcast to q")
        if indices.stride[3] != 1 and indices.shape[3] > 1:
            raise ValueError(f"ratio {ratio}: the last dim of indices must be contiguous")


def _fitted(
    q: Kind, k: Kind, v: Kind, lists: Listed, q_block: int, k_block: int,
    key_length: Kind | None, config: Config | None,
) -> tuple[Config, _Views | None]:  # fmt: skip
    """The configuration of a checked call, and its views where they are to be read through."""
    _check(q, k, v, lists, q_block, k_block, key_length)
    if config is None:
        config = default_config(q.shape[3], k_block, capability(q.device), q.itemsize)
    views = _views(q, k, v) if config.tma else None
    config = _fit(config, q_block, k_block, views)
    return config, views if config.tma else None


def block_sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lists: Mapping[int, tuple[Tensor, Tensor]],
    q_block: int,
    k_block: int,
    scale: float,
    key_length: Tensor | None = None,
    config: Config | None = None,
    *,
    head_order: Tensor | None = None,
    pyramid: Pyramid | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from q [B, H, Sq, D] to the key blocks of k, v [B, Hkv, Sk, D] that `lists` names.

    `lists` maps a ratio to (counts int32 [B|1, H|1, M], indices int32 [B|1, H|1, M, W]): the key
    blocks each query block reads, ascending, only the first `counts` of them valid. Ratio 1 reads
    the keys themselves; ratios 2, 4, 8 read means of that many keys, each weighing as many keys as
    it stands for: logit = q·k̄·scale + ln(real keys behind k̄). One softmax runs over all of them.
    Keys at or beyond key_length[b] (int32 [B] on the device) do not exist.

    `head_order` int32 [H]: the order in which heads start (heavy ones first balances the load).
    `pyramid`: the pooled k and v, where the caller has them already.

    Returns out, q's dtype and memory order, and the natural log-sum-exp, fp32 [B, H, Sq]. A row
    without any real key gives 0 and -inf. Never waits for the device.
    """
    if scale < 0:
        q, scale = -q, -scale
    listed = tuple(
        (ratio, kind(counts), kind(indices)) for ratio, (counts, indices) in lists.items()
    )
    call = _prepared(
        kind(q), kind(k), kind(v), listed, q_block, k_block, scale,
        None if key_length is None else kind(key_length), head_order is not None, config,
        None if pyramid is None else pyramid.sections(ratio for ratio in lists if ratio != 1),
    )  # fmt: skip
    out = q.new_empty(call.out)
    if call.swapped:
        out = out.transpose(1, 2)
    lse = torch.empty(*q.shape[:3], dtype=torch.float32, device=q.device)
    pooled: tuple[Tensor | None, ...] = (None,) * 5
    if call.packing is not None:
        if pyramid is None:
            assert call.pooling is not None
            pyramid = call.pooling(k, v, key_length)
        granules = call.packing(lists, key_length)
        pooled = granules.ends, granules.ids, pyramid.k, pyramid.v, pyramid.bias
    matrices: tuple[Any, ...] = (None, None, None)
    if call.tiles is not None:
        matrices = call.tiles[0].of(q), call.tiles[1].of(k), call.tiles[2].of(v)
    call.launch(
        q, k, v, *matrices, out, lse, *lists.get(1, (None, None)), *pooled, key_length, head_order,
    )  # fmt: skip
    return out, lse


class _Prepared(NamedTuple):
    """What of a call follows from its shapes. `out`: the output's memory, BSHD where `swapped`."""

    out: tuple[int, ...]
    swapped: bool
    pooling: Pooling | None
    packing: Packing | None
    tiles: tuple[Tiles, ...] | None
    launch: Launch


@functools.lru_cache(maxsize=256)
def _prepared(
    q: Kind, k: Kind, v: Kind, lists: Listed, q_block: int, k_block: int, scale: float,
    key_length: Kind | None, has_order: bool, config: Config | None, given: Sections | None,
) -> _Prepared:  # fmt: skip
    """`given`: where a pyramid that is there already has what the lists ask for."""
    cfg, views = _fitted(q, k, v, lists, q_block, k_block, key_length, config)
    batch, heads, seq, dim = q.shape
    swapped = heads > 1 and q.stride[1] < q.stride[2]
    out_stride = (heads * seq * dim, dim, heads * dim) if swapped else (
        heads * seq * dim, seq * dim, dim
    )  # fmt: skip
    pool, packed, sections = None, None, given
    asked = {ratio: (counts, indices) for ratio, counts, indices in lists if ratio != 1}
    if asked:
        if sections is None:
            pool = pooling(k, v, tuple(asked), key_length is not None)
            sections = pool.sections
        kinds = tuple((ratio, *asked[ratio]) for ratio, _ in sections.starts)
        lengths = None if key_length is None else key_length.shape[0]
        packed = packing(kinds, sections, k_block, cfg.pool_n, k.shape[2], lengths)
    launch = _launch(
        q, k, v, out_stride, lists, packed, sections, q_block, k_block, scale,
        key_length is not None, has_order, cfg, views,
    )  # fmt: skip
    tiles = None
    if views is not None:
        rows_of = (cfg.block_m, cfg.block_n, cfg.block_n)
        tiles = tuple(
            view.tiles(rows, dim, q.dtype) for view, rows in zip(views, rows_of, strict=True)
        )
    memory = (batch, seq, heads, dim) if swapped else (batch, heads, seq, dim)
    return _Prepared(memory, swapped, pool, packed, tiles, launch)


def _launch(
    q: Kind, k: Kind, v: Kind, out_stride: tuple[int, int, int], lists: Listed,
    packed: Packing | None, sections: Sections | None, q_block: int, k_block: int, scale: float,
    has_length: bool, has_order: bool, cfg: Config, views: _Views | None,
) -> Launch:  # fmt: skip
    batch, heads, seq_q, dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    none3 = (0, 0, 0)
    list_strides: tuple[int, ...] = none3 * 2
    for ratio, counts, indices in lists:
        if ratio == 1:
            list_strides = broadcast_strides(counts) + broadcast_strides(indices)
    pool_strides: tuple[int, ...] = none3 * 3
    reach = max(
        seq_q * q.stride[2], seq_k * k.stride[2], seq_k * v.stride[2], seq_q * out_stride[2]
    )
    if packed is not None and sections is not None:
        pool_strides = _contiguous_strides(packed.ends) + _contiguous_strides(packed.ids)
        (_, kv_heads, rows, _), bias = sections.shape, sections.bias
        pool_strides += (kv_heads * rows * dim, rows * dim, 0 if bias[0] == 1 else bias[1])
        reach = max(reach, rows * dim)
    view_strides: tuple[int, ...] = none3 * 3
    if views is not None:
        view_strides = tuple(n for view in views for n in (view.row_b, view.row_h, view.col_h))
    numbers = (
        *q.stride[:3], *k.stride[:3], *v.stride[:3], *out_stride,
        *list_strides, *pool_strides, *view_strides, seq_q, seq_k, scale * _LOG2_E,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "GROUP": heads // heads_kv,
        "D": dim,
        "BLOCK_D": power_of_two(dim),
        "Q_BLOCK": q_block,
        "K_BLOCK": k_block,
        "GRANULE": 1 if packed is None else packed.size,
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "POOL_N": cfg.pool_n,
        "STAGES": cfg.stages,
        "POOL_STAGES": cfg.pool_stages,
        "HAS_FULL": any(ratio == 1 for ratio, _, _ in lists),
        "HAS_POOLED": packed is not None,
        "EVEN": not has_length and seq_k % k_block == 0,
        "HAS_LENGTH": has_length,
        "HAS_ORDER": has_order,
        "TMA": cfg.tma,
        "WIDE": reach >= 2**31,
        "PRECISION": "tf32x3" if q.dtype == torch.float32 else "tf32",
        "num_warps": cfg.num_warps,
        "num_stages": cfg.stages,
    }
    if cfg.max_registers is not None:
        constants["maxnreg"] = cfg.max_registers
    grid = (cdiv(seq_q, cfg.block_m), heads, batch)
    return Launch(_attention_kernel, grid, numbers, constants)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """As `broadcast_strides`, of a contiguous tensor."""
    batch, heads, rows, width = shape
    per_head = rows * width
    return 0 if batch == 1 else heads * per_head, 0 if heads == 1 else per_head, width
