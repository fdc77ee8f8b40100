"""Tensor descriptors: q, k and v as plain matrices, read a tile at a time by newer GPUs (TMA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from .launch import TensorSpec, capability


@dataclass(frozen=True, slots=True)
class MatrixView:
    """x [B,H,S,D] as one matrix whose row holds `group` consecutive tokens of every head.

    Token s of head h, batch b begins at row b*row_b + h*row_h + s//group, column h*col_h +
    (s % group)*token.
    """

    shape: tuple[int, int]
    stride: int
    row_b: int
    row_h: int
    col_h: int
    token: int

    @property
    def steps(self) -> tuple[int, int, int]:
        """What a kernel needs to find a head: row_b, row_h, col_h."""
        return self.row_b, self.row_h, self.col_h

    def template(self, rows: int, columns: int, dtype: torch.dtype) -> DescriptorTemplate:
        """Descriptors of tiles of `rows` x `columns`, which read zeros beyond the edge."""
        return DescriptorTemplate(self.shape, self.stride, (rows, columns), dtype)


class DescriptorTemplate:
    """Makes descriptors of one shape, stride and tile: `bind` only sets the tensor. Triton's checks
    run once, here; that a tensor is aligned is checked with its `matrix_view`."""

    __slots__ = ("facts",)

    def __init__(
        self, shape: tuple[int, int], stride: int, tile: tuple[int, int], dtype: torch.dtype
    ) -> None:
        example = torch.empty(16, dtype=dtype)
        self.facts = vars(TensorDescriptor(example, list(shape), [stride, 1], list(tile)))

    def bind(self, x: Tensor) -> TensorDescriptor:
        made = TensorDescriptor.__new__(TensorDescriptor)
        made.__dict__.update(self.facts, base=x)
        return made


def matrix_view(x: TensorSpec, group: int = 1) -> MatrixView | None:
    """The view, or None where length, strides or alignment forbid a descriptor."""
    batch, heads, length, dim = x.shape
    sb, sh, ss, sd = x.stride
    sb = 0 if batch == 1 else sb
    sh = 0 if heads == 1 else sh
    align = 16 // x.itemsize
    if sd != 1 or ss < dim or ss % align or sh % align or not x.aligned or length % group:
        return None
    pitch = group * ss
    if sb % pitch:
        return None
    if (heads - 1) * sh + dim <= ss:
        row_h, col_h = 0, sh
    elif sh % pitch == 0:
        row_h, col_h = sh // pitch, 0
    else:
        return None
    row_b = sb // pitch
    rows = (batch - 1) * row_b + (heads - 1) * row_h + length // group
    columns = (group - 1) * ss + (heads - 1) * col_h + dim
    if rows >= 2**31 or pitch >= 2**31:
        return None
    return MatrixView((rows, columns), pitch, row_b, row_h, col_h, ss)


def use_descriptors(device: torch.device, wish: bool | None) -> bool:
    """Whether to read through descriptors: as wished, else where the tiles were tuned for it."""
    if wish is not None:
        return wish
    return capability(device)[0] == 9
