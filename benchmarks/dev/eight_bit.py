"""Block-sparse attention in eight bits for Hopper, as Triton kernels: a trial, not a backend.

Keys lose a common vector and values another, which softmax does not see and the output gets back;
q and k have one scale per 128 rows, v one per channel, and p is scaled to the top of e4m3's range.
"int8": q·k in int8, p·v in e4m3. "fp8": both in e4m3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

BLOCK = 128  # rows that share a scale, and keys of a block of a plan
SAMPLE = 8  # every which token is looked at for the common vectors and the scale of v
TOP = math.log2(448.0)  # e4m3's largest number
V_TOP = 64.0  # where the largest sampled value goes: seven times larger ones still fit


@triton.jit
def _offsets_kernel(
    K, V, PARTS, kb, kh, ks, vb, vh, vs, length, heads, parts,
    D: tl.constexpr, SAMPLE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums of sampled keys, sums and extremes of sampled values: PARTS [B*H, parts, 4, D]."""
    part = tl.program_id(0)
    bh = tl.program_id(1)
    b, h = (bh // heads).to(tl.int64), (bh % heads).to(tl.int64)
    offs_d = tl.arange(0, D)
    rows = (part * ROWS + tl.arange(0, ROWS)) * SAMPLE
    real = (rows < length)[:, None]
    rows = rows.to(tl.int64)
    k = tl.load(K + b * kb + h * kh + rows[:, None] * ks + offs_d[None, :], mask=real, other=0.0)
    v = tl.load(V + b * vb + h * vh + rows[:, None] * vs + offs_d[None, :], mask=real, other=0.0)
    at = PARTS + (bh * parts + part).to(tl.int64) * 4 * D + offs_d
    k, v = k.to(tl.float32), v.to(tl.float32)
    tl.store(at, tl.sum(k, 0))
    tl.store(at + D, tl.sum(v, 0))
    tl.store(at + 2 * D, tl.max(tl.where(real, v, float("-inf")), 0))
    tl.store(at + 3 * D, tl.min(tl.where(real, v, float("inf")), 0))


@triton.jit
def _common_kernel(
    PARTS, COMMON, parts, sampled, D: tl.constexpr, P: tl.constexpr, V_TOP: tl.constexpr
):
    """COMMON [B*H, 3, D]: the mean key, the mean value, and the scale of the values."""
    bh = tl.program_id(0)
    offs_d = tl.arange(0, D)
    offs_p = tl.arange(0, P)
    k_sum = tl.zeros((D,), tl.float32)
    v_sum = tl.zeros((D,), tl.float32)
    high = tl.full((D,), float("-inf"), tl.float32)
    low = tl.full((D,), float("inf"), tl.float32)
    for start in tl.range(0, parts, P):
        real = (start + offs_p < parts)[:, None]
        rows = (bh * parts + start + offs_p).to(tl.int64)
        at = PARTS + rows[:, None] * 4 * D + offs_d[None, :]
        k_sum += tl.sum(tl.load(at, mask=real, other=0.0), 0)
        v_sum += tl.sum(tl.load(at + D, mask=real, other=0.0), 0)
        high = tl.maximum(high, tl.max(tl.load(at + 2 * D, mask=real, other=float("-inf")), 0))
        low = tl.minimum(low, tl.min(tl.load(at + 3 * D, mask=real, other=float("inf")), 0))
    mean = v_sum / sampled
    reach = tl.maximum(tl.maximum(high - mean, mean - low), 1e-6)
    to = COMMON + bh * 3 * D + offs_d
    tl.store(to, k_sum / sampled)
    tl.store(to + D, mean)
    tl.store(to + 2 * D, reach / V_TOP)


@triton.jit
def _store_scaled(x, OUT, SCALE, extra, at, INT8: tl.constexpr):
    """A tile with one scale; `extra` rides on the scale that is stored."""
    top = tl.maximum(tl.max(tl.max(tl.abs(x), 1), 0), 1e-10)
    if INT8:
        # Adding 1.5 * 2**23 rounds to the nearest integer, which then is the lowest byte.
        whole = (x * (127.0 / top) + 12582912.0).to(tl.int32, bitcast=True)
        tl.store(OUT, whole.to(tl.int8))
        tl.store(SCALE + at, top / 127.0 * extra)
    else:
        tl.store(OUT, (x * (448.0 / top)).to(tl.float8e4nv))
        tl.store(SCALE + at, top / 448.0 * extra)


@triton.jit
def _quantise_kernel(
    Q, K, V, COMMON, Q8, K8, VT, Q_SCALE, K_SCALE, SHIFT,
    qb, qh, qs, kb, kh, ks, vb, vh, vs, seq_q, seq_k, blocks_q, blocks_k,
    heads, heads_kv, scale,
    D: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, INT8: tl.constexpr,
    TRANSPOSED: tl.constexpr, V8: tl.constexpr,
):  # fmt: skip
    """One block of 128 rows of q, k or v. `scale` and log2(e) go into q's scale."""
    block = tl.program_id(0)
    role = tl.program_id(1)
    b = tl.program_id(2)
    b64 = b.to(tl.int64)
    offs_d = tl.arange(0, D)
    offs = tl.arange(0, BLOCK)
    here = block * BLOCK + offs
    if role < heads:
        if block < blocks_q:
            h = role
            at = b64 * qb + h.to(tl.int64) * qh + here.to(tl.int64)[:, None] * qs
            q = tl.load(Q + at + offs_d[None, :], mask=(here < seq_q)[:, None], other=0.0)
            q = q.to(tl.float32)
            common = COMMON + (b * heads_kv + h // GROUP) * 3 * D + offs_d
            shift = tl.sum(q * tl.load(common)[None, :], 1) * scale
            tl.store(SHIFT + (b64 * heads + h) * seq_q + here, shift, mask=here < seq_q)
            n = (b64 * heads + h) * blocks_q + block
            to = Q8 + (n * BLOCK + offs[:, None]) * D + offs_d[None, :]
            _store_scaled(q, to, Q_SCALE, scale * 1.4426950408889634, n, INT8)
    elif role < heads + heads_kv:
        if block < blocks_k:
            h = role - heads
            at = b64 * kb + h.to(tl.int64) * kh + here.to(tl.int64)[:, None] * ks
            k = tl.load(K + at + offs_d[None, :], mask=(here < seq_k)[:, None], other=0.0)
            common = tl.load(COMMON + (b * heads_kv + h) * 3 * D + offs_d)
            k = tl.where((here < seq_k)[:, None], k.to(tl.float32) - common[None, :], 0.0)
            n = (b64 * heads_kv + h) * blocks_k + block
            to = K8 + (n * BLOCK + offs[:, None]) * D + offs_d[None, :]
            _store_scaled(k, to, K_SCALE, 1.0, n, INT8)
    else:
        if block < blocks_k:
            h = role - heads - heads_kv
            # Within 32 keys: slot 16a + 4t + 2g + e holds key 16a + 8g + 2t + e. So the registers
            # in which a product leaves p are those in which the next one takes it.
            rows = offs
            if TRANSPOSED:
                rows = (offs & ~15) | ((offs & 2) << 2) | ((offs & 12) >> 1) | (offs & 1)
            rows += block * BLOCK
            at = b64 * vb + h.to(tl.int64) * vh + rows.to(tl.int64)[:, None] * vs
            v = tl.load(V + at + offs_d[None, :], mask=(rows < seq_k)[:, None], other=0.0)
            common = COMMON + (b * heads_kv + h) * 3 * D + offs_d
            v = (v.to(tl.float32) - tl.load(common + D)[None, :]) / tl.load(common + 2 * D)[None, :]
            v = tl.where((rows < seq_k)[:, None], tl.clamp(v, -448.0, 448.0), 0.0).to(V8)
            to = VT + ((b64 * heads_kv + h) * D + offs_d[:, None]) * (blocks_k * BLOCK)
            tl.store(to + block * BLOCK + offs[None, :], tl.trans(v))


@dataclass(frozen=True)
class Eight:
    """q, k and v in eight bits, and what the product needs to undo it."""

    q: Tensor  # [B, H, M * 128, D]
    k: Tensor  # [B, Hkv, N * 128, D]
    vt: Tensor  # [B, Hkv, D, N * 128], keys in the order the product wants them
    q_scale: Tensor  # [B, H, M], with the softmax's scale and log2(e)
    k_scale: Tensor  # [B, Hkv, N]
    common: Tensor  # [B * Hkv, 3, D]: mean key, mean value, scale of values
    shift: Tensor  # [B, H, S]: what the mean key adds to the log-sum-exp


def quantise(q: Tensor, k: Tensor, v: Tensor, scale: float, int8: bool) -> Eight:
    (B, H, Sq, D), (Hkv, Sk) = q.shape, k.shape[1:3]
    M, N, device = -(-Sq // BLOCK), -(-Sk // BLOCK), q.device
    rows = 64
    parts = -(-Sk // (rows * SAMPLE))
    partial = torch.empty(B * Hkv, parts, 4, D, device=device)
    common = torch.empty(B * Hkv, 3, D, device=device)
    _offsets_kernel[parts, B * Hkv](
        k, v, partial, *k.stride()[:3], *v.stride()[:3], Sk, Hkv, parts,
        D=D, SAMPLE=SAMPLE, ROWS=rows, num_warps=4,
    )  # fmt: skip
    _common_kernel[(B * Hkv,)](
        partial, common, parts, float(-(-Sk // SAMPLE)), D=D, P=16, V_TOP=V_TOP, num_warps=4
    )
    eight = torch.int8 if int8 else torch.float8_e4m3fn
    found = Eight(
        torch.empty(B, H, M * BLOCK, D, dtype=eight, device=device),
        torch.empty(B, Hkv, N * BLOCK, D, dtype=eight, device=device),
        torch.empty(B, Hkv, D, N * BLOCK, dtype=torch.float8_e4m3fn, device=device),
        torch.empty(B, H, M, device=device),
        torch.empty(B, Hkv, N, device=device),
        common,
        torch.empty(B, H, Sq, device=device),
    )
    _quantise_kernel[max(M, N), H + 2 * Hkv, B](
        q, k, v, common, found.q, found.k, found.vt, found.q_scale, found.k_scale, found.shift,
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], Sq, Sk, M, N, H, Hkv, scale,
        D=D, BLOCK=BLOCK, GROUP=H // Hkv, INT8=int8, TRANSPOSED=True, V8=tl.float8e4nv, num_warps=8,
    )  # fmt: skip
    return found


@triton.jit
def _step(
    acc, total, top, q, k, vt, scale, limit,
    MASKED: tl.constexpr, TWO_LEVELS: tl.constexpr, TOP: tl.constexpr, M: tl.constexpr,
    N: tl.constexpr,
):  # fmt: skip
    s = tl.dot(q, tl.trans(k)).to(tl.float32)
    if MASKED:
        s = tl.where((tl.arange(0, N) < limit)[None, :], s, float("-inf"))
    new_top = tl.maximum(top, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - (new_top - TOP)[:, None])
    alpha = tl.exp2(top - new_top)
    total = total * alpha + tl.sum(p, 1)
    p = p.to(tl.float8e4nv)
    p = p.reshape(M, N // 32, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(M, N)
    if TWO_LEVELS:
        acc = acc * alpha[:, None] + tl.dot(p, tl.trans(vt))
    else:
        acc = tl.dot(p, tl.trans(vt), acc * alpha[:, None])
    return acc, total, new_top


@triton.jit
def _attention_kernel(
    Q, K, VT, Q_SCALE, K_SCALE, COMMON, SHIFT, OUT, LSE, COUNT, INDEX,
    ob, oh, os, cb, ch, cm, ib, ih, im, seq_q, seq_k, blocks_q, blocks_k,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr, Q_BLOCK: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr, TWO_LEVELS: tl.constexpr,
    TOP: tl.constexpr,
):  # fmt: skip
    """One program: M query rows of one head over the key blocks of their list."""
    tile = tl.program_id(0)
    h = tl.program_id(1)
    b = tl.program_id(2)
    heads = tl.num_programs(1)
    bh = b * heads + h
    bh_kv = b * (heads // GROUP) + h // GROUP
    m = tile * M // Q_BLOCK
    q = Q.load([bh * blocks_q * BLOCK + tile * M, 0])
    q_scale = tl.load(Q_SCALE + bh * blocks_q + tile * M // BLOCK)
    k_scales = K_SCALE + bh_kv * blocks_k
    k_row = bh_kv * blocks_k * BLOCK
    v_row = bh_kv * D

    top = tl.full((M,), -1.0e30, dtype=tl.float32)
    total = tl.zeros((M,), dtype=tl.float32)
    acc = tl.zeros((M, D), dtype=tl.float32)
    count = tl.load(COUNT + b * cb + h * ch + m * cm)
    index = INDEX + b.to(tl.int64) * ib + h.to(tl.int64) * ih + m.to(tl.int64) * im
    last = tl.load(index + count - 1, mask=count > 0, other=0)
    ragged = (count > 0) & ((last + 1) * BLOCK > seq_k)
    full = count - ragged.to(tl.int32)
    per: tl.constexpr = BLOCK // N
    ahead = tl.load(index, mask=full > 0, other=0)
    scale_ahead = tl.load(k_scales + ahead)
    for t in tl.range(0, full * per, num_stages=STAGES):
        block = ahead
        scale = q_scale * scale_ahead
        ahead = tl.load(index + (t + 1) // per, mask=(t + 1) // per < full, other=0)
        scale_ahead = tl.load(k_scales + ahead)
        row = block * BLOCK + (t % per) * N
        k = K.load([k_row + row, 0])
        vt = VT.load([v_row, row])
        acc, total, top = _step(
            acc, total, top, q, k, vt, scale, 0, False, TWO_LEVELS, TOP, M, N
        )  # fmt: skip
    if ragged:
        scale = q_scale * tl.load(k_scales + last)
        for t in tl.range(0, per, num_stages=1):
            row = last * BLOCK + t * N
            if row < seq_k:
                k = K.load([k_row + row, 0])
                vt = VT.load([v_row, row])
                acc, total, top = _step(
                    acc, total, top, q, k, vt, scale, seq_k - row, True, TWO_LEVELS, TOP, M, N
                )  # fmt: skip

    offs_m = tile * M + tl.arange(0, M)
    offs_d = tl.arange(0, D)
    rows_ok = offs_m < seq_q
    common = COMMON + bh_kv * 3 * D + offs_d
    empty = total == 0.0
    norm = tl.where(empty, 1.0, total)
    out = acc * (1.0 / norm)[:, None] * tl.load(common + 2 * D)[None, :]
    out += tl.where(empty[:, None], 0.0, tl.load(common + D)[None, :])
    at = OUT + b.to(tl.int64) * ob + h.to(tl.int64) * oh
    at += offs_m.to(tl.int64)[:, None] * os + offs_d[None, :]
    tl.store(at, out.to(OUT.dtype.element_ty), mask=rows_ok[:, None])
    row = bh.to(tl.int64) * seq_q + offs_m
    shift = tl.load(SHIFT + row, mask=rows_ok, other=0.0)
    lse = (top + tl.log2(norm) - TOP) * 0.6931471805599453 + shift
    tl.store(LSE + row, tl.where(empty, float("-inf"), lse), mask=rows_ok)


@dataclass(frozen=True)
class Config:
    """Rows and keys per tile, warps, tiles in flight, cap of registers, and whether every tile's
    product is added up in fp32: Hopper's sums of fp8 products keep about 14 bits."""

    m: int = 128
    n: int = 128
    warps: int = 8
    stages: int = 2
    registers: int | None = None
    two_levels: bool = True

    def __str__(self) -> str:
        cap = f" r{self.registers}" if self.registers else ""
        levels = " two levels" if self.two_levels else ""
        return f"{self.m}x{self.n} w{self.warps} s{self.stages}{cap}{levels}"


def strides(counts: Tensor, indices: Tensor) -> tuple[int, ...]:
    """Of lists [B or 1, H or 1, M(, N)], a single batch or head standing for all."""
    c, i = counts.stride(), indices.stride()
    b, h = (0 if n == 1 else 1 for n in counts.shape[:2])
    return c[0] * b, c[1] * h, c[2], i[0] * b, i[1] * h, i[2]


def attend_eight(
    eight: Eight, out: Tensor, lse: Tensor, counts: Tensor, indices: Tensor, q_block: int,
    seq_k: int, config: Config,
) -> None:  # fmt: skip
    """Writes out [B, H, S, D] (any strides, rows contiguous) and lse [B, H, S]."""
    (B, H, Sq, D), Hkv = out.shape, eight.k.shape[1]
    c = config
    options: dict[str, Any] = {"num_warps": c.warps}
    if c.registers:
        options["maxnreg"] = c.registers
    _attention_kernel[-(-Sq // c.m), H, B](
        TensorDescriptor.from_tensor(eight.q.flatten(0, 2), [c.m, D]),
        TensorDescriptor.from_tensor(eight.k.flatten(0, 2), [c.n, D]),
        TensorDescriptor.from_tensor(eight.vt.flatten(0, 2), [D, c.n]),
        eight.q_scale, eight.k_scale, eight.common, eight.shift, out, lse, counts, indices,
        *out.stride()[:3], *strides(counts, indices), Sq, seq_k,
        eight.q_scale.shape[2], eight.k_scale.shape[2],
        GROUP=H // Hkv, D=D, BLOCK=BLOCK, Q_BLOCK=q_block, M=c.m, N=c.n, STAGES=c.stages,
        TWO_LEVELS=c.two_levels, TOP=TOP, **options,
    )  # fmt: skip
