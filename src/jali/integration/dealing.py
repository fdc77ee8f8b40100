"""Which heads of a layer each rank computes: dealt by what they cost last, so that few wait.

Ulysses gives every rank as many heads, one after the other. Where heads do unequal parts of the
work the rank with the dearest ones is waited for, in every layer. So heads are put in another order
before the exchange, and back after it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from jali.integration.parallel import Ranks

Layer = tuple[int, int]  # transformer, and layer of it


def deal(costs: Tensor, ranks: int) -> Tensor:
    """Heads in the order in which ranks hold them, as many each. costs [..., H] -> int64 [..., H].

    From the dearest on, every rank takes one in each round, the one with the least so far first: a
    snake, as long as one round makes up for the other. The heads of a rank ascend.
    """
    rounds = costs.argsort(dim=-1, descending=True, stable=True).unflatten(-1, (-1, ranks))
    load = costs.new_zeros(*costs.shape[:-1], ranks)
    held = []
    for heads in rounds.unbind(-2):
        own = torch.empty_like(heads).scatter_(-1, load.argsort(dim=-1, stable=True), heads)
        load = load + costs.gather(-1, own)
        held.append(own)
    return torch.stack(held, -1).sort(-1).values.flatten(-2)


class _Noted(NamedTuple):
    """What this rank's heads of a layer did in a call, on the device."""

    layer: Layer
    branch: str
    order: Tensor | None
    pairs_read: Tensor  # fp32 [heads of a rank]


class Dealing:
    """The order of heads in every layer, and what each of them cost last.

    Costs of a transformer call are exchanged once, when the next one begins. A layer keeps its
    order for as long as a method may keep something of its heads (a period, see `Method.period`).
    Everything stays on the device.
    """

    def __init__(self) -> None:
        self._orders: dict[Layer, tuple[int, Tensor | None]] = {}
        self._next: dict[Layer, Tensor] = {}  # by the costs that are known now
        self._costs: dict[Layer, dict[str, Tensor]] = {}
        self._noted: list[_Noted] = []

    def order(self, layer: Layer, period: int) -> Tensor | None:
        """int64 [H], the heads in the order in which ranks hold them; None as they are."""
        known = self._orders.get(layer)
        if known is None or known[0] != period:
            known = self._orders[layer] = period, self._next.get(layer)
        return known[1]

    def current(self, layer: Layer) -> Tensor | None:
        """The order of the call that is going on."""
        return self._orders.get(layer, (0, None))[1]

    def note(self, layer: Layer, branch: str, pairs_read: Tensor, heads: int) -> None:
        """What this rank's heads did. pairs_read [B|1, H|1]."""
        each = pairs_read.sum(0).float().expand(heads)
        self._noted.append(_Noted(layer, branch, self.current(layer), each))

    def exchange(self, ranks: Ranks) -> None:
        """Tell all ranks what was noted, in one message."""
        noted, self._noted = self._noted, []
        if not noted:
            return
        mine = torch.cat([each.pairs_read for each in noted])
        parts = [torch.empty_like(mine) for _ in range(ranks.count)]
        dist.all_gather(parts, mine, group=ranks.group)
        sizes = [len(each.pairs_read) for each in noted]
        of_ranks = zip(*(part.split(sizes) for part in parts), strict=True)
        for each, found in zip(noted, of_ranks, strict=True):
            costs = torch.cat(found)
            if each.order is not None:  # by head again
                costs = torch.empty_like(costs).scatter_(0, each.order, costs)
            self._costs.setdefault(each.layer, {})[each.branch] = costs
        layers = list(dict.fromkeys(each.layer for each in noted))
        sums = [torch.stack([*self._costs[layer].values()]).sum(0) for layer in layers]
        self._next.update(zip(layers, deal(torch.stack(sums), ranks.count).unbind(), strict=True))

    def restart(self) -> None:
        """A generation begins: what heads cost in the last one is a good guess for it."""
        self._orders.clear()
        self._noted.clear()
