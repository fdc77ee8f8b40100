"""Orders that every head has for itself: which slot of a layout goes to which slot of its own."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jali.tokens.padding import KeyPadding


class HeadOrders(NamedTuple):
    """For every slot of a head's order the slot of the layout whose token lies there.

    q int64 [B, H, Sq], k int64 [B, Hkv, Sk], bijections that leave text where it is. `choice`
    int64 [B, H] says which of its few orders a head has, where a method has a few.
    """

    q: Tensor
    k: Tensor
    choice: Tensor | None = None

    def take(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, S, D] each, in the layout's order, to that of the heads."""
        side_by_side = q.is_cuda
        return (
            take(q, self.q, side_by_side),
            take(k, self.k, side_by_side),
            take(v, self.k, side_by_side),
        )

    def with_padding_last(self, padding: KeyPadding, slots: int) -> tuple[HeadOrders, KeyPadding]:
        """Padded keys behind the real ones among the first `slots`, those that heads order: there
        are as many in every head, so that one mask serves all. And which slots are real then."""
        real = padding.valid(self.k.shape[2])
        before, text = self.k.split([slots, self.k.shape[2] - slots], dim=2)
        padded = ~real[:, None].expand(-1, before.shape[1], -1).gather(2, before)
        before = before.gather(2, padded.byte().argsort(dim=2, stable=True))
        if padding.mask is not None:
            first = real[:, :slots].byte().sort(dim=1, descending=True).values.bool()
            padding = KeyPadding(mask=torch.cat([first, real[:, slots:]], dim=1))
        return self._replace(k=torch.cat([before, text], dim=2)), padding


def take(x: Tensor, order: Tensor, side_by_side: bool = False) -> Tensor:
    """x [B, H, S, D] with the row `order[b, h, s]` of its head in slot s, as many as there are; in
    memory that has the heads of a token `side_by_side`, as models and GPU kernels have them, or
    each head for itself."""
    rows, flat = _rows(x, order)
    if side_by_side:
        rows = rows.transpose(1, 2)
    taken = flat.index_select(0, rows.flatten()).view(*rows.shape, x.shape[3])
    return taken.transpose(1, 2) if side_by_side else taken


def put_back(x: Tensor, order: Tensor) -> Tensor:
    """What `take` took, where it was; x [B, H, S, D] or [B, H, S]."""
    if x.dim() == 3:
        return torch.empty_like(x).scatter_(2, order, x)
    slots = torch.arange(order.shape[2], device=order.device).expand_as(order)
    return take(x, torch.empty_like(order).scatter_(2, order, slots), x.is_cuda)


def _rows(x: Tensor, order: Tensor) -> tuple[Tensor, Tensor]:
    """Which row is meant of x as one table of rows: whole rows are copied, not numbers."""
    B, H, S, D = x.shape
    batch = torch.arange(B, device=x.device).view(B, 1, 1)
    head = torch.arange(H, device=x.device).view(1, H, 1)
    if x.transpose(1, 2).is_contiguous():
        return (batch * S + order) * H + head, x.transpose(1, 2).view(-1, D)
    return (batch * H + head) * S + order, x.reshape(-1, D)
