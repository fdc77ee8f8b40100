"""Offsets and strides of lists of key blocks in the tensors that hold them."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jali.kernels.lists import Lists, StackedLists, StackedListsSpec

from .launch import TensorSpec, spec_of

ListsSpec = tuple[tuple[int, TensorSpec, TensorSpec], ...] | StackedListsSpec
"""What a launch depends on of lists."""


def lists_spec(lists: Lists) -> ListsSpec:
    """The specs of the tensors that hold the lists, per ratio."""
    if type(lists) is StackedLists:  # asking an abstract class takes longer than all the rest
        return lists.spec
    return tuple(
        (ratio, spec_of(counts), spec_of(indices)) for ratio, (counts, indices) in lists.items()
    )


def list_tensors(lists: Lists, ratio: int) -> tuple[Tensor, Tensor]:
    """The tensors that hold the list of a ratio, at the offsets of its ListView."""
    return (lists.counts, lists.indices) if type(lists) is StackedLists else lists[ratio]


class ListView(NamedTuple):
    """One list in the tensors that hold it: the offsets of its counts and of its indices, and their
    strides to the next sample, head and row (0 where one list serves all)."""

    shape: tuple[int, int, int, int]
    counts_offset: int
    counts_stride: tuple[int, int, int]
    indices_offset: int
    indices_stride: tuple[int, int, int]

    @property
    def numbers(self) -> tuple[int, ...]:
        """What a kernel needs to find the list."""
        return (self.counts_offset, *self.counts_stride, self.indices_offset, *self.indices_stride)


NO_LIST = (0,) * 8
"""The numbers of a list that is absent."""


def list_views(lists: ListsSpec) -> dict[int, ListView]:
    """The view of every list, each of which is checked."""
    if isinstance(lists, StackedListsSpec):
        return _stacked(lists)
    found = {}
    for ratio, counts, indices in lists:
        if counts.dtype != torch.int32 or indices.dtype != torch.int32:
            raise ValueError(f"lists must be int32, got {counts.dtype}, {indices.dtype}")
        if len(indices.shape) != 4 or counts.shape != indices.shape[:3]:
            raise ValueError(
                f"ratio {ratio}: need counts [B, H, M] and indices [B, H, M, W], got "
                f"{tuple(counts.shape)} and {tuple(indices.shape)}"
            )
        if indices.stride[3] != 1 and indices.shape[3] > 1:
            raise ValueError(f"ratio {ratio}: the last dim of indices must be contiguous")
        batch, heads, rows, width = indices.shape
        found[ratio] = ListView(
            (batch, heads, rows, width),
            0, _strides(batch, heads, counts.stride), 0, _strides(batch, heads, indices.stride),
        )  # fmt: skip
    return found


def _stacked(lists: StackedListsSpec) -> dict[int, ListView]:
    _, batch, heads, rows, width = lists.shape
    lines = batch * heads * rows
    counts = _strides(batch, heads, (heads * rows, rows, 1))
    indices = _strides(batch, heads, (heads * rows * width, rows * width, width))
    return {
        ratio: ListView((batch, heads, rows, width), i * lines, counts, i * lines * width, indices)
        for i, ratio in enumerate(lists.ratios)
    }


def _strides(batch: int, heads: int, stride: tuple[int, ...]) -> tuple[int, int, int]:
    return (0 if batch == 1 else stride[0], 0 if heads == 1 else stride[1], stride[2])
