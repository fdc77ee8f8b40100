"""The eight-bit product as warps with roles: one loads, two groups of 64 rows multiply.

Each group takes the maximum and the exponentials of one tile while the tensor cores multiply the
values of the tile before. Written in Gluon, Triton's lower language; sm_90 only.
"""

from __future__ import annotations

from dataclasses import dataclass

from eight_bit import BLOCK, TOP, Eight, strides
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor


@gluon.jit
def _load(
    k_desc, v_desc, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, index, count, tiles,
    k_row, v_row, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """K and V tiles of the listed blocks, last first."""
    block = gl.load(index + count - 1, mask=count > 0, other=0)
    for j in range(tiles):
        stage = j % STAGES
        phase = (j // STAGES) & 1
        here = block
        block = gl.load(index + count - 2 - j, mask=count > j + 1, other=0)
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), N * D)
        tma.async_copy_global_to_shared(
            k_desc, [k_row + here * N, 0], k_ready.index(stage), k_tiles.index(stage)
        )
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), N * D)
        tma.async_copy_global_to_shared(
            v_desc, [v_row, here * N], v_ready.index(stage), v_tiles.index(stage)
        )


@gluon.jit
def _own_sum(p, N: gl.constexpr):
    """Sums [64, 4] of what each thread of a row has: the four are added up once, at the end."""
    return gl.sum(gl.sum(p.reshape(64, N // 8, 4, 2), 3), 1)


@gluon.jit
def _weights(s, top, total, scale, TOP: gl.constexpr, N: gl.constexpr):
    """p in eight bits, four to a word, in the order in which values lie; and the new sums."""
    new_top = gl.maximum(top, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(new_top - TOP, 1))
    alpha = gl.exp2(top - new_top)
    factor = gl.convert_layout(gl.expand_dims(alpha, 1), total.type.layout, assert_trivial=True)
    total = total * factor + _own_sum(p, N)
    # From one tile to the next p is kept in words: bytes would be taken apart and put together.
    p = p.reshape(64, N // 32, 2, 2, 4, 2).permute(0, 1, 2, 4, 3, 5).reshape(64, N // 4, 2, 2)
    even, odd = p.split()
    a, c = even.split()
    b, d = odd.split()
    words = gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [a, b, c, d], dtype=gl.int32, is_pure=True, pack=1,
    )  # fmt: skip
    return words, alpha, total, new_top


@gluon.jit
def _unpacked(words, N: gl.constexpr, P_LAYOUT: gl.constexpr):
    """The words as [64, N] in eight bits: a matter of names, no instruction."""
    pairs = gl.join(words, words)
    four = gl.join(pairs, pairs).reshape(64, N)
    p = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r,r,r,r", [four], dtype=gl.int8, is_pure=True, pack=4
    )
    return gl.convert_layout(p.to(gl.float8e4nv, bitcast=True), P_LAYOUT, assert_trivial=True)


@gluon.jit
def _multiply(
    q_tile, k_tiles, v_tiles, q_ready, k_ready, k_free, v_ready, v_free,
    Q_SCALE, k_scales, common, SHIFT, OUT, LSE, index, count, tiles, first, row, seq_q, seq_k, os,
    turns, N: gl.constexpr, STAGES: gl.constexpr, D: gl.constexpr, TOP: gl.constexpr,
    INT8: gl.constexpr, TWO_LEVELS: gl.constexpr, TURNS: gl.constexpr, WHO: gl.constexpr,
):  # fmt: skip
    """64 rows over all listed tiles."""
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 32])
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(0, O_LAYOUT, 4)
    ROW: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    S_TYPE: gl.constexpr = gl.int32 if INT8 else gl.float32

    q_scale = gl.load(Q_SCALE)
    block = gl.load(index + count - 1, mask=count > 0, other=0)
    ahead = gl.load(index + count - 2, mask=count > 1, other=0)
    scale = gl.load(k_scales + block) * q_scale
    limit = gl.where(count > 0, seq_k - block * N, 0)
    no_s = gl.zeros([64, N], S_TYPE, S_LAYOUT)
    out = gl.zeros([64, D], gl.float32, O_LAYOUT)
    no_out = gl.zeros([64, D], gl.float32, O_LAYOUT)
    top = gl.full([64], -1.0e30, gl.float32, ROW)
    total = _own_sum(gl.zeros([64, N], gl.float32, S_LAYOUT), N)

    mbarrier.wait(q_ready, 0)
    mbarrier.wait(k_ready.index(0), 0)
    s = warpgroup_mma(q_tile, k_tiles.index(0).permute((1, 0)), no_s, use_acc=False)
    mbarrier.arrive(k_free.index(0))
    columns = gl.arange(0, N, layout=gl.SliceLayout(0, S_LAYOUT))
    # The list is walked backwards: only the block that is read first may be ragged.
    masked = gl.where(gl.expand_dims(columns < limit, 0), s.to(gl.float32), float("-inf"))
    words, _, total, top = _weights(masked, top, total, scale, TOP, N)
    scale_ahead = gl.load(k_scales + ahead)
    if TURNS and WHO == 1:
        mbarrier.arrive(turns.index(0))
    for j in range(1, tiles):
        # p of tile j - 1 is there. Its product with the values runs while p of tile j is made.
        stage = j % STAGES
        before = (j - 1) % STAGES
        scale = scale_ahead * q_scale
        ahead = gl.load(index + count - 2 - j, mask=count > j + 1, other=0)
        scale_ahead = gl.load(k_scales + ahead)
        mbarrier.wait(k_ready.index(stage), (j // STAGES) & 1)
        if TURNS:
            mbarrier.wait(turns.index(WHO), (j - 1) & 1)
        s = warpgroup_mma(
            q_tile, k_tiles.index(stage).permute((1, 0)), no_s, use_acc=False, is_async=True
        )
        mbarrier.wait(v_ready.index(before), ((j - 1) // STAGES) & 1)
        p = _unpacked(words, N, P_LAYOUT)
        values = v_tiles.index(before).permute((1, 0))
        if TWO_LEVELS:
            part = warpgroup_mma(p, values, no_out, use_acc=False, is_async=True)
        else:
            part = warpgroup_mma(p, values, out, is_async=True)
        if TURNS:
            mbarrier.arrive(turns.index(1 - WHO))
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(stage))
        words, alpha, total, top = _weights(s.to(gl.float32), top, total, scale, TOP, N)
        # A way out that no sum ever takes: the assembler would wait for the product first, and
        # take all exponentials after it.
        total = gl.inline_asm_elementwise(
            "{ .reg .pred never; setp.lt.f32 never, $1, 0f00000000; @never exit; mov.f32 $0, $1; }",
            "=f,f", [total], dtype=gl.float32, is_pure=False, pack=1,
        )  # fmt: skip
        part = warpgroup_mma_wait(0, deps=[part])
        mbarrier.arrive(v_free.index(before))
        factor = gl.expand_dims(gl.convert_layout(alpha, O_ROW, assert_trivial=True), 1)
        if TWO_LEVELS:
            part += out
        out = part * factor
    before = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(before), ((tiles - 1) // STAGES) & 1)
    p = _unpacked(words, N, P_LAYOUT)
    out = warpgroup_mma(p, v_tiles.index(before).permute((1, 0)), out)
    total = gl.where(count > 0, total, 0.0)

    O_COLUMN: gl.constexpr = gl.SliceLayout(0, O_LAYOUT)
    offs_d = gl.arange(0, D, layout=O_COLUMN)
    offs_m = first + gl.arange(0, 64, layout=O_ROW)
    rows_ok = offs_m < seq_q
    total = gl.convert_layout(gl.sum(total, 1), O_ROW)
    top = gl.convert_layout(top, O_ROW, assert_trivial=True)
    empty = total == 0.0
    norm = gl.where(empty, 1.0, total)
    v_scale = gl.load(common + 2 * D + offs_d)
    v_mean = gl.load(common + D + offs_d)
    out = out * gl.expand_dims(1.0 / norm, 1) * gl.expand_dims(v_scale, 0)
    out += gl.where(gl.expand_dims(empty, 1), 0.0, gl.expand_dims(v_mean, 0))
    at = gl.expand_dims(offs_m.to(gl.int64) * os, 1) + gl.expand_dims(offs_d, 0)
    gl.store(OUT + at, out.to(OUT.dtype.element_ty), mask=gl.expand_dims(rows_ok, 1))
    shift = gl.load(SHIFT + row + offs_m, mask=rows_ok, other=0.0)
    lse = (top + gl.log2(norm) - TOP) * 0.6931471805599453 + shift
    gl.store(LSE + row + offs_m, gl.where(empty, float("-inf"), lse), mask=rows_ok)


@gluon.jit
def _attention_kernel(
    q_desc, k_desc, v_desc, Q_SCALE, K_SCALE, COMMON, SHIFT, OUT, LSE, COUNT, INDEX,
    ob, oh, os, cb, ch, cm, ib, ih, im, seq_q, seq_k, blocks_q, blocks_k,
    GROUP: gl.constexpr, D: gl.constexpr, Q_BLOCK: gl.constexpr, N: gl.constexpr,
    STAGES: gl.constexpr, TOP: gl.constexpr, INT8: gl.constexpr, TWO_LEVELS: gl.constexpr,
    TURNS: gl.constexpr,
):  # fmt: skip
    """One program: 128 query rows of one head."""
    tile = gl.program_id(0)
    h = gl.program_id(1)
    b = gl.program_id(2)
    heads = gl.num_programs(1)
    bh = b * heads + h
    bh_kv = b * (heads // GROUP) + h // GROUP
    m = tile * 128 // Q_BLOCK
    count = gl.load(COUNT + b * cb + h * ch + m * cm)
    index = INDEX + b.to(gl.int64) * ib + h.to(gl.int64) * ih + m.to(gl.int64) * im
    tiles = gl.maximum(count, 1)

    q_tiles = gl.allocate_shared_memory(q_desc.dtype, [2, 64, D], q_desc.layout)
    k_tiles = gl.allocate_shared_memory(k_desc.dtype, [STAGES, N, D], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(v_desc.dtype, [STAGES, D, N], v_desc.layout)
    q_ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
    k_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    turns = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(turns.index(0), count=1)
    mbarrier.init(turns.index(1), count=1)
    mbarrier.init(q_ready.index(0), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(k_ready.index(i), count=1)
        mbarrier.init(v_ready.index(i), count=1)
        mbarrier.init(k_free.index(i), count=2)
        mbarrier.init(v_free.index(i), count=2)

    q_row = bh * blocks_q * 128 + tile * 128
    mbarrier.expect(q_ready.index(0), 128 * D)
    for i in gl.static_range(2):
        tma.async_copy_global_to_shared(
            q_desc, [q_row + 64 * i, 0], q_ready.index(0), q_tiles.index(i)
        )
    q_scale = Q_SCALE + bh * blocks_q + tile
    k_scales = K_SCALE + bh_kv * blocks_k
    common = COMMON + bh_kv * 3 * D
    out = OUT + b.to(gl.int64) * ob + h.to(gl.int64) * oh
    row = bh.to(gl.int64) * seq_q
    gl.warp_specialize(
        [
            (_multiply, (
                q_tiles.index(0), k_tiles, v_tiles, q_ready.index(0), k_ready, k_free, v_ready,
                v_free, q_scale, k_scales, common, SHIFT, out, LSE, index, count, tiles,
                tile * 128, row, seq_q, seq_k, os, turns, N, STAGES, D, TOP, INT8, TWO_LEVELS,
                TURNS, 0,
            )),
            (_multiply, (
                q_tiles.index(1), k_tiles, v_tiles, q_ready.index(0), k_ready, k_free, v_ready,
                v_free, q_scale, k_scales, common, SHIFT, out, LSE, index, count, tiles,
                tile * 128 + 64, row, seq_q, seq_k, os, turns, N, STAGES, D, TOP, INT8,
                TWO_LEVELS, TURNS, 1,
            )),
            (_load, (
                k_desc, v_desc, k_tiles, v_tiles, k_ready, k_free, v_ready, v_free, index, count,
                tiles, bh_kv * blocks_k * N, bh_kv * D, N, STAGES, D,
            )),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


@dataclass(frozen=True)
class Roles:
    """Tiles in flight, whether every tile's product is added up in fp32, and whether the two groups
    of rows take turns on the tensor cores."""

    stages: int = 2
    two_levels: bool = True
    turns: bool = False

    def __str__(self) -> str:
        levels = " two levels" if self.two_levels else ""
        return f"roles s{self.stages}{levels}{' turns' if self.turns else ''}"


def attend_with_roles(
    eight: Eight, out: Tensor, lse: Tensor, counts: Tensor, indices: Tensor, q_block: int,
    seq_k: int, config: Roles,
) -> None:  # fmt: skip
    """As `attend_eight`: writes out [B, H, S, D] and lse [B, H, S]."""
    (B, H, Sq, D), Hkv = out.shape, eight.k.shape[1]
    int8 = eight.k.dtype.itemsize == 1 and not eight.k.dtype.is_floating_point
    element = gl.int8 if int8 else gl.float8e4nv
    layout = gl.NVMMASharedLayout.get_default_for
    q, k, vt = eight.q.flatten(0, 2), eight.k.flatten(0, 2), eight.vt.flatten(0, 2)
    _attention_kernel[-(-Sq // BLOCK), H, B](
        TensorDescriptor.from_tensor(q, [64, D], layout([64, D], element)),
        TensorDescriptor.from_tensor(k, [BLOCK, D], layout([BLOCK, D], element)),
        TensorDescriptor.from_tensor(vt, [D, BLOCK], layout([D, BLOCK], gl.float8e4nv)),
        eight.q_scale, eight.k_scale, eight.common, eight.shift, out, lse, counts, indices,
        *out.stride()[:3], *strides(counts, indices), Sq, seq_k,
        eight.q_scale.shape[2], eight.k_scale.shape[2],
        GROUP=H // Hkv, D=D, Q_BLOCK=q_block, N=BLOCK, STAGES=config.stages, TOP=TOP, INT8=int8,
        TWO_LEVELS=config.two_levels, TURNS=config.turns, num_warps=4,
    )  # fmt: skip
