"""Lists of key blocks: what a plan is to a kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

MEAN = 254
"""The level that reads a whole block as one mean; the others are ratios."""


def group_size(level: int, k_block: int) -> int:
    """How many neighbouring keys a level reads as one."""
    return k_block if level == MEAN else level


class BlockList(NamedTuple):
    """Per query block the key blocks read at one ratio, ascending.

    counts int32 [B|1, H|1, M]; indices int32 [B|1, H|1, M, W]. Only the first `count` entries
    mean something; the others are 0, so no list ever points outside the keys.
    """

    counts: Tensor
    indices: Tensor


class StackedListsSpec(NamedTuple):
    """What a launch depends on of StackedLists: their ratios, and the shape of their indices."""

    ratios: tuple[int, ...]
    shape: tuple[int, ...]


class StackedLists(Mapping[int, BlockList]):
    """The lists of several ratios in two contiguous tensors, as the kernels write and read them:
    counts int32 [R, B|1, H|1, M], indices int32 [R, B|1, H|1, M, W]."""

    __slots__ = ("counts", "indices", "spec")

    def __init__(self, spec: StackedListsSpec, counts: Tensor, indices: Tensor) -> None:
        self.spec, self.counts, self.indices = spec, counts, indices

    def __getitem__(self, ratio: int) -> BlockList:
        if ratio not in self.spec.ratios:
            raise KeyError(ratio)
        at = self.spec.ratios.index(ratio)
        return BlockList(self.counts[at], self.indices[at])

    def __iter__(self) -> Iterator[int]:
        return iter(self.spec.ratios)

    def __len__(self) -> int:
        return len(self.spec.ratios)


Lists = Mapping[int, BlockList]
"""A list per ratio."""
