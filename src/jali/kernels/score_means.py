"""Importance from block means: one read of q and k, then a small product of the means."""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launch, TensorSpec, spec_of
from .score_tiles import cdiv, padded_dim

_NEGATIVE = tl.constexpr(float("-inf"))


@triton.jit
def _write_mean(
    tokens,  # the first token of the block, one head
    stride, count,
    out,  # fp32 [D]
    BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Mean of the first `count` of BLOCK tokens; zeros if there is none."""
    d = tl.arange(0, D_PAD)
    t = tl.arange(0, TOKENS)
    at = tokens + t[:, None] * stride + d[None, :]
    total = tl.zeros([TOKENS, D_PAD], tl.float32)
    if D == D_PAD and BLOCK % TOKENS == 0 and count == BLOCK:
        # Neither masks nor a trip count to wait for: all reads of a block are in flight at once.
        for start in tl.static_range(0, BLOCK, TOKENS):
            total += tl.load(at + start * stride).to(tl.float32)
    else:
        for start in range(0, count, TOKENS):
            mask = (start + t < count)[:, None] & (d < D)[None, :]
            total += tl.load(at + start * stride, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + d, tl.sum(total, 0) / tl.maximum(count, 1), mask=d < D)


@triton.jit
def _block_means_kernel(
    q,
    k,  # unused without K_BLOCK
    key_length,
    q_out,  # fp32 [B, H, q_blocks, D]
    k_out,  # fp32 [B, Hkv, k_blocks, D]
    q_heads, k_heads, q_tokens, k_tokens, q_blocks, k_blocks,
    q_b, q_h, q_s, k_b, k_h, k_s,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, D: tl.constexpr, D_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    Q_LENGTH: tl.constexpr,  # key_length bounds q: it is the only tensor, and holds keys
    K_LENGTH: tl.constexpr,
):  # fmt: skip
    # Heads are neighbours in memory, so neighbouring programs take neighbouring heads.
    head = tl.program_id(0)
    index = tl.program_id(1)
    batch = tl.program_id(2)
    if index < q_blocks:
        if head < q_heads:
            limit = q_tokens
            if Q_LENGTH:
                limit = tl.minimum(limit, tl.load(key_length + batch))
            first = index * Q_BLOCK
            count = tl.maximum(tl.minimum(Q_BLOCK, limit - first), 0)
            at = q + batch.to(tl.int64) * q_b + head.to(tl.int64) * q_h + first.to(tl.int64) * q_s
            row = (batch * q_heads + head).to(tl.int64) * q_blocks + index
            _write_mean(at, q_s, count, q_out + row * D, Q_BLOCK, D, D_PAD, TOKENS)
    elif K_BLOCK > 0:  # noqa: SIM102 (what the compiler knows comes first)
        if head < k_heads:
            limit = k_tokens
            if K_LENGTH:
                limit = tl.minimum(limit, tl.load(key_length + batch))
            index -= q_blocks
            first = index * K_BLOCK
            count = tl.maximum(tl.minimum(K_BLOCK, limit - first), 0)
            at = k + batch.to(tl.int64) * k_b + head.to(tl.int64) * k_h + first.to(tl.int64) * k_s
            row = (batch * k_heads + head).to(tl.int64) * k_blocks + index
            _write_mean(at, k_s, count, k_out + row * D, K_BLOCK, D, D_PAD, TOKENS)


def block_means(
    x: Tensor,
    block: int,
    key_length: Tensor | None = None,
    *,
    tokens: int = 32,
    warps: int = 4,
) -> Tensor:
    """Mean of the real tokens of every block of `block` tokens: x [B,H,S,D] -> fp32 [B,H,nb,D].

    x may be any strided view with a contiguous last dim. With `key_length` int32 [B] tokens at or
    beyond it do not count; a block without a real token gets zeros. `tokens` (a power of two) are
    read together; it and `warps` tune speed only.
    """
    has_length = key_length is not None
    shape, _, launch = _means_launch(spec_of(x), None, block, 0, has_length, tokens, warps)
    out = torch.empty(*shape, dtype=torch.float32, device=x.device)
    launch(x, None, key_length, out, None)
    return out


def block_mean_pair(
    q: Tensor,
    k: Tensor,
    q_block: int,
    k_block: int,
    key_length: Tensor | None = None,
    *,
    tokens: int = 32,
    warps: int = 2,
) -> tuple[Tensor, Tensor]:
    """`block_means` of q [B,H,Sq,D] and of k [B,Hkv,Sk,D] in one launch; `key_length` bounds k."""
    has_length = key_length is not None
    q_shape, k_shape, launch = _means_launch(
        spec_of(q), spec_of(k), q_block, k_block, has_length, tokens, warps
    )
    q_out = torch.empty(*q_shape, dtype=torch.float32, device=q.device)
    k_out = torch.empty(*k_shape, dtype=torch.float32, device=k.device)
    launch(q, k, key_length, q_out, k_out)
    return q_out, k_out


@functools.lru_cache(maxsize=256)
def _means_launch(
    q: TensorSpec,
    k: TensorSpec | None,
    q_block: int,
    k_block: int,
    has_length: bool,
    tokens: int,
    warps: int,
) -> tuple[tuple[int, ...], tuple[int, ...], Launch]:
    """The shapes of both results and what writes them; without a k, all that is k's is 0."""
    for x in (q, k):
        if x is not None and (len(x.shape) != 4 or x.stride[3] != 1):
            raise ValueError("need x [B, H, S, D] with a contiguous last dim")
    batch, heads, q_len, dim = q.shape
    blocks, kv_heads, k_len, k_blocks, k_stride = cdiv(q_len, q_block), 0, 0, 0, (0, 0, 0)
    if k is not None:
        if k.shape[0] != batch or k.shape[3] != dim or k.dtype != q.dtype:
            raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not belong together")
        kv_heads, k_len = k.shape[1:3]
        k_blocks = cdiv(k_len, k_block)
        k_stride = k.stride[0], k.stride[1], k.stride[2]
    numbers = (
        heads, kv_heads, q_len, k_len, blocks, k_blocks, *q.stride[:3], *k_stride,
    )  # fmt: skip
    constants = {
        "Q_BLOCK": q_block,
        "K_BLOCK": k_block,
        "D": dim,
        "D_PAD": padded_dim(dim),
        "TOKENS": tokens,
        "Q_LENGTH": has_length and k is None,
        "K_LENGTH": has_length and k is not None,
        "num_warps": warps,
    }
    grid = (max(heads, kv_heads), blocks + k_blocks, batch)
    return (
        (batch, heads, blocks, dim),
        (batch, kv_heads, k_blocks, dim),
        Launch(_block_means_kernel, grid, numbers, constants),
    )


@triton.jit
def _mean_scores_kernel(
    q_means, k_means, key_length,
    out,  # fp32 [B, H, m, n]
    heads, kv_group, m, n, k_block, scale,
    D: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * KEYS + tl.arange(0, KEYS)
    slot = tl.program_id(2)
    batch = slot // heads
    kv = batch * (heads // kv_group) + (slot % heads) // kv_group
    q_rows = q_means + (slot.to(tl.int64) * m + row)[:, None] * D
    k_rows = k_means + (kv.to(tl.int64) * n + column)[:, None] * D
    score = tl.zeros([ROWS, KEYS], tl.float32)
    for start in range(0, D, DEPTH):
        d = start + tl.arange(0, DEPTH)
        a = tl.load(q_rows + d[None, :], mask=(row < m)[:, None] & (d < D)[None, :], other=0.0)
        b = tl.load(k_rows + d[None, :], mask=(column < n)[:, None] & (d < D)[None, :], other=0.0)
        score = tl.dot(a, tl.trans(b), score, input_precision="tf32x3")
    score *= scale
    if HAS_LENGTH:
        real = column * k_block < tl.load(key_length + batch)
        score = tl.where(real[None, :], score, _NEGATIVE)
    at = out + (slot.to(tl.int64) * m + row)[:, None] * n + column[None, :]
    tl.store(at, score, mask=(row < m)[:, None] & (column < n)[None, :])


def mean_scores(
    q_means: Tensor,
    k_means: Tensor,
    scale: float,
    key_length: Tensor | None = None,
    k_block: int | None = None,
    *,
    rows: int = 64,
    keys: int = 64,
    warps: int = 4,
) -> Tensor:
    """Scaled dot products of block means: [B,H,M,D] x [B,Hkv,N,D] -> fp32 [B,H,M,N].

    Both inputs fp32 and contiguous, as `block_means` returns them. With `key_length` (which needs
    `k_block`) key blocks without a real token score -inf. No softmax: it would not change the rank.
    """
    shape, launch = _scores_launch(
        q_means.shape, k_means.shape, scale, key_length is not None, k_block, rows, keys, warps
    )
    out = torch.empty(*shape, dtype=torch.float32, device=q_means.device)
    launch(q_means.contiguous(), k_means.contiguous(), key_length, out)
    return out


@functools.lru_cache(maxsize=256)
def _scores_launch(
    q_shape: tuple[int, ...], k_shape: tuple[int, ...], scale: float, has_length: bool,
    k_block: int | None, rows: int, keys: int, warps: int,
) -> tuple[tuple[int, ...], Launch]:  # fmt: skip
    if has_length != (k_block is not None):
        raise ValueError("key_length and k_block go together")
    batch, heads, m, dim = q_shape
    kv_heads, n = k_shape[1], k_shape[2]
    if heads % kv_heads or k_shape[0] != batch or k_shape[3] != dim:
        raise ValueError(f"{tuple(q_shape)} and {tuple(k_shape)} do not match")
    constants = {
        "D": dim,
        "DEPTH": min(32, padded_dim(dim)),
        "ROWS": rows,
        "KEYS": keys,
        "HAS_LENGTH": has_length,
        "num_warps": warps,
    }
    grid = (cdiv(m, rows), cdiv(n, keys), batch * heads)
    numbers = (heads, heads // kv_heads, m, n, k_block or 1, scale)
    return (batch, heads, m, n), Launch(_mean_scores_kernel, grid, numbers, constants)
