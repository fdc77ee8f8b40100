"""Block-sparse attention over lists of key blocks, read in full or mean-pooled, in one softmax."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jali.kernels.lists import MEAN, Lists

from .attention_kernel import attention_kernel
from .descriptor import DescriptorTemplate, MatrixView, matrix_view
from .launch import Launch, TensorSpec, capability, spec_of
from .list_view import NO_LIST, ListsSpec, ListView, list_tensors, list_views, lists_spec
from .page_table import PageTableLaunch, page_table_launch
from .pooling import RATIOS, PoolLaunch, pool_launch
from .score_means import block_means
from .score_tiles import cdiv, power_of_two, precision

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


_Views = tuple[MatrixView, MatrixView, MatrixView]


def _views(q: TensorSpec, k: TensorSpec, v: TensorSpec) -> _Views | None:
    """Views of q, k and v for tensor descriptors; None where one of them has none."""
    dim = q.shape[3]
    q_view, k_view, v_view = matrix_view(q), matrix_view(k), matrix_view(v)
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


def _check(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, lists: Mapping[int, ListView], q_block: int,
    k_block: int, key_length: TensorSpec | None,
) -> None:  # fmt: skip
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
    for ratio, view in lists.items():
        if ratio not in (1, MEAN) and (ratio not in RATIOS or k_block % ratio):
            raise ValueError(f"ratio {ratio} must be 1 or one of {RATIOS} and divide {k_block}")
        some_batch, some_heads, some_rows, _ = view.shape
        fits = some_batch in (1, batch) and some_heads in (1, heads) and some_rows == rows
        if not fits:
            raise ValueError(
                f"ratio {ratio}: need lists for [{batch} or 1, {heads} or 1, {rows}] query blocks, "
                f"got {list(view.shape[:3])}"
            )


def _fit_call(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, lists: Mapping[int, ListView], q_block: int,
    k_block: int, key_length: TensorSpec | None, config: Config | None,
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
    lists: Lists,
    q_block: int,
    k_block: int,
    scale: float,
    key_length: Tensor | None = None,
    config: Config | None = None,
    *,
    ratios: tuple[int, ...] | None = None,
    add_to: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend from q [B, H, Sq, D] to the key blocks of k, v [B, Hkv, Sk, D] that `lists` names.

    `ratios` says which of the lists are read (None: all). Ratio 1 reads the keys themselves; ratios
    2, 4, 8 read means of that many keys, and MEAN a block as one, each weighing as many keys as it
    stands for: logit = q·k̄·scale + ln(real keys behind k̄). One softmax runs over all of them. Keys
    at or beyond key_length[b] (int32 [B] on the device) do not exist.

    Returns out, q's dtype and memory order, and the natural log-sum-exp, fp32 [B, H, Sq]. A row
    without any real key gives 0 and -inf. Never waits for the device.

    `add_to`: output (any strides, the last dim contiguous) and log-sum-exp (contiguous) of an
    attention over other keys; both are overwritten with those over all keys, and returned.
    """
    if scale < 0:
        q, scale = -q, -scale
    call = _prepare(
        spec_of(q), spec_of(k), spec_of(v), lists_spec(lists), q_block, k_block, scale,
        None if key_length is None else spec_of(key_length), ratios,
        None if add_to is None else _output_spec(*add_to), config,
    )  # fmt: skip
    if add_to is None:
        out = q.new_empty(call.out)
        if call.swapped:
            out = out.transpose(1, 2)
        lse = torch.empty(*q.shape[:3], dtype=torch.float32, device=q.device)
    else:
        out, lse = add_to
    q_matrix = None if call.q_tiles is None else call.q_tiles.bind(q)
    k_matrix, v_matrix = None, None
    if call.kv_tiles is not None:
        k_matrix, v_matrix = call.kv_tiles[0].bind(k), call.kv_tiles[1].bind(v)
    full: tuple[Tensor | None, ...] = list_tensors(lists, 1) if call.has_full else (None, None)
    pooled: tuple[Tensor | None, ...] = (None, None, None)
    means: tuple[Tensor | None, ...] = (None, None, None, None)
    if call.has_means:
        blocks = (block_means(x, k_block, key_length) for x in (k, v))
        means = *list_tensors(lists, MEAN), *blocks
    if call.pool is not None and call.pages is not None:
        pooled = call.pages(lists, key_length), *call.pool(k, v, key_length)
    call.launch(
        q, k, v, q_matrix, k_matrix, v_matrix, out, lse, *full, *pooled, *means, key_length
    )  # fmt: skip
    return out, lse


class _AttentionLaunches(NamedTuple):
    """How an attention is made: its launches, and `out`, the shape of its memory, BSHD where
    `swapped`."""

    out: tuple[int, ...]
    swapped: bool
    has_full: bool
    has_means: bool
    pool: PoolLaunch | None
    pages: PageTableLaunch | None
    q_tiles: DescriptorTemplate | None
    kv_tiles: tuple[DescriptorTemplate, DescriptorTemplate] | None
    launch: Launch


@functools.lru_cache(maxsize=256)
def _prepare(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, lists: ListsSpec, q_block: int, k_block: int,
    scale: float, key_length: TensorSpec | None, ratios: tuple[int, ...] | None,
    add_to: _OutputSpec | None, config: Config | None,
) -> _AttentionLaunches:  # fmt: skip
    of = {r: view for r, view in list_views(lists).items() if ratios is None or r in ratios}
    cfg, views = _fit_call(q, k, v, of, q_block, k_block, key_length, config)
    batch, heads, seq, dim = q.shape
    swapped = heads > 1 and q.stride[1] < q.stride[2]
    out_stride: tuple[int, ...] = (heads * seq * dim, dim, heads * dim) if swapped else (
        heads * seq * dim, seq * dim, dim
    )  # fmt: skip
    if add_to is not None:
        _check_add_to(q, add_to)
        out_stride = add_to[1][:3]
    pool, pages = None, None
    pooled = tuple(sorted((ratio, view) for ratio, view in of.items() if ratio in RATIOS))
    if pooled:
        pool = pool_launch(k, v, tuple(ratio for ratio, _ in pooled), key_length is not None)
        lengths = None if key_length is None else key_length.shape[0]
        pages = page_table_launch(pooled, pool.sections, k_block, cfg.pool_n, k.shape[2], lengths)
    launch = _launch(
        q, k, v, out_stride, of.get(1), of.get(MEAN), pool, pages, q_block, k_block, scale,
        key_length is not None, add_to is not None, cfg, views,
    )  # fmt: skip
    q_tiles, kv_tiles = None, None
    if views is not None:
        q_tiles = views[0].template(cfg.block_m, dim, q.dtype)
        if 1 in of:  # what is pooled has no use for them
            k_tiles, v_tiles = (view.template(cfg.block_n, dim, q.dtype) for view in views[1:])
            kv_tiles = k_tiles, v_tiles
    memory = (batch, seq, heads, dim) if swapped else (batch, heads, seq, dim)
    return _AttentionLaunches(
        memory, swapped, 1 in of, MEAN in of, pool, pages, q_tiles, kv_tiles, launch
    )


_Shape = tuple[int, ...]
_OutputSpec = tuple[_Shape, _Shape, torch.dtype, _Shape, bool, torch.dtype]


def _output_spec(out: Tensor, lse: Tensor) -> _OutputSpec:
    """What a launch depends on of an output and its log-sum-exp that are to be added to."""
    return out.shape, out.stride(), out.dtype, lse.shape, lse.is_contiguous(), lse.dtype


def _check_add_to(q: TensorSpec, add_to: _OutputSpec) -> None:
    shape, stride, dtype, lse, contiguous, lse_dtype = add_to
    if shape != q.shape or dtype != q.dtype or stride[3] != 1:
        raise ValueError(
            f"an attention to add to is {q.dtype} {list(q.shape)}, its last dim contiguous; got "
            f"{dtype} {list(shape)}"
        )
    if lse != q.shape[:3] or not contiguous or lse_dtype != torch.float32:
        raise ValueError(
            f"its log-sum-exp is fp32 {list(q.shape[:3])}, contiguous; got {lse_dtype} {list(lse)}"
        )


def _launch(
    q: TensorSpec, k: TensorSpec, v: TensorSpec, out_stride: tuple[int, ...], full: ListView | None,
    means: ListView | None, pool: PoolLaunch | None, pages: PageTableLaunch | None, q_block: int,
    k_block: int, scale: float, has_length: bool, add_to: bool, cfg: Config, views: _Views | None,
) -> Launch:  # fmt: skip
    batch, heads, seq_q, dim = q.shape
    heads_kv, seq_k = k.shape[1:3]
    pool_numbers: tuple[int, ...] = (0,) * 7
    largest_offset = max(
        seq_q * q.stride[2], seq_k * k.stride[2], seq_k * v.stride[2], seq_q * out_stride[2]
    )
    if pool is not None and pages is not None:
        per_head = pool.sections.rows * dim
        values_at = batch * heads_kv * per_head
        bias_step = 0 if pool.bias[0] == 1 else pool.bias[1]
        pool_numbers = (
            *_contiguous_steps(pages.table), values_at, heads_kv * per_head, per_head, bias_step,
        )  # fmt: skip
        largest_offset = max(largest_offset, per_head)
    view_strides: tuple[int, ...] = (0,) * 9
    if views is not None:
        view_strides = tuple(n for view in views for n in (view.row_b, view.row_h, view.col_h))
    numbers = (
        *q.stride[:3], *k.stride[:3], *v.stride[:3], *out_stride,
        *(NO_LIST if full is None else full.numbers), *pool_numbers,
        *(NO_LIST if means is None else means.numbers), *view_strides,
        seq_q, seq_k, scale * _LOG2_E,
    )  # fmt: skip
    constants: dict[str, Any] = {
        "GROUP": heads // heads_kv,
        "D": dim,
        "BLOCK_D": power_of_two(dim),
        "Q_BLOCK": q_block,
        "K_BLOCK": k_block,
        "PAGE": 1 if pages is None else pages.size,
        "BLOCK_M": cfg.block_m,
        "BLOCK_N": cfg.block_n,
        "POOL_N": cfg.pool_n,
        "STAGES": cfg.stages,
        "POOL_STAGES": cfg.pool_stages,
        "HAS_FULL": full is not None,
        "HAS_POOLED": pages is not None,
        "HAS_MEANS": means is not None,
        "EVEN": not has_length and seq_k % k_block == 0,
        "HAS_LENGTH": has_length,
        "ADD_TO": add_to,
        "TMA": cfg.tma,
        "INT64": largest_offset >= 2**31,
        "PRECISION": precision(q.dtype),
        "num_warps": cfg.num_warps,
        "num_stages": cfg.stages,
    }
    if cfg.max_registers is not None:
        constants["maxnreg"] = cfg.max_registers
    grid = (cdiv(seq_q, cfg.block_m), heads, batch)
    return Launch(attention_kernel, grid, numbers, constants)


def _contiguous_steps(shape: tuple[int, ...]) -> tuple[int, int, int]:
    """How far the next sample, head and row are in a contiguous tensor; 0 where one serves all."""
    batch, heads, rows, width = shape
    per_head = rows * width
    return 0 if batch == 1 else heads * per_head, 0 if heads == 1 else per_head, width
