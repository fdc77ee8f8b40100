"""Which keys are real."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jali.layout import Arrangement


@dataclass(frozen=True, eq=False)
class KeyPadding:
    """Per sample, the first `length` keys (int32 [B]) or the keys under `mask` (bool [B, Sk]).

    Exactly one of the two is set. Lengths are what every kernel understands; masks are for orders
    or models that scatter the padding.
    """

    length: Tensor | None = None
    mask: Tensor | None = None

    @property
    def kind(self) -> str:
        return "length" if self.length is not None else "mask"

    def valid(self, tokens: int) -> Tensor:
        """bool [B, tokens]."""
        if self.mask is not None:
            return self.mask
        assert self.length is not None
        return torch.arange(tokens, device=self.length.device) < self.length[:, None]

    def arranged(self, keys: Arrangement, host_length: tuple[int, ...] | None) -> KeyPadding:
        """The same keys in arranged order.

        A length stays a length where the order leaves the padded tail in place, which only the
        host's copy of the lengths can tell without waiting for the device.
        """
        if keys.index is None:
            return self
        if self.length is not None and host_length and min(host_length) >= keys.fixed_from:
            return self
        return KeyPadding(mask=keys.arrange(self.valid(keys.tokens)))
