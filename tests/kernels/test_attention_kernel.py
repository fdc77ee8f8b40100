"""The attention kernel against a dense fp32 softmax over the very keys its lists name."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali.kernels.attention import Config, block_sparse_attention, default_config
from jali.kernels.list_view import list_views, lists_spec
from jali.kernels.lists import MEAN, StackedLists, StackedListsSpec
from jali.kernels.page_table import page_table_launch
from jali.kernels.pooling import make_sections

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = {
    torch.float32: 2e-5 if DEVICE == "cpu" else 2e-4,
    torch.float16: 4e-3,
    torch.bfloat16: 2.5e-2,
}
Lists = dict[int, tuple[Tensor, Tensor]]


def make_qkv(batch, heads, heads_kv, seq_q, seq_k, dim, dtype=torch.float32, order="bshd", seed=0):
    """Views [B, H, S, D] whose memory is BSHD (cut out of one fused buffer) or BHSD."""
    gen = torch.Generator().manual_seed(seed)

    def make(seq: int, n: int) -> Tensor:
        if order == "bshd":
            x = torch.randn(batch, seq, n + 1, dim, generator=gen).to(DEVICE, dtype)
            return x[:, :, 1:].transpose(1, 2)
        return torch.randn(batch, n, seq, dim, generator=gen).to(DEVICE, dtype)

    return make(seq_q, heads), make(seq_k, heads_kv), make(seq_k, heads_kv)


def make_levels(shape, ratios, seed=0, skip=True) -> Tensor:
    """A random level map [B, H, M, N] with values from `ratios`, and 0 where blocks are skipped."""
    gen = torch.Generator().manual_seed(seed)
    values = torch.tensor([*([0] if skip else []), *ratios])
    return values[torch.randint(len(values), shape, generator=gen)]


def make_lists(levels: Tensor, ratios) -> Lists:
    """Ascending lists of a level map; entries beyond the count are poison."""
    lists = {}
    for ratio in ratios:
        hit = levels == ratio
        order = (~hit).to(torch.int8).sort(dim=-1, stable=True).indices
        counts = hit.sum(-1)
        valid = torch.arange(levels.shape[-1]) < counts[..., None]
        indices = torch.where(valid, order, torch.full_like(order, 1 << 24))
        lists[ratio] = (counts.int().to(DEVICE), indices.int().to(DEVICE))
    return lists


def reference(q, k, v, levels, q_block, k_block, scale, lengths=None) -> tuple[Tensor, Tensor]:
    """Plain fp32, one query block at a time: gather keys, pool them, one softmax."""
    batch, heads, seq_q, _ = q.shape
    q, k, v = (x.float().cpu() for x in (q, k, v))
    rep = heads // k.shape[1]
    levels = levels.expand(batch, heads, -1, -1)
    out = torch.zeros(q.shape)
    lse = torch.full(q.shape[:3], float("-inf"))
    for b, h in itertools.product(range(batch), range(heads)):
        length = k.shape[2] if lengths is None else lengths[b]
        keys, values = k[b, h // rep, :length], v[b, h // rep, :length]
        for m in range(levels.shape[2]):
            parts = []
            for n, ratio in enumerate(levels[b, h, m].tolist()):
                if ratio:
                    stop = min((n + 1) * k_block, length)
                    size = k_block if ratio == MEAN else ratio
                    for start in range(n * k_block, stop, size):
                        parts.append((start, min(start + size, stop)))
            if not parts:
                continue
            count = torch.tensor([float(stop - start) for start, stop in parts])
            mean = torch.zeros(len(parts), length)
            for row, (start, stop) in enumerate(parts):
                mean[row, start:stop] = 1.0 / (stop - start)
            rows = slice(m * q_block, min((m + 1) * q_block, seq_q))
            logits = q[b, h, rows] @ (mean @ keys).T * scale + count.log()
            lse[b, h, rows] = logits.logsumexp(-1)
            out[b, h, rows] = logits.softmax(-1) @ (mean @ values)
    return out, lse


def check(q, k, v, levels, ratios, q_block, k_block, lengths=None, **kwargs) -> None:
    scale = q.shape[-1] ** -0.5
    key_length = None
    if lengths is not None:
        key_length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out, lse = block_sparse_attention(
        q, k, v, make_lists(levels, ratios), q_block, k_block, scale, key_length, **kwargs
    )
    want, want_lse = reference(q, k, v, levels, q_block, k_block, scale, lengths)
    tol = TOLERANCE[q.dtype]
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    assert lse.dtype == torch.float32
    torch.testing.assert_close(out.float().cpu(), want, atol=tol, rtol=tol)
    torch.testing.assert_close(lse.cpu(), want_lse, atol=tol, rtol=tol)


def blocks(seq: int, block: int) -> int:
    return math.ceil(seq / block)


SUBSETS = [s for n in range(1, 5) for s in itertools.combinations((1, 2, 4, 8), n)]
SUBSETS += [(MEAN,), (1, MEAN), (2, 8, MEAN), (1, 2, 4, 8, MEAN)]


@pytest.mark.parametrize("ratios", SUBSETS, ids=str)
def test_all_level_subsets(ratios):
    q, k, v = make_qkv(1, 1, 1, 70, 333, 16)
    levels = make_levels((1, 1, 2, 6), ratios, seed=len(ratios))
    check(q, k, v, levels, ratios, 64, 64)


@pytest.mark.parametrize(
    ("q_block", "k_block"),
    [(64, 32), (64, 128), (128, 64), (192, 96), (192, 128), (256, 32), (256, 64)],
)
def test_blocks(q_block, k_block):
    ratios = (1, 2, 8, MEAN)
    q, k, v = make_qkv(1, 1, 1, 300, 401, 16)
    levels = make_levels((1, 1, blocks(300, q_block), blocks(401, k_block)), ratios, seed=k_block)
    check(q, k, v, levels, ratios, q_block, k_block)


@pytest.mark.parametrize("seq", [1, 63, 128, 129])
@pytest.mark.parametrize("ratios", [(1,), (1, 4)], ids=str)
def test_ragged_lengths(seq, ratios):
    q, k, v = make_qkv(1, 1, 1, seq, seq, 32)
    n = blocks(seq, 64)
    check(q, k, v, make_levels((1, 1, n, n), ratios, skip=False), ratios, 64, 64)


@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128])
def test_head_dims(dim):
    q, k, v = make_qkv(1, 2, 2, 130, 200, dim)
    check(q, k, v, make_levels((1, 2, 2, 4), (1, 2)), (1, 2), 128, 64)


@pytest.mark.parametrize("ratios", [(1,), (2, 8), (1, MEAN), (1, 2, 4, 8)], ids=str)
@pytest.mark.parametrize("block_n", [32, 64, 128])
def test_key_lengths(ratios, block_n):
    lengths = [0, 77, 260]
    q, k, v = make_qkv(3, 1, 1, 50, 260, 16)
    levels = make_levels((3, 1, 1, 5), ratios, seed=3, skip=False)
    check(q, k, v, levels, ratios, 64, 64, lengths, config=Config(block_n=block_n))


@pytest.mark.parametrize("heads_kv", [1, 2])
def test_gqa_rectangular(heads_kv):
    q, k, v = make_qkv(1, 4, heads_kv, 70, 300, 32)
    check(q, k, v, make_levels((1, 4, 1, 5), (1, 4)), (1, 4), 128, 64)


@pytest.mark.parametrize("shape", [(1, 1), (2, 1), (1, 3)], ids=str)
def test_broadcast_lists(shape):
    q, k, v = make_qkv(2, 3, 3, 60, 160, 16)
    check(q, k, v, make_levels((*shape, 1, 3), (1, 2)), (1, 2), 64, 64)


def test_lists_may_broadcast_differently():
    q, k, v = make_qkv(2, 3, 3, 128, 192, 16)
    full = make_levels((1, 1, 2, 3), (1,), seed=1)
    pooled = torch.where(full == 0, make_levels((2, 3, 2, 3), (4,), seed=2), 0)
    lists = make_lists(full, (1,)) | make_lists(pooled, (4,))
    out, lse = block_sparse_attention(q, k, v, lists, 64, 64, 0.25)
    want, want_lse = reference(q, k, v, full + pooled, 64, 64, 0.25)
    torch.testing.assert_close(out.cpu(), want, atol=2e-5, rtol=2e-5)
    torch.testing.assert_close(lse.cpu(), want_lse, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("ratios", [(1,), (8,), (MEAN,), (1, 8)], ids=str)
def test_rows_that_read_nothing(ratios):
    q, k, v = make_qkv(1, 2, 2, 128, 128, 16)
    levels = make_levels((1, 2, 2, 2), ratios)
    levels[0, 0] = 0
    lists = make_lists(levels, ratios)
    out, lse = block_sparse_attention(q, k, v, lists, 64, 64, 0.25)
    assert out[0, 0].abs().max() == 0
    assert torch.isneginf(lse[0, 0]).all()
    check(q, k, v, levels, ratios, 64, 64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["bshd", "bhsd"])
def test_dtypes_and_memory_order(dtype, order):
    q, k, v = make_qkv(2, 2, 2, 100, 140, 32, dtype, order)
    check(q, k, v, make_levels((1, 1, 1, 3), (1, 2), skip=False), (1, 2), 128, 64)
    out, _ = block_sparse_attention(
        q, k, v, make_lists(torch.ones(1, 1, 1, 3), (1,)), 128, 64, 0.125
    )
    dense = out.transpose(1, 2) if order == "bshd" else out
    assert dense.is_contiguous()


@pytest.mark.parametrize("order", ["bshd", "bhsd"])
@pytest.mark.parametrize("block_n", [32, 64])
def test_tensor_descriptors(order, block_n):
    q, k, v = make_qkv(2, 2, 1, 100, 200, 64, torch.float16, order)
    config = Config(64, block_n, 32, 4, tma=True)
    check(q, k, v, make_levels((2, 2, 1, 4), (1, 2)), (1, 2), 128, 64, config=config)


@pytest.mark.parametrize("pool_n", [32, 64, 128])
def test_pooled_tile_width(pool_n):
    q, k, v = make_qkv(1, 1, 1, 64, 777, 16)
    levels = make_levels((1, 1, 1, 25), (2, 4, 8), seed=9)
    check(q, k, v, levels, (2, 4, 8), 64, 32, config=Config(pool_n=pool_n))


def test_large_logits_and_negative_scale():
    q, k, v = make_qkv(1, 1, 1, 64, 128, 16)
    lists = make_lists(torch.ones(1, 1, 1, 2), (1,))
    for scale in (-0.25, 30.0):
        out, lse = block_sparse_attention(q, k, v, lists, 64, 64, scale)
        want, want_lse = reference(q, k, v, torch.ones(1, 1, 1, 2).int(), 64, 64, scale)
        torch.testing.assert_close(out.cpu(), want, atol=2e-4, rtol=2e-4)
        torch.testing.assert_close(lse.cpu(), want_lse, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("k_block", [64, 96])
def test_only_some_of_the_lists(k_block):
    # At 96 keys a block the last one reaches past the section of its ratio.
    q, k, v = make_qkv(1, 1, 1, 64, 250, 16)
    levels = make_levels((1, 1, 1, blocks(250, k_block)), (1, 2, 8), skip=False)
    lists = make_lists(levels, (1, 2, 8))
    some = torch.where(levels == 1, 0, levels)
    out, lse = block_sparse_attention(q, k, v, lists, 64, k_block, 0.25, ratios=(2, 8))
    want, want_lse = reference(q, k, v, some, 64, k_block, 0.25)
    torch.testing.assert_close(out.cpu(), want, atol=2e-4, rtol=2e-4)
    torch.testing.assert_close(lse.cpu(), want_lse, atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 2, 37, 80), (1, 2, 130, 64)])
def test_added_to_an_attention_over_other_keys(shape, order, dtype):
    batch, heads, seq, dim = shape
    q, k, v = make_qkv(batch, heads, heads, seq, 250, dim, dtype, order)
    levels = make_levels((batch, heads, blocks(seq, 64), 4), (1, 2, 8), skip=False)
    lists = make_lists(levels, (1, 2, 8))
    first = block_sparse_attention(q, k, v, lists, 64, 64, 0.25, ratios=(1,))
    both = block_sparse_attention(q, k, v, lists, 64, 64, 0.25, ratios=(2, 8), add_to=first)
    assert all(a is b for a, b in zip(first, both, strict=True))
    want = reference(q, k, v, levels, 64, 64, 0.25)
    tol = TOLERANCE[dtype]
    torch.testing.assert_close(both[0].float().cpu(), want[0], atol=tol, rtol=tol)
    torch.testing.assert_close(both[1].cpu(), want[1], atol=tol, rtol=tol)


def test_adding_nothing_and_adding_to_nothing():
    q, k, v = make_qkv(1, 1, 1, 100, 128, 16)
    some, none = (make_lists(torch.full((1, 1, 2, 2), x), (2,)) for x in (2, 0))
    want, want_lse = block_sparse_attention(q, k, v, some, 64, 64, 0.25)
    for first, second in ((some, none), (none, some)):
        before = block_sparse_attention(q, k, v, first, 64, 64, 0.25)
        out, lse = block_sparse_attention(q, k, v, second, 64, 64, 0.25, add_to=before)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(lse, want_lse)
    before = block_sparse_attention(q, k, v, none, 64, 64, 0.25)
    out, lse = block_sparse_attention(q, k, v, none, 64, 64, 0.25, add_to=before)
    assert (out == 0).all()
    assert (lse == -torch.inf).all()


def test_lists_in_one_stack():
    q, k, v = make_qkv(2, 2, 2, 70, 250, 16)
    levels = make_levels((2, 2, 2, 4), (1, 2, 4, 8))
    lists = make_lists(levels, (1, 2, 4, 8))
    counts, indices = (torch.stack(x) for x in zip(*lists.values(), strict=True))
    stack = StackedLists(StackedListsSpec(tuple(lists), indices.shape), counts, indices)
    want = block_sparse_attention(q, k, v, lists, 64, 64, 0.25)
    got = block_sparse_attention(q, k, v, stack, 64, 64, 0.25)
    assert all(map(torch.equal, got, want))


def test_pages_fill_whole_tiles():
    lists = make_lists(torch.tensor([[[[2, 8, 8, 2, 8]]]]), (2, 8))
    views = tuple(list_views(lists_spec(lists)).items())
    launch = page_table_launch(views, make_sections(300, (2, 8)), 64, 16, 300, None)
    assert launch.size == 8
    table = launch(lists, None)
    assert table.shape == launch.table
    # Two blocks of 32 rows at ratio 2 are four tiles of 16 rows; two of 8 rows at ratio 8 are one;
    # the last block, which holds 44 keys, is left for a mixed tile with an empty page.
    assert table[..., :4].tolist() == [[[[4, 4, 5, 6]]]]
    at8 = 512 // 2 // 8
    empty = (512 // 2 + 512 // 8) // 8
    ids = [0, 1, 2, 3, 12, 13, 14, 15, at8 + 1, at8 + 2, at8 + 4, empty]
    assert table[0, 0, 0, 4 : 4 + len(ids)].tolist() == ids


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)], ids=str)
def test_default_configs_are_powers_of_two(capability):
    for head_dim, k_block in itertools.product((16, 64, 80, 128, 256), (32, 64, 128)):
        config = default_config(head_dim, k_block, capability)
        for size in (config.block_m, config.block_n, config.pool_n):
            assert size >= 16
            assert size & (size - 1) == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"q_block": 40}, "multiples of 16"),
        ({"lists": {}}, "no list"),
        ({"lists": {3: None}}, "ratio"),
    ],
    ids=str,
)
def test_wrong_calls_are_refused(change, message):
    q, k, v = make_qkv(1, 1, 1, 64, 64, 16)
    call = {"lists": make_lists(torch.ones(1, 1, 1, 1), (1,)), "q_block": 64, **change}
    if 3 in call["lists"]:
        call["lists"] = {3: make_lists(torch.ones(1, 1, 1, 1), (1,))[1]}
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, k, v, k_block=64, scale=1.0, **call)


@pytest.mark.parametrize(
    ("out", "lse", "message"),
    [((1, 1, 60, 16), (1, 1, 60), "to add to"), ((1, 1, 64, 16), (1, 64, 1), "log-sum-exp")],
)
def test_what_cannot_be_added_to_is_refused(out, lse, message):
    q, k, v = make_qkv(1, 1, 1, 64, 64, 16)
    lists = make_lists(torch.ones(1, 1, 1, 1), (1,))
    add_to = torch.empty(out, device=DEVICE), torch.empty(lse, device=DEVICE)
    with pytest.raises(ValueError, match=message):
        block_sparse_attention(q, k, v, lists, 64, 64, 1.0, add_to=add_to)


def test_a_mean_of_many_blocks_and_heads_that_share_keys():
    # More means than a tile holds, and blocks of a size that no ratio divides.
    q, k, v = make_qkv(2, 4, 2, 100, 80 * 48 + 5, 32)
    levels = make_levels((2, 4, 2, 81), (1, MEAN), seed=4)
    check(q, k, v, levels, (1, MEAN), 64, 48)


def test_means_add_to_an_attention_over_other_blocks():
    q, k, v = make_qkv(1, 2, 2, 100, 300, 32)
    levels = make_levels((1, 2, 2, 5), (1, 8, MEAN), seed=5)
    lists = make_lists(levels, (1, 8, MEAN))
    whole = block_sparse_attention(q, k, v, lists, 64, 64, 0.25)
    first = block_sparse_attention(q, k, v, lists, 64, 64, 0.25, ratios=(1,))
    both = block_sparse_attention(q, k, v, lists, 64, 64, 0.25, ratios=(8, MEAN), add_to=first)
    for got, want in zip(both, whole, strict=True):
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
