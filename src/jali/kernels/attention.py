"""Block-sparse attention over lists of key blocks, read in full or mean-pooled, in one softmax."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .attention_kernel import attention_kernel
from .granules import Packing, broadcast_strides, packing
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
    return Launch(attention_kernel, grid, numbers, constants)


def _contiguous_strides(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """As `broadcast_strides`, of a contiguous tensor."""
    batch, heads, rows, width = shape
    per_head = rows * width
    return 0 if batch == 1 else heads * per_head, 0 if heads == 1 else per_head, width
