"""Importance from block means: one read of q and k, then a small product of the means."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .score_tiles import cdiv, padded_dim

_NEGATIVE = tl.constexpr(float("-inf"))


@triton.jit
def _block_means_kernel(
    x,
    key_length,
    out,  # fp32 [B, H, blocks, D]
    heads,
    tokens,
    block,
    blocks,
    x_b,
    x_h,
    x_s,
    D: tl.constexpr,
    D_PAD: tl.constexpr,
    TOKENS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
):
    # Heads are neighbours in memory, so neighbouring programs take neighbouring heads.
    head = tl.program_id(0)
    index = tl.program_id(1)
    batch = tl.program_id(2)
    limit = tokens
    if HAS_LENGTH:
        limit = tl.minimum(limit, tl.load(key_length + batch))
    first = index * block
    count = tl.maximum(tl.minimum(block, limit - first), 0)
    d = tl.arange(0, D_PAD)
    t = tl.arange(0, TOKENS)
    base = x + batch.to(tl.int64) * x_b + head.to(tl.int64) * x_h + first.to(tl.int64) * x_s
    total = tl.zeros([TOKENS, D_PAD], tl.float32)
    for start in range(0, count, TOKENS):
        mask = (start + t < count)[:, None] & (d < D)[None, :]
        part = tl.load(base + (start + t)[:, None] * x_s + d[None, :], mask=mask, other=0.0)
        total += part.to(tl.float32)
    mean = tl.sum(total, 0) / tl.maximum(count, 1)
    row = (batch * heads + head).to(tl.int64) * blocks + index
    tl.store(out + row * D + d, mean, mask=d < D)


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
    if x.dim() != 4 or x.stride(3) != 1:
        raise ValueError("need x [B, H, S, D] with a contiguous last dim")
    batch, heads, length, dim = x.shape
    blocks = cdiv(length, block)
    out = torch.empty(batch, heads, blocks, dim, dtype=torch.float32, device=x.device)
    _block_means_kernel[(heads, blocks, batch)](
        x,
        key_length,
        out,
        heads,
        length,
        block,
        blocks,
        x.stride(0),
        x.stride(1),
        x.stride(2),
        D=dim,
        D_PAD=padded_dim(dim),
        TOKENS=tokens,
        HAS_LENGTH=key_length is not None,
        num_warps=warps,
    )
    return out


@triton.jit
def _mean_scores_kernel(
    q_means,
    k_means,
    key_length,
    out,  # fp32 [B, H, m, n]
    heads,
    kv_group,
    m,
    n,
    k_block,
    scale,
    D: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    HAS_LENGTH: tl.constexpr,
):
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
    if (key_length is None) != (k_block is None):
        raise ValueError("key_length and k_block go together")
    batch, heads, m, dim = q_means.shape
    kv_heads, n = k_means.shape[1], k_means.shape[2]
    if heads % kv_heads or k_means.shape[0] != batch or k_means.shape[3] != dim:
        raise ValueError(f"{tuple(q_means.shape)} and {tuple(k_means.shape)} do not match")
    out = torch.empty(batch, heads, m, n, dtype=torch.float32, device=q_means.device)
    _mean_scores_kernel[(cdiv(m, rows), cdiv(n, keys), batch * heads)](
        q_means.contiguous(),
        k_means.contiguous(),
        key_length,
        out,
        heads,
        heads // kv_heads,
        m,
        n,
        k_block or 1,
        scale,
        D=dim,
        DEPTH=min(32, padded_dim(dim)),
        ROWS=rows,
        KEYS=keys,
        HAS_LENGTH=key_length is not None,
        num_warps=warps,
    )
    return out
