"""Which keys are real."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from jali.tokens.layout import Arrangement


@dataclass(frozen=True, eq=False)
class KeyPadding:
    """Per sample, the first `length` keys (int32 [B]) or the keys under `mask` (bool [B, Sk]).

    Exactly one of the two is set. Lengths are what every kernel understands; masks are for orders
    or models that scatter the padding. `host` are the lengths where the host knows them: some
    backends need them, and asking the device would mean waiting for it.
    """

    length: Tensor | None = None
    mask: Tensor | None = None
    host: tuple[int, ...] | None = None

    @property
    def kind(self) -> str:
        """ "mask", "length" (known to the device only) or "host length"."""
        if self.mask is not None:
            return "mask"
        return "length" if self.host is None else "host length"

    def valid(self, tokens: int) -> Tensor:
        """bool [B, tokens]."""
        if self.mask is not None:
            return self.mask
        assert self.length is not None
        return torch.arange(tokens, device=self.length.device) < self.length[:, None]

    def arranged(self, keys: Arrangement) -> KeyPadding:
        """The same keys in arranged order.

        A length stays a length where the order leaves the padded tail in place, which only the
        host can tell.
        """
        if keys.index is None or (self.host and min(self.host) >= keys.fixed_from):
            return self
        return KeyPadding(mask=keys.arrange(self.valid(keys.tokens)))
