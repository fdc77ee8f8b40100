"""Entropy: importance and plans against plain loops; the budget holds at plan level."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jali import Blocks, Budget, Entropy, TokenGrid, attend, block_layout
from jali.planning.budget import share_blocks
from jali.planning.scoring import sample_positions, sampled_scores
from oracle import best_first, entropy_importance, tensors


def asked(mean: float, N: int, H: int) -> int:
    return min(max(math.floor(mean * N * H + 0.5), H), N * H)


@pytest.mark.parametrize("tokens", [1, 15, 16, 257, 300])
def test_samples_are_spread_evenly(tokens: int) -> None:
    found = sample_positions(tokens, 32, 4, torch.device("cpu")).tolist()
    for m, picks in enumerate(found):
        n = min(32, tokens - 32 * m)
        assert picks == [32 * m + math.floor((i + 0.5) * n / 4) for i in range(4)]


@pytest.mark.parametrize("tokens", [33, 257])
def test_importance_against_loops(tokens: int) -> None:
    q, k, _ = tensors(tokens, H=4, kv=2, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(tokens), blocks=Blocks(32, 16))
    positions = sample_positions(tokens, 32, 4, q.device)
    scores = sampled_scores(q, k, layout, 0.25, positions)
    for h in range(4):
        wanted = entropy_importance(q[0, h], k[0, h // 2], 32, 16, 0.25)
        torch.testing.assert_close(scores[0, h], wanted)
    torch.testing.assert_close(scores.sum(-1), torch.ones_like(scores[..., 0]))


def test_the_plan_against_loops() -> None:
    grid = TokenGrid.video(3, 9, 10, text=7)
    q, k, v = tensors(grid, H=3, dtype=torch.float64)
    method = Entropy(Budget(0.4), q_block=32, k_block=16)
    plan = attend(q, k, v, method=method, grid=grid).plan
    assert plan is not None
    N, M = plan.layout.N, plan.layout.M
    importance = [entropy_importance(q[0, h], k[0, h], 32, 16, 16**-0.5) for h in range(3)]
    text_rows = [0]  # 7 text tokens in front, in the first block of 32
    entropies = []
    for rows in importance:
        plain = [m for m in range(M) if m not in text_rows]
        each = [-sum(float(p) * math.log(float(p)) for p in rows[m] if p > 0) for m in plain]
        entropies.append(sum(each) / len(each) / math.log(N))
    kept = share_blocks(torch.tensor([entropies]), Budget(0.4), N)[0].tolist()
    for h in range(3):
        for m in range(M):
            own = {t // 16 for t in range(32 * m, min(32 * m + 32, grid.tokens))}
            forced = [j in own or j == 0 for j in range(N)]
            order = best_first(importance[h][m].tolist(), forced)
            wanted = set(order[: max(kept[h], sum(forced))])
            if m in text_rows:
                wanted = set(range(N))
            assert set(plan.levels[0, h, m].nonzero().flatten().tolist()) == wanted


@given(
    st.integers(40, 900), st.integers(1, 5), st.floats(0, 1), st.integers(0, 30),
    st.sampled_from([0, 5]), st.sampled_from([0.0, 1.0, 2.5]),
)  # fmt: skip
def test_the_achieved_cost_is_the_budget(
    tokens: int, H: int, mean: float, seed: int, text: int, sharpness: float
) -> None:
    """Rows without text read Σk / (N·H), unless forced blocks are more than k."""
    grid = TokenGrid.video(1, 1, tokens, text=text, text_side="back")
    q, k, v = tensors(grid, H=H, seed=seed)
    method = Entropy(Budget(mean), q_block=16, k_block=16, sharpness=sharpness)
    plan = attend(q, k, v, method=method, grid=grid).plan
    assert plan is not None
    layout = plan.layout
    rows = ~layout.text_rows
    counts = (plan.levels[0][:, rows] != 0).sum(-1)  # [H, rows]
    if not rows.any():
        return
    forced = layout.forced[rows].sum(-1)
    per_head = counts.amin(-1)
    # Every row of a head reads k_h, or its forced blocks where those are more.
    k_h = torch.where(
        (counts > forced).any(-1), counts.where(counts > forced, 0).amax(-1), per_head
    )
    assert torch.equal(counts, torch.maximum(k_h[:, None], forced.expand_as(counts)))
    if (counts > forced).all():
        assert int(k_h.sum()) == asked(mean, layout.N, H)
        cost = float((plan.levels[0][:, rows] != 0).float().mean())
        assert cost == pytest.approx(asked(mean, layout.N, H) / (layout.N * H))
    assert (plan.levels[0][:, ~rows] == 1).all()


def test_focused_heads_get_less() -> None:
    q, k, v = tensors(1024, H=2)
    q = torch.stack([q[:, 0] * 0.01, q[:, 1] * 20], dim=1)
    plan = attend(q, k, v, method=Entropy(Budget(0.4), q_block=32, k_block=16)).plan
    assert plan is not None
    diffuse, focused = plan.costs[0].tolist()
    assert diffuse > 1.5 * focused
    assert plan.cost == pytest.approx(0.4, abs=0.002)
    equal = Entropy(Budget(0.4), sharpness=0, q_block=32, k_block=16)
    plan = attend(q, k, v, method=equal).plan
    assert plan is not None
    assert plan.costs[0].tolist() == pytest.approx([0.4, 0.4], abs=0.01)


def test_seeded_samples_follow_seed_layer_and_step() -> None:
    from jali import Site

    q, k, v = tensors(1024)
    methods = [Entropy(Budget(0.2), seed=s, q_block=64, k_block=16) for s in (1, 1, 2)]
    sites = [Site(1, 4, 0, 2), Site(1, 4, 0, 2), Site(1, 4, 0, 2)]
    plans = [
        attend(q, k, v, method=m, site=s).plan.levels  # type: ignore[union-attr]
        for m, s in zip(methods, sites, strict=True)
    ]
    other = attend(q, k, v, method=methods[0], site=Site(2, 4, 0, 2)).plan
    assert torch.equal(plans[0], plans[1])
    assert not torch.equal(plans[0], plans[2])
    assert not torch.equal(plans[0], other.levels)  # type: ignore[union-attr]


def test_padded_keys_never_enter_the_scores() -> None:
    q, k, _ = tensors(160, B=2)
    from jali.tokens.padding import KeyPadding

    layout = block_layout(TokenGrid.flat(160), blocks=Blocks(32, 16))
    positions = sample_positions(160, 32, 4, q.device)
    padding = KeyPadding(length=torch.tensor([100, 0], dtype=torch.int32))
    scores = sampled_scores(q, k, layout, 0.25, positions, padding)
    assert (scores[0, ..., 7:] == 0).all()
    torch.testing.assert_close(scores[0].sum(-1), torch.ones_like(scores[0, ..., 0]))
    assert (scores[1] == 0).all()
    short = block_layout(TokenGrid.flat(160), TokenGrid.flat(100), blocks=Blocks(32, 16))
    wanted = sampled_scores(q[:1], k[:1, :, :100], short, 0.25, positions)
    torch.testing.assert_close(scores[:1, ..., :7], wanted)


def test_default_blocks_are_the_backends() -> None:
    q, k, v = tensors(600)
    plan = attend(q, k, v, method="entropy", backend="torch").plan
    assert plan is not None
    assert (plan.blocks.q, plan.blocks.k) == (256, 128)


def test_a_number_is_no_budget() -> None:
    with pytest.raises(TypeError, match=r"budget must be a Budget, as in Budget\(0.3\), got 0.25"):
        Entropy(0.25)  # type: ignore[arg-type]
