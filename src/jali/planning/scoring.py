"""How important a key block is to a query block, by four published estimates.

All scores are fp32 (fp64 for fp64 input), [B, H, M, N], over real keys only. Work goes in chunks:
nothing of size S × S, nor of size samples × S, is ever held at once. On a GPU the Triton kernels
take over; the code here is what they are measured against.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from jali import kernels
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

CHUNK_BYTES = 4 * 2**20


def at_least_fp32(x: Tensor) -> Tensor:
    """At least fp32: rounding in scores would turn into ties."""
    return x if x.dtype == torch.float64 else x.float()


def use_kernels(
    q: Tensor, k: Tensor, scale: float, padding: KeyPadding | None, causal: bool
) -> bool:
    """Whether the Triton kernels can score this."""
    if not kernels.available(q.device) or q.dtype == torch.float64 or causal or scale <= 0:
        return False
    if padding is not None and padding.mask is not None:
        return False
    return q.stride()[3] == 1 == k.stride()[3] and 16 <= q.shape[3] <= 256


def _length(padding: KeyPadding | None) -> Tensor | None:
    return None if padding is None else padding.length


@functools.lru_cache(maxsize=64)
def sample_positions(tokens: int, block: int, per_block: int, device: torch.device) -> Tensor:
    """Evenly spread token indices of each block, int64 [blocks, per_block].

    Sample i of a block of n real tokens lies at (i + ½)·n / per_block.
    """
    start = torch.arange(0, tokens, block, device=device)
    size = (tokens - start).clamp_max(block)
    half_steps = 2 * torch.arange(per_block, device=device) + 1
    return start[:, None] + half_steps * size[:, None] // (2 * per_block)


def sampled_scores(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    scale: float,
    positions: Tensor,
    padding: KeyPadding | None = None,
    causal: bool = False,
) -> Tensor:
    """Softmax mass of each key block, averaged over the sampled queries of each query block.

    positions int64 [M, P]. Every row sums to 1 (to 0 where no key is real).
    """
    if use_kernels(q, k, scale, padding, causal):
        q_block, k_block = layout.blocks.q, layout.blocks.k
        return kernels.load("scores").sampled_scores(
            q, k, q_block, k_block, scale, positions, _length(padding)
        )
    B, H, _, _ = q.shape
    M, P = positions.shape
    samples = at_least_fp32(q[:, :, positions.flatten()]) * scale
    hidden = None if padding is None else ~padding.valid(layout.k.tokens)[:, None, None]
    keys = at_least_fp32(k)
    key = torch.arange(layout.k.tokens, device=q.device)
    out = samples.new_empty(B, H, M, layout.N)
    for rows in chunks(M, B * H * P * layout.k.tokens * samples.element_size()):
        part = samples[:, :, rows.start * P : rows.stop * P]
        logits = products(part, keys)
        if causal:
            assert layout.offset is not None
            ahead = key > positions[rows].flatten()[:, None] + layout.offset
            logits.masked_fill_(ahead, -torch.inf)
        if hidden is not None:
            logits.masked_fill_(hidden, -torch.inf)
        mass = block_sums(guarded_softmax(logits, hidden is not None), layout.blocks.k)
        out[:, :, rows] = mass.unflatten(2, (-1, P)).mean(3)
    return out


def block_means(x: Tensor, block: int, valid: Tensor | None = None) -> Tensor:
    """Mean over the real tokens of each block. [B, H, S, D] -> [B, H, blocks, D]."""
    x = at_least_fp32(x)
    if valid is not None:
        x = x.masked_fill(~valid[:, None, :, None], 0)
    S = x.shape[2]
    whole = S // block
    sums = x[:, :, : whole * block].unflatten(2, (whole, block)).sum(3)
    if S % block:
        sums = torch.cat([sums, x[:, :, whole * block :].sum(2, keepdim=True)], dim=2)
    start = torch.arange(0, S, block, device=x.device)
    if valid is None:
        count = (S - start).clamp_max(block).to(x).view(1, 1, -1, 1)
    else:
        count = block_sums(valid.to(x), block)[:, None, :, None]
    return sums / count.clamp_min(1)


def mean_pair(
    q: Tensor, k: Tensor, layout: BlockLayout, padding: KeyPadding | None = None
) -> tuple[Tensor, Tensor]:
    """Means of query blocks [B, H, M, D] and of the real keys of key blocks [B, Hkv, N, D]."""
    q_block, k_block = layout.blocks.q, layout.blocks.k
    if use_kernels(q, k, 1.0, padding, causal=False):
        found: tuple[Tensor, Tensor] = kernels.load("scores").block_mean_pair(
            q, k, q_block, k_block, _length(padding)
        )
        return found
    valid = padding.valid(layout.k.tokens) if padding is not None else None
    return block_means(q, q_block), block_means(k, k_block, valid)


def mean_scores(
    q: Tensor, k: Tensor, layout: BlockLayout, scale: float, padding: KeyPadding | None = None
) -> Tensor:
    """Scaled products of block means: rf_v2's representative tokens. −inf for padded blocks."""
    q_mean, k_mean = mean_pair(q, k, layout, padding)
    if use_kernels(q, k, scale, padding, causal=False):
        length = _length(padding)
        k_block = None if length is None else layout.blocks.k
        return kernels.load("scores").mean_scores(q_mean, k_mean, scale, length, k_block)
    scores = products(q_mean * scale, k_mean)
    if padding is not None:
        empty = block_sums(padding.valid(layout.k.tokens).float(), layout.blocks.k) == 0
        scores = scores.masked_fill(empty[:, None, None], -torch.inf)
    return scores


def antidiagonal_scores(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    scale: float,
    padding: KeyPadding | None = None,
    stride: int = 8,
    causal: bool = False,
    drop_tail: bool = False,
) -> Tensor:
    """Mass of each key block by antidiagonal sums over stride × stride tiles. Rows sum to 1.

    A short last query group repeats its last token. A key group with missing keys is averaged
    over its real ones and weighs by their number; `drop_tail` ignores the last group instead.
    """
    if use_kernels(q, k, scale, padding, causal) and not drop_tail:
        q_block, k_block = layout.blocks.q, layout.blocks.k
        return kernels.load("scores").antidiagonal_scores(
            q, k, q_block, k_block, scale, stride, key_length=_length(padding)
        )
    groups = -(-layout.q.tokens // stride), -(-layout.k.tokens // stride)
    some = functools.partial(
        _antidiagonal_scores, layout=layout, scale=scale, padding=padding, g=stride,
        causal=causal, drop_tail=drop_tail,
    )  # fmt: skip
    return by_heads(some, q, k, layout, math.prod(groups))


def _antidiagonal_scores(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    scale: float,
    padding: KeyPadding | None,
    g: int,
    causal: bool,
    drop_tail: bool,
) -> Tensor:
    B, H, Sq, _ = q.shape
    token = torch.arange(0, -(-Sq // g) * g, device=q.device).clamp_max(Sq - 1)
    backwards = token.unflatten(0, (-1, g)).flip(1).flatten()
    queries = (
        at_least_fp32(q.index_select(2, backwards)).unflatten(2, (-1, g)).flatten(3)
    )  # [B, H, Gq, g·D]
    queries *= scale / g  # a fresh copy; products are means over g pairs
    keys, weight = _key_groups(k, g, padding, drop_tail)
    groups = -(-layout.blocks.q // g)
    out = queries.new_empty(B, H, layout.M, layout.N)
    for rows in chunks(layout.M, B * H * groups * keys.shape[2] * queries.element_size()):
        first = rows.start * groups
        part = queries[:, :, first : rows.stop * groups]
        logits = products(part, keys)
        if weight is not None:
            logits += weight
        if causal:
            assert layout.offset is not None
            # A key group counts as long as it does not start after the query group's last token.
            row = torch.arange(first, first + part.shape[2], device=q.device)
            end = ((row + 1) * g).clamp_max(Sq) - 1 + layout.offset
            column = torch.arange(keys.shape[2], device=q.device) * g
            logits.masked_fill_(column > end[:, None], -torch.inf)
        mass = block_sums(guarded_softmax(logits, weight is not None), layout.blocks.k // g)
        # Dropped keys may leave the last block without any group: it weighs nothing.
        mass = F.pad(mass, (0, layout.N - mass.shape[-1]))
        count = mass.new_full((rows.stop - rows.start,), groups)
        missing = len(count) * groups - mass.shape[2]
        count[-1] -= missing
        mass = F.pad(mass, (0, 0, 0, missing)).unflatten(2, (-1, groups)).sum(3)
        out[:, :, rows] = mass / count[:, None]
    return out


def peak_scores(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    scale: float,
    q_positions: Tensor,
    k_positions: Tensor,
    padding: KeyPadding | None = None,
    normalised: bool = True,
) -> Tensor:
    """Largest attention weight between sampled queries and sampled keys. Rows sum to 1.

    q_positions [M, P], k_positions [N, Q] (−1: no sample). `normalised` weighs by the softmax
    over the sampled keys; without it each row is only divided by its own peak, so that diffuse
    rows count as much as peaked ones (the surrogate of the original PSA).
    """
    if use_kernels(q, k, scale, padding, causal=False):
        return kernels.load("scores").sampled_peak_scores(
            q,
            k,
            layout.blocks.q,
            layout.blocks.k,
            scale,
            q_positions,
            k_positions,
            _length(padding),
            normalised=normalised,
        )
    some = functools.partial(
        _peak_scores, layout=layout, scale=scale, q_positions=q_positions,
        k_positions=k_positions, padding=padding, normalised=normalised,
    )  # fmt: skip
    return by_heads(some, q, k, layout, q_positions.numel() * k_positions.numel())


def _peak_scores(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    scale: float,
    q_positions: Tensor,
    k_positions: Tensor,
    padding: KeyPadding | None,
    normalised: bool,
) -> Tensor:
    B, H, _, _ = q.shape
    (M, P), (N, Q) = q_positions.shape, k_positions.shape
    queries = at_least_fp32(q.index_select(2, q_positions.flatten())).mul_(scale)
    keys = at_least_fp32(k.index_select(2, k_positions.clamp_min(0).flatten()))
    hidden = (k_positions < 0).flatten()[None]
    if padding is not None:
        hidden = hidden | ~padding.valid(layout.k.tokens)[:, k_positions.clamp_min(0).flatten()]
    out = queries.new_empty(B, H, M, N)
    for rows in chunks(M, B * H * P * N * Q * queries.element_size()):
        logits = products(queries[:, :, rows.start * P : rows.stop * P], keys)
        logits.masked_fill_(hidden[:, None, None], -torch.inf)
        peak = logits.unflatten(-1, (N, Q)).amax(-1)
        row = logits.logsumexp(-1, keepdim=True) if normalised else peak.amax(-1, keepdim=True)
        weight = (peak - row).exp().nan_to_num(0.0)
        out[:, :, rows] = weight.unflatten(2, (-1, P)).amax(3)
    return out / out.sum(-1, keepdim=True).clamp_min(torch.finfo(out.dtype).tiny)


def key_similarity(
    k: Tensor, layout: BlockLayout, ratio: int, padding: KeyPadding | None = None
) -> Tensor:
    """Mean cosine between the first and the last key of every group of `ratio` keys. [B, H, N].

    Only groups of real keys count; a block without one is −1, "not alike".
    """
    keys = at_least_fp32(k)
    groups = keys.shape[2] // ratio
    pairs = keys[:, :, : groups * ratio].unflatten(2, (groups, ratio))
    cosine = torch.cosine_similarity(pairs[..., 0, :], pairs[..., -1, :], dim=-1, eps=1e-6)
    per_block = layout.blocks.k // ratio
    whole = torch.ones_like(cosine[:1, :1], dtype=torch.bool)
    if padding is not None:
        real = padding.valid(layout.k.tokens)[:, None, : groups * ratio]
        whole = real.unflatten(2, (groups, ratio)).all(-1)
        cosine = cosine.masked_fill(~whole, 0)
    count = block_sums(whole.to(cosine), per_block)
    mean = torch.where(count > 0, block_sums(cosine, per_block) / count.clamp_min(1), -1.0)
    return F.pad(mean, (0, layout.N - mean.shape[-1]), value=-1.0)


def _key_groups(
    k: Tensor, g: int, padding: KeyPadding | None, drop_tail: bool
) -> tuple[Tensor, Tensor | None]:
    """Keys in groups of g [B, Hkv, G, g·D], weighed up where some are missing, and the log of each
    group's share of real keys, broadcastable over [B, H, Gq, G]; None where all are real."""
    Sk = k.shape[2]
    whole = Sk // g if drop_tail and Sk >= g else -(-Sk // g)
    keys = at_least_fp32(k)[:, :, : whole * g]
    missing = whole * g - keys.shape[2]
    if padding is None and not missing:
        return keys.unflatten(2, (whole, g)).flatten(3), None
    valid = torch.ones(1, Sk, dtype=torch.bool, device=k.device)
    if padding is not None:
        valid = padding.valid(Sk)
    valid = F.pad(valid[:, : whole * g], (0, missing))
    keys = F.pad(keys, (0, 0, 0, missing))
    keys = keys.masked_fill(~valid[:, None, :, None], 0)
    count = valid.unflatten(1, (whole, g)).sum(-1).to(keys)
    keys = keys.unflatten(2, (whole, g)).flatten(3) * (g / count.clamp_min(1))[:, None, :, None]
    return keys, (count / g).log()[:, None, None]


def by_heads(
    some: Callable[[Tensor, Tensor], Tensor], q: Tensor, k: Tensor, layout: BlockLayout, logits: int
) -> Tensor:
    """Scores of a few heads at a time, by the `logits` of one: what is copied of q and k to score
    all heads would take as much memory as they do."""
    B, H = q.shape[:2]
    each = H // k.shape[1]
    dtype = torch.promote_types(q.dtype, torch.float32)
    out = torch.empty(B, H, layout.M, layout.N, dtype=dtype, device=q.device)
    for kv in chunks(k.shape[1], B * each * logits * dtype.itemsize):
        heads = slice(kv.start * each, kv.stop * each)
        out[:, heads] = some(q[:, heads], k[:, kv])
    return out


def products(q: Tensor, k: Tensor) -> Tensor:
    """q [B, H, R, D] · k [B, Hkv, S, D]ᵀ -> [B, H, R, S], sharing key heads among query heads."""
    B, H, R, D = q.shape
    kv = k.shape[1]
    if kv == H and B > 1 and not k.is_contiguous():
        # Samples and heads of a model's own memory do not make one batch: k would be copied whole.
        out = q.new_empty(B, H, R, k.shape[2])
        for b in range(B):
            torch.matmul(q[b], k[b].mT, out=out[b])
        return out
    if kv == H:
        return q @ k.transpose(-1, -2)
    grouped = q.reshape(B, kv, H // kv * R, D) @ k.transpose(-1, -2)
    return grouped.view(B, H, R, k.shape[2])


def guarded_softmax(logits: Tensor, guarded: bool) -> Tensor:
    """Over the last dimension; 0 for a row of −inf, where `guarded` says that there may be one."""
    weight = logits.softmax(-1)
    return weight.nan_to_num_(0.0) if guarded else weight


def block_sums(x: Tensor, block: int) -> Tensor:
    """Sum over blocks of the last dimension; the last block may be short."""
    whole = x.shape[-1] // block
    sums = x[..., : whole * block].unflatten(-1, (whole, block)).sum(-1)
    if x.shape[-1] % block:
        sums = torch.cat([sums, x[..., whole * block :].sum(-1, keepdim=True)], dim=-1)
    return sums


def chunks(rows: int, row_bytes: int) -> Iterator[slice]:
    """Slices of rows, each of about CHUNK_BYTES of scratch."""
    size = max(1, CHUNK_BYTES // max(1, row_bytes))
    size = math.ceil(rows / math.ceil(rows / size))
    for start in range(0, rows, size):
        yield slice(start, min(start + size, rows))
