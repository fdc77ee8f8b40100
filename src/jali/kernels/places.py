"""Where lists of key blocks lie in their tensors: it follows from shapes, so it is found once."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from jali.kernels.lists import Form, Lists, Stack

from .launch import Kind, kind

Listed = tuple[tuple[int, Kind, Kind], ...] | Form
"""Lists but for their numbers."""


def listed(lists: Lists) -> Listed:
    if type(lists) is Stack:  # asking an abstract class takes longer than all the rest
        return lists.form
    return tuple((ratio, kind(counts), kind(indices)) for ratio, (counts, indices) in lists.items())


def tensors_of(lists: Lists, ratio: int) -> tuple[Tensor, Tensor]:
    """The tensors that hold the list of a ratio; where in them, its Place says."""
    return (lists.counts, lists.indices) if type(lists) is Stack else lists[ratio]


class Place(NamedTuple):
    """Where a list lies in its tensors: the first of its counts and of its indices, and how far it
    is from there to the next sample, head and row (0 where one list serves all)."""

    shape: tuple[int, int, int, int]
    counts_at: int
    counts_steps: tuple[int, int, int]
    indices_at: int
    indices_steps: tuple[int, int, int]

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.counts_at, *self.counts_steps, self.indices_at, *self.indices_steps)


NO_NUMBERS = (0,) * 8
"""The numbers of a list that is not there."""


def places(lists: Listed) -> dict[int, Place]:
    """The place of every list, each of which is checked."""
    if isinstance(lists, Form):
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
        found[ratio] = Place(
            (batch, heads, rows, width),
            0, _steps(batch, heads, counts.stride), 0, _steps(batch, heads, indices.stride),
        )  # fmt: skip
    return found


def _stacked(lists: Form) -> dict[int, Place]:
    _, batch, heads, rows, width = lists.shape
    lines = batch * heads * rows
    counts = _steps(batch, heads, (heads * rows, rows, 1))
    indices = _steps(batch, heads, (heads * rows * width, rows * width, width))
    return {
        ratio: Place((batch, heads, rows, width), i * lines, counts, i * lines * width, indices)
        for i, ratio in enumerate(lists.ratios)
    }


def _steps(batch: int, heads: int, stride: tuple[int, ...]) -> tuple[int, int, int]:
    return (0 if batch == 1 else stride[0], 0 if heads == 1 else stride[1], stride[2])
