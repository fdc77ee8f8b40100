"""What a model's attention mask says about keys: all real, a prefix, or scattered."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jali.tokens.padding import KeyPadding


@dataclass(frozen=True, eq=False)
class MaskReading:
    """The padding that a mask of this `shape` stands for, or the `problem` why no plan can keep
    it. Neither where every key is real."""

    padding: KeyPadding | None = None
    problem: str | None = None
    shape: tuple[int, ...] | None = None

    def is_of(self, mask: Tensor | None) -> bool:
        """Whether this was read from such a mask: the layers of a transformer call share theirs."""
        return self.shape == (None if mask is None else tuple(mask.shape))


def read_mask(mask: Tensor | None) -> MaskReading:
    """A bool key mask [B, S] or [B, 1, 1, S]. Waits for the device, once a transformer call."""
    if mask is None:
        return MaskReading()
    shape = tuple(mask.shape)
    if mask.dtype != torch.bool:
        problem = f"a mask {list(shape)} that is added to the scores"
        return MaskReading(problem=problem, shape=shape)
    if mask.dim() == 4 and mask.shape[1:3] == (1, 1):
        mask = mask[:, 0, 0]
    if mask.dim() != 2:
        return MaskReading(problem=f"a mask {list(shape)} of pairs of tokens", shape=shape)
    length = mask.sum(-1)
    prefix = torch.arange(mask.shape[1], device=mask.device) < length[:, None]
    is_prefix, *lengths = torch.cat([(prefix == mask).all()[None].to(length), length]).tolist()
    if not is_prefix:  # a copy: the model's memory moves on
        return MaskReading(KeyPadding(mask=mask.clone()), shape=shape)
    if all(n == mask.shape[1] for n in lengths):
        return MaskReading(shape=shape)
    return MaskReading(KeyPadding.of_lengths(tuple(lengths), mask.device), shape=shape)
