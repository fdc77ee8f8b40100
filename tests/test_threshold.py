"""One threshold for a share: against sorting all blocks of a sample and taking them one by one."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jali import Blocks, TokenGrid, block_layout
from jali.planning.plan import BlockPlan
from jali.planning.threshold import within_share
from jali.tokens.padding import KeyPadding


def one_by_one(scores, layout, share, always, lengths, tail, per_head):
    """The highest scores while there is room, in plain loops; equal ones together."""
    B, H, M, N = scores.shape
    kept = torch.zeros(B, H, M, N, dtype=torch.bool)
    text_rows = set() if layout.only_text_rows else set(layout.text_rows.nonzero()[:, 0].tolist())
    counted = [m for m in range(M) if m not in text_rows]
    rows = [min(layout.blocks.q, layout.q.tokens - m * layout.blocks.q) for m in range(M)]
    for b in range(B):
        keys = [
            max(0, min(layout.blocks.k, lengths[b] - n * layout.blocks.k)) for n in range(N)
        ]  # fmt: skip
        unread = [int(tail and size > 0) for size in keys]
        for heads in [[h] for h in range(H)] if per_head else [list(range(H))]:
            dense = len(heads) * sum(rows[m] for m in counted) * sum(keys)
            room = int(share * dense + 1e-6)
            free = {}
            for h in heads:
                for m in range(M):
                    for n in range(N):
                        room -= rows[m] * unread[n] * (m in counted)
                        more = rows[m] * (keys[n] - unread[n]) * (m in counted)
                        if always[m, n]:
                            room -= more
                        else:
                            free.setdefault(float(scores[b, h, m, n]), []).append((h, m, n, more))
            for score in sorted(free, reverse=True):
                room -= sum(more for *_, more in free[score])
                if room < 0:
                    break
                for h, m, n, _ in free[score]:
                    kept[b, h, m, n] = True
    return kept


@given(
    st.integers(0, 10**6), st.integers(20, 90), st.sampled_from([0, 5]), st.floats(0, 1),
    st.booleans(), st.booleans(), st.booleans(), st.sampled_from(["normal", "coarse", "tiny"]),
)  # fmt: skip
def test_it_is_what_sorting_finds(seed, tokens, text, share, padded, tail, per_head, kind):
    make = torch.Generator().manual_seed(seed)
    layout = block_layout(TokenGrid.video(1, 1, tokens, text=text), blocks=Blocks(16, 8))
    scores = torch.randn(2, 3, layout.M, layout.N, generator=make)
    if kind == "coarse":
        scores = scores.round()  # many are equal, some are −0
    elif kind == "tiny":
        scores = scores * 1e-40
    scores[0, 0, 0, 0], scores[1, 0, -1, 0] = torch.inf, -torch.inf
    lengths = [layout.k.tokens, layout.k.tokens - 9] if padded else [layout.k.tokens] * 2
    padding = KeyPadding(length=torch.tensor(lengths, dtype=torch.int32)) if padded else None
    found = within_share(scores, layout, share, layout.forced, padding, tail, None, per_head)
    if share == 1:
        assert found.all()
        return
    scores = torch.where(scores == 0, scores + 0.0, scores)
    wanted = one_by_one(scores, layout, share, layout.forced, lengths, tail, per_head)
    sizes = torch.tensor(lengths)[:, None] - torch.arange(layout.N) * 8  # what holds no key is free
    costs = (sizes[:, None, None] > 0) & ~layout.forced & ~layout.text_rows[:, None]
    if kind == "coarse":  # −0 comes after 0 here, and neither is wrong
        costs = costs & (scores != 0)
    if layout.only_text_rows:
        return
    assert torch.equal(found & costs, wanted & costs)


@pytest.mark.parametrize("share", [0.1, 0.3, 0.77])
@pytest.mark.parametrize("tail", [False, True])
def test_a_sample_costs_its_share_to_the_block(share, tail):
    layout = block_layout(TokenGrid.video(5, 16, 16), blocks=Blocks(32, 32))
    make = torch.Generator().manual_seed(0)
    scores = torch.randn(2, 4, layout.M, layout.N, generator=make)
    scores[:, 0] += 3  # heads differ
    kept = within_share(scores, layout, share, layout.forced, tail=tail) | layout.forced
    plan = BlockPlan(layout, (1,), map=kept.to(torch.uint8))
    plan = plan.with_tail() if tail else plan
    block = 32 * 32 / (1280 * 1280 * 4)
    for cost in plan.costs.mean(1).tolist():
        assert share - block <= cost <= share + 1e-6
    assert plan.costs[0, 0] > 1.2 * plan.costs[0, 1:].max()


def test_ranks_that_hold_half_of_the_heads_each_find_the_same():
    layout = block_layout(TokenGrid.video(2, 10, 13, text=3), blocks=Blocks(16, 8))
    scores = torch.randn(2, 6, layout.M, layout.N, generator=torch.Generator().manual_seed(1))
    scores[:, :3] *= 2
    alone = within_share(scores, layout, 0.3, layout.forced)
    sums: list[list[torch.Tensor]] = []

    def seen(x):
        sums[-1].append(x)
        return x

    def summed(x):
        """As the other rank's of the run before."""
        sums[-1].append(x)
        return x + other[len(sums[-1]) - 1]

    # A rank's second sum follows from the first of both: run until nothing changes.
    parts = [scores[:, :3], scores[:, 3:]]
    other: list[torch.Tensor] = []
    sums.append([])
    within_share(parts[1], layout, 0.3, layout.forced, total_over_ranks=seen)
    firsts = [sums[-1][0]]
    sums.append([])
    within_share(parts[0], layout, 0.3, layout.forced, total_over_ranks=seen)
    firsts.insert(0, sums[-1][0])
    seconds = []
    for own, theirs in ((0, 1), (1, 0)):
        other = [firsts[theirs], torch.tensor(0)]
        sums.append([])
        within_share(parts[own], layout, 0.3, layout.forced, total_over_ranks=summed)
        seconds.append(sums[-1][1])
    for own, theirs in ((0, 1), (1, 0)):
        other = [firsts[theirs], seconds[theirs]]
        sums.append([])
        found = within_share(parts[own], layout, 0.3, layout.forced, total_over_ranks=summed)
        assert torch.equal(found, alone[:, 3 * own : 3 * own + 3])


def test_padding_costs_nothing_and_a_nan_comes_last():
    layout = block_layout(TokenGrid.flat(64), TokenGrid.flat(96), blocks=Blocks(16, 16))
    scores = torch.arange(24.0).view(1, 1, 4, 6)
    scores[0, 0, 3, 5] = torch.nan
    found = within_share(scores, layout, 8 / 24, layout.forced)
    assert sorted(scores[found].tolist()) == list(range(15, 23))
    padding = KeyPadding(length=torch.tensor([32]))
    found = within_share(scores, layout, 0.5, layout.forced, padding)
    assert found[0, 0, :, :2].sum() == 4
