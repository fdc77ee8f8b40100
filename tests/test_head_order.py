"""Orders of single heads: what was moved comes back, and a plan knows its tokens."""

from __future__ import annotations

import base64

import pytest
import torch

from jali import (
    Entropy,
    Method,
    PerHead,
    Radial,
    Sta,
    Svg,
    Svg2,
    TokenGrid,
    attend,
    block_layout,
)
from jali.evaluation.inspection.capture import Capture
from jali.evaluation.inspection.judge import _ExactAttention, _ReadMass, planned
from jali.evaluation.inspection.plan_picture import footprint
from jali.generation.call_record import _footprint
from jali.planning.site import Site
from jali.tokens.head_order import HeadOrders, put_back, take
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding
from oracle import sdpa, tensors


def orders(B: int, H: int, S: int) -> torch.Tensor:
    make = torch.Generator().manual_seed(0)
    return torch.rand(B, H, S, generator=make).argsort(-1)


@pytest.mark.parametrize("memory", ["BHSD", "BSHD", "every second head"])
def test_taken_and_put_back_is_the_same_bit_for_bit(memory: str) -> None:
    x = torch.randn(2, 3, 50, 8)
    if memory == "BSHD":
        x = x.transpose(1, 2).contiguous().transpose(1, 2)
    elif memory != "BHSD":
        x = torch.randn(2, 6, 50, 8)[:, ::2]
    order = orders(2, 3, 50)
    moved = take(x, order)
    together = take(x, order, side_by_side=True)
    assert moved.is_contiguous()
    assert together.transpose(1, 2).is_contiguous()
    assert torch.equal(moved, together)
    assert torch.equal(put_back(together, order), x)
    for b in range(2):
        for h in range(3):
            assert torch.equal(moved[b, h], x[b, h, order[b, h]])
    assert torch.equal(put_back(moved, order), x)
    assert torch.equal(put_back(moved[..., 0], order), x[..., 0])


def test_padding_goes_last_among_the_slots_that_heads_order() -> None:
    mine = HeadOrders(orders(2, 2, 30), torch.cat([orders(2, 2, 20), 20 + orders(2, 2, 10)], -1))
    real = torch.rand(2, 30, generator=torch.Generator().manual_seed(1)) < 0.5
    found, padding = mine.with_padding_last(KeyPadding(mask=real), 20)
    for b in range(2):
        for h in range(2):
            assert sorted(found.k[b, h].tolist()) == list(range(30))
            kept = [s for s in mine.k[b, h, :20].tolist() if real[b, s]]
            assert found.k[b, h, : len(kept)].tolist() == kept  # real ones keep their order
            assert torch.equal(real[b, found.k[b, h, :20]], padding.valid(30)[b, :20])
    assert torch.equal(found.k[..., 20:], mine.k[..., 20:])
    lengths = KeyPadding.of_lengths((13, 25), torch.device("cpu"))
    _, same = mine.with_padding_last(lengths, 20)
    assert same is lengths


def test_a_layout_of_heads_knows_text_and_nothing_else_of_its_slots() -> None:
    layout = block_layout(TokenGrid.video(3, 4, 4, text=5), None, PerHead(), Blocks(8, 8))
    assert layout.text_keys.tolist() == [False] * 6 + [True]
    for flags in (layout.own, layout.first_keys, layout.first_rows, layout.single_keys):
        assert not flags.any()
    assert not layout.has_own
    assert layout.offset == 0
    assert torch.equal(layout.forced, layout.text_keys.expand(7, 7))
    assert torch.equal(layout.with_blocks(Blocks(16, 16)).own, torch.zeros(4, 4, dtype=torch.bool))


@pytest.fixture
def call() -> Capture:
    """Heads that look along time, with grouped keys: their blocks are no places."""
    grid = TokenGrid.video(6, 4, 8)
    make = torch.Generator().manual_seed(0)
    place = torch.arange(192) % 32
    code = torch.randn(1, 2, 32, 16, generator=make)[:, :, place]
    q = 3 * code.repeat_interleave(2, 1) + torch.randn(1, 4, 192, 16, generator=make) / 4
    v = torch.randn(1, 2, 192, 16, generator=make)
    return Capture(Site(), grid, q, code, v, None, 0.25)


def test_inspect_judges_the_tokens_that_heads_read(call: Capture) -> None:
    method = Svg(block_size=8)
    plan = planned(method, call)
    assert plan.orders is not None
    assert plan.orders.choice is not None
    assert plan.orders.choice.any()
    exact = _ExactAttention(call, 30)
    found = _ReadMass.of(exact, plan, 4)
    token = plan.levels.repeat_interleave(8, 2).repeat_interleave(8, 3)[0].bool()
    for head in range(4):
        seen = torch.zeros(192, 192, dtype=torch.bool)  # by the caller's tokens
        rows, keys = plan.query_tokens(head), plan.key_tokens(head)
        seen[rows[:, None], keys[None]] = token[head]
        weights = exact.weights(head)
        mass = (weights * seen[exact.rows]).sum(-1).mean()
        assert float(found.touched[head]) == pytest.approx(float(mass), abs=1e-6)
        read, own = footprint(plan, head, 5)
        row = int(torch.from_numpy(own).flatten().nonzero()[0])
        assert torch.equal(torch.from_numpy(read).flatten().bool(), seen[row])
        assert own.sum() == 8
    assert float(found.touched.mean()) > 0.9
    done = attend(call.q, call.k, call.v, method=method, grid=call.grid, scale=call.scale)
    error, _ = exact.errors(done.out)
    assert error < 0.4  # of other tokens it would be about 1


def test_only_methods_that_order_heads_have_that_order() -> None:
    with pytest.raises(ValueError, match="entropy orders no heads: PerHead"):
        attend(*tensors(64), method=Entropy(order=PerHead()))


def test_restores_out_and_lse_of_a_whole_read(call: Capture) -> None:
    q, k, v = tensors(call.grid, B=2, H=4, kv=2)
    found = attend(q, k, v, method=Svg(budget=1.0, block_size=8), grid=call.grid)
    torch.testing.assert_close(found.out, sdpa(q, k, v), atol=1e-5, rtol=1e-5)
    logits = q @ k.repeat_interleave(2, 1).mT * q.shape[-1] ** -0.5
    assert found.lse is not None
    torch.testing.assert_close(found.lse, logits.logsumexp(-1), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    "method",
    [
        Radial(block_size=16),
        Sta((1, 3, 3), (2, 4, 4), block_size=16),
        Svg(block_size=16),
        Svg2(0.5, q_block=16, k_block=16),
    ],
    ids=lambda method: method.name,
)
def test_ranks_that_share_the_heads_decide_as_one_would(method: Method) -> None:
    grid = TokenGrid.video(4, 6, 8)
    q, k, v = tensors(grid, H=8, kv=4)
    whole = attend(q, k, v, method=method, grid=grid).out
    parts = [
        attend(
            q[:, 4 * rank : 4 * rank + 4], k[:, 2 * rank : 2 * rank + 2],
            v[:, 2 * rank : 2 * rank + 2], method=method.for_rank(rank, 2), grid=grid,
        ).out
        for rank in range(2)
    ]  # fmt: skip
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=1e-5, rtol=1e-5)


def test_a_report_shows_the_tokens_that_a_head_reads(call: Capture) -> None:
    plan = planned(Svg(block_size=8), call)
    told = _footprint(Site(), call.grid, plan, 3, 10**6)
    levels = torch.frombuffer(bytearray(base64.b64decode(told["levels"])), dtype=torch.uint8)
    read, own = footprint(plan, 3, told["query_block"])
    assert levels.bool().tolist() == (read.ravel() > 0).tolist()
    marked = torch.zeros(192, dtype=torch.bool)
    for first, count in told["query_tokens"]:
        marked[first : first + count] = True
    assert marked.tolist() == own.ravel().tolist()
    assert marked[192 // 2 + 8 // 2]  # the query in the middle of the clip
