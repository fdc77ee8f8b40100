"""Heads are dealt to ranks by cost, and the result stays that of one rank, kept tables included."""

from __future__ import annotations

from pathlib import Path

import dealt
import pytest
import torch

import forked
from jali import AdaBsa, Entropy, Psa, RfV2, Schedule
from jali.integration.dealing import Dealing, deal


def held(costs: list[float], ranks: int) -> list[list[int]]:
    return deal(torch.tensor(costs), ranks).view(ranks, -1).tolist()


class TestDeal:
    def test_a_snake(self) -> None:
        assert held([8, 7, 6, 5, 4, 3, 2, 1], 4) == [[0, 7], [1, 6], [2, 5], [3, 4]]
        assert held([1, 2, 3, 4], 2) == [[0, 3], [1, 2]]

    def test_the_third_round_goes_by_what_two_have_made(self) -> None:
        """Back and forth alone would give the first rank the larger of what is left."""
        assert held([10, 4, 3, 2, 2, 1], 2) == [[0, 3, 5], [1, 2, 4]]

    def test_every_head_once_and_as_many_each(self) -> None:
        costs = torch.rand(5, 40, generator=torch.Generator().manual_seed(0)) ** 3
        order = deal(costs, 8)
        assert torch.equal(order.sort(-1).values, torch.arange(40).expand(5, 40))
        of_ranks = costs.gather(-1, order).view(5, 8, 5).sum(-1)
        plain = costs.view(5, 8, 5).sum(-1)
        # No two ranks are further apart than a round can put them.
        assert (of_ranks.amax(-1) - of_ranks.amin(-1) <= costs.amax(-1)).all()
        assert (of_ranks.amax(-1) < plain.amax(-1)).all()
        assert torch.equal(order, torch.stack([deal(own, 8) for own in costs]))

    def test_one_head_each_or_equal_heads(self) -> None:
        assert held([3, 1, 2], 3) == [[0], [2], [1]]
        assert sorted(deal(torch.ones(12), 4).tolist()) == list(range(12))


def test_an_order_lasts_as_long_as_a_table_may() -> None:
    dealing, layer = Dealing(), (0, 3)
    assert dealing.order(layer, 0) is None
    dealing._next[layer] = torch.tensor([1, 0])
    assert dealing.order(layer, 0) is None  # the heads whose tables are kept stay where they are
    assert dealing.current(layer) is None
    found = dealing.order(layer, 1)
    assert found is not None
    assert found.tolist() == [1, 0]
    assert dealing.order((0, 4), 1) is None
    dealing.restart()
    assert dealing.current(layer) is None
    again = dealing.order(layer, 0)  # what the last generation knew
    assert again is found


def test_only_where_heads_differ() -> None:
    assert Schedule(Entropy()).base.uneven_heads
    assert not RfV2().uneven_heads
    assert not Psa().uneven_heads
    assert Psa(mode="thresholdbound").uneven_heads
    assert not AdaBsa(sparsity=0.5).uneven_heads
    assert AdaBsa(cdf_threshold=0.9).uneven_heads


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_agree_with_one(ranks: int, tmp_path: Path) -> None:
    running = [
        forked.start(dealt.main, rank, ranks, str(tmp_path / "store")) for rank in range(ranks)
    ]
    for process in running:
        process.join(120)
    assert [process.exitcode for process in running] == [0] * ranks
