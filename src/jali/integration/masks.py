"""What a model's attention mask says about keys: all real, a prefix, or scattered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class Keys:
    """The real keys of a call. At most one of `length`, `mask`, `problem` is set."""

    length: tuple[int, ...] | None = None
    mask: Tensor | None = None
    problem: str | None = None
    source: tuple[int, ...] | None = None

    def fits(self, mask: Tensor | None) -> bool:
        """Whether this was read from such a mask: the layers of one call share theirs."""
        return self.source == (None if mask is None else tuple(mask.shape))

    def moved(self, order: Tensor | None, tokens: int) -> Keys:
        """The same keys in another order: a prefix is none there."""
        if order is None or (self.length is None and self.mask is None):
            return self
        mask = self.mask
        if mask is None:
            length = torch.tensor(self.length, device=order.device)
            mask = torch.arange(tokens, device=order.device) < length[:, None]
        return Keys(mask=mask.index_select(1, order))

    def cut(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Keys]:
        """Dense attention over equal prefixes needs no mask: k and v [B, H, S, D] are cut."""
        if self.length is None or len(set(self.length)) != 1:
            return k, v, self
        n = self.length[0]
        return k[:, :, :n], v[:, :, :n], Keys()


def read_mask(mask: Tensor | None) -> Keys:
    """A bool key mask [B, S] or [B, 1, 1, S]. Waits for the device, once a transformer call."""
    if mask is None:
        return Keys()
    source = tuple(mask.shape)
    if mask.dtype != torch.bool:
        return Keys(problem=f"a mask {list(source)} that is added to the scores", source=source)
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    if mask.dim() != 2:
        return Keys(problem=f"a mask {list(source)} of pairs of tokens", source=source)
    length = mask.sum(-1)
    prefix = torch.arange(mask.shape[1], device=mask.device) < length[:, None]
    facts = torch.cat([(prefix == mask).all()[None].to(length), length]).tolist()
    if facts[0] == 0:
        return Keys(mask=mask.clone(), source=source)  # kept while the model's memory moves on
    if all(n == mask.shape[1] for n in facts[1:]):
        return Keys(source=source)
    return Keys(length=tuple(facts[1:]), source=source)
