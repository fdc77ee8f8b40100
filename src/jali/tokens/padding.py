"""Which keys are real."""

from __future__ import annotations

import functools
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

    @classmethod
    def of_lengths(cls, lengths: tuple[int, ...], device: torch.device) -> KeyPadding:
        """Lengths that the host knows; copied to the device once and remembered, because every
        copy from the host waits for all that is under way there."""
        return _of_lengths(lengths, device)

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

    def total(self, tokens: int) -> int | Tensor:
        """How many keys are real in all samples together: on the device where only it knows."""
        return self.valid(tokens).sum() if self.host is None else sum(self.host)

    def zeroed(self, x: Tensor) -> Tensor:
        """x [B, H, S, D] with 0 wherever a token is not real. What lies there may be anything, and
        a weight of 0 does not keep it out: 0 · NaN is NaN."""
        if self.host is not None and min(self.host) >= x.shape[2]:
            return x
        return x.masked_fill(~self.valid(x.shape[2])[:, None, :, None], 0)

    def cut(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, KeyPadding | None]:
        """k and v [B, H, S, D] up to the end of the longest sample, where the host knows it, and
        what is padding still: none where all samples are equally long."""
        if self.host is None:
            return k, v, self
        longest = max(self.host)
        left = None if min(self.host) == longest else self
        return k[:, :, :longest], v[:, :, :longest], left

    def arranged(self, keys: Arrangement) -> KeyPadding:
        """The same keys in arranged order.

        A length stays a length where the order leaves the padded tail in place, which only the
        host can tell.
        """
        if keys.index is None or (self.host and min(self.host) >= keys.fixed_from):
            return self
        return KeyPadding(mask=keys.arrange(self.valid(keys.tokens)))

    def reordered(self, order: Tensor) -> KeyPadding:
        """The same keys where slot i holds the one that was at `order[i]`, as a mask."""
        return KeyPadding(mask=self.valid(len(order)).index_select(1, order))

    def split(self, count: int) -> list[KeyPadding]:
        """Those of `count` equal shares of the samples, in order."""
        if self.mask is not None:
            return [KeyPadding(mask=part) for part in self.mask.chunk(count)]
        assert self.length is not None
        rows = len(self.length) // count
        return [
            KeyPadding(length=part, host=self.host and self.host[i * rows : (i + 1) * rows])
            for i, part in enumerate(self.length.chunk(count))
        ]

    def last_sample(self) -> KeyPadding:
        """That of the last sample of a batch, in memory of its own."""
        if self.mask is not None:
            return KeyPadding(mask=self.mask[-1:].clone())
        assert self.length is not None
        return KeyPadding(length=self.length[-1:], host=self.host and self.host[-1:])


@functools.lru_cache(maxsize=64)
def _of_lengths(lengths: tuple[int, ...], device: torch.device) -> KeyPadding:
    return KeyPadding(torch.tensor(lengths, dtype=torch.int32, device=device), host=lengths)
