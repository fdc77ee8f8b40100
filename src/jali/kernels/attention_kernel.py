"""The attention kernel: one query tile against the key tiles its lists name, in one softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from .page_table import count_below


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
def _offsets(rows, stride, offs_d, INT64: tl.constexpr):
    """Element offsets of whole rows. 32 bits save registers wherever they suffice."""
    if INT64:
        rows = rows.to(tl.int64)
    return rows[:, None] * stride + offs_d[None, :]


@triton.jit
def _gather(
    base, rows, stride, offs_d, D: tl.constexpr, BLOCK_D: tl.constexpr, INT64: tl.constexpr
):
    """Rows of a matrix, each D wide, zero-filled to BLOCK_D."""
    at = base + _offsets(rows, stride, offs_d, INT64)
    if D == BLOCK_D:
        return tl.load(at)
    return tl.load(at, mask=(offs_d < D)[None, :], other=0.0)


@triton.jit
def attention_kernel(
    Q, K, V, Q_DESC, K_DESC, V_DESC, OUT, LSE,
    COUNT, INDEX, PAGES, POOLED, BIAS, MEAN_COUNT, MEAN_INDEX, MEAN_K, MEAN_V, LENGTH,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, ob, oh, os,
    c, cb, ch, cm, i, ib, ih, im, gb, gh, gm, pv, pb, ph, bb,
    mc, mcb, mch, mcm, mi, mib, mih, mim,
    q_row_b, q_row_h, q_col_h, k_row_b, k_row_h, k_col_h, v_row_b, v_row_h, v_col_h,
    seq_q, seq_k, scale,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    Q_BLOCK: tl.constexpr, K_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, POOL_N: tl.constexpr,
    STAGES: tl.constexpr, POOL_STAGES: tl.constexpr,
    HAS_FULL: tl.constexpr, HAS_POOLED: tl.constexpr, HAS_MEANS: tl.constexpr, EVEN: tl.constexpr,
    HAS_LENGTH: tl.constexpr, ADD_TO: tl.constexpr, TMA: tl.constexpr,
    INT64: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one query block of one head, over everything its lists name.
    With ADD_TO, what OUT and LSE hold of other keys belongs to the same softmax.

    Query tiles are the fastest grid axis, so programs that run together share one head's K and V
    in the L2 cache.
    """
    tile_m = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2).to(tl.int64)
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
        q_at = _offsets(offs_m, qs, offs_d, INT64)
        q = tl.load(Q + b * qb + h64 * qh + q_at, mask=q_mask, other=0.0)

    # A finite start lets a tile without any real key leave the sums untouched, with no NaN.
    top = tl.full((BLOCK_M,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((BLOCK_M,), dtype=tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)

    length = seq_k
    if HAS_LENGTH:
        length = tl.minimum(tl.load(LENGTH + b), seq_k)

    if HAS_FULL:
        count = tl.load(COUNT + c + b * cb + h64 * ch + m * cm)
        index = INDEX + i + b * ib + h64 * ih + m.to(tl.int64) * im
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
                k = _gather(k_base, rows, ks, offs_d, D, BLOCK_D, INT64)
                v = _gather(v_base, rows, vs, offs_d, D, BLOCK_D, INT64)
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
                k_at = k_base + _offsets(rows, ks, offs_d, INT64)
                v_at = v_base + _offsets(rows, vs, offs_d, INT64)
                k = tl.load(k_at, mask=mask, other=0.0)
                v = tl.load(v_at, mask=mask, other=0.0)
                bias = tl.where(exists, 0.0, float("-inf"))
                acc, total, top = _step_biased(acc, total, top, q, k, v, scale, bias, PRECISION)

    if HAS_POOLED:
        ends = PAGES + b * gb + h64 * gh + m.to(tl.int64) * gm
        end2 = tl.load(ends)
        end4 = tl.load(ends + 1)
        end8 = tl.load(ends + 2)
        pages = ends + 4
        pool_k = POOLED + b * pb + h_kv64 * ph
        pool_v = pool_k + pv
        offs_p = tl.arange(0, POOL_N)
        offs_g = offs_p // PAGE
        ahead_g = tl.load(pages + offs_g, mask=(offs_p >= 0) & (end8 > 0), other=0)
        for t in tl.range(0, end8, num_stages=POOL_STAGES):
            rows = ahead_g * PAGE + offs_p % PAGE
            following_g = pages + (t + 1) * (POOL_N // PAGE) + offs_g
            ahead_g = tl.load(following_g, mask=(offs_p >= 0) & (t + 1 < end8), other=0)
            k = _gather(pool_k, rows, D, offs_d, D, BLOCK_D, INT64)
            v = _gather(pool_v, rows, D, offs_d, D, BLOCK_D, INT64)
            weight = 1.0 + (t >= end2).to(tl.float32) + (t >= end4).to(tl.float32)
            acc, total, top = _step(acc, total, top, q, k, v, scale, weight, PRECISION)

        for t in tl.range(end8, tl.load(ends + 3), num_stages=1):
            page = tl.load(pages + t * (POOL_N // PAGE) + offs_g)
            rows = page * PAGE + offs_p % PAGE
            k = _gather(pool_k, rows, D, offs_d, D, BLOCK_D, INT64)
            v = _gather(pool_v, rows, D, offs_d, D, BLOCK_D, INT64)
            bias = tl.load(BIAS + b * bb + rows)
            acc, total, top = _step_biased(acc, total, top, q, k, v, scale, bias, PRECISION)

    if HAS_MEANS:
        # Whole blocks as one key each: means [B, Hkv, blocks, D], gathered many to a tile.
        mean_count = tl.load(MEAN_COUNT + mc + b * mcb + h64 * mch + m * mcm)
        mean_index = MEAN_INDEX + mi + b * mib + h64 * mih + m.to(tl.int64) * mim
        head_at = (b * (tl.num_programs(1) // GROUP) + h_kv) * tl.cdiv(seq_k, K_BLOCK) * D
        offs_e = tl.arange(0, POOL_N)
        for t in tl.range(0, tl.cdiv(mean_count, POOL_N), num_stages=1):
            entry = t * POOL_N + offs_e
            listed = entry < mean_count
            block = tl.load(mean_index + entry, mask=listed, other=0)
            k = _gather(MEAN_K + head_at, block, D, offs_d, D, BLOCK_D, INT64).to(q.dtype)
            v = _gather(MEAN_V + head_at, block, D, offs_d, D, BLOCK_D, INT64).to(q.dtype)
            tokens = tl.minimum(length - block * K_BLOCK, K_BLOCK)
            exists = listed & (tokens > 0)
            bias = tl.log2(tl.maximum(tokens, 1).to(tl.float32))
            bias = tl.where(exists, bias, float("-inf"))
            acc, total, top = _step_biased(acc, total, top, q, k, v, scale, bias, PRECISION)

    out_at = OUT + b * ob + h64 * oh + _offsets(offs_m, os, offs_d, INT64)
    lse_at = LSE + (b * tl.num_programs(1) + h) * seq_q + offs_m
    if ADD_TO:
        # As if it were one more tile, whose sum and output are known.
        other = tl.load(lse_at, mask=rows_ok, other=float("-inf")) * 1.4426950408889634
        new_top = tl.maximum(top, other)
        alpha = tl.exp2(top - new_top)
        weight = tl.exp2(other - new_top)
        total = total * alpha + weight
        there = tl.load(out_at, mask=q_mask, other=0.0).to(tl.float32)
        acc = acc * alpha[:, None] + there * weight[:, None]
        top = new_top
    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    out = acc * (1.0 / norm)[:, None]
    tl.store(out_at, out.to(OUT.dtype.element_ty), mask=q_mask)
    lse = tl.where(empty, float("-inf"), (top + tl.log2(norm)) * 0.6931471805599453)
    tl.store(lse_at, lse, mask=rows_ok)
