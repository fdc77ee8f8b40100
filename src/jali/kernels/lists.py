"""Lists of key blocks: what a plan is to a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor


class BlockList(NamedTuple):
    """Per query block the key blocks read at one ratio, ascending.

    counts int32 [B|1, H|1, M]; indices int32 [B|1, H|1, M, W]. Only the first `count` entries
    mean something; the others are 0, so no list ever points outside the keys.
    """

    counts: Tensor
    indices: Tensor


class Form(NamedTuple):
    """A Stack but for its numbers: its ratios, and the shape of its indices."""

    ratios: tuple[int, ...]
    shape: tuple[int, ...]


class Stack(Mapping[int, BlockList]):
    """The lists of several ratios in two contiguous tensors, as the kernels write and read them:
    counts int32 [R, B|1, H|1, M], indices int32 [R, B|1, H|1, M, W]."""

    __slots__ = ("counts", "form", "indices")

    def __init__(self, form: Form, counts: Tensor, indices: Tensor) -> None:
        self.form, self.counts, self.indices = form, counts, indices

    def __getitem__(self, ratio: int) -> BlockList:
        if ratio not in self.form.ratios:
            raise KeyError(ratio)
        at = self.form.ratios.index(ratio)
        return BlockList(self.counts[at], self.indices[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self.form.ratios)

    def __len__(self) -> int:
        return len(self.form.ratios)


Lists = Mapping[int, BlockList]
"""A list per ratio."""
