"""What a launch is but for its tensors: it follows from shapes, so it is worked out once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Kind(NamedTuple):
    """A tensor but for its numbers and its place."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # to 16 bytes, as tensor descriptors need it

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def kind(x: Tensor) -> Kind:
    return Kind(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


class Launch:
    """A kernel, its grid, the numbers that follow its tensors, and what it is compiled for."""

    __slots__ = ("kernel", "numbers", "options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: Mapping[str, Any],
    ) -> None:
        self.kernel, self.numbers = kernel, numbers
        self.options = {"grid": grid, "warmup": False, **constants}

    def __call__(self, *tensors: Any) -> None:
        self.kernel.run(*tensors, *self.numbers, **self.options)  # kernel[grid](…), less one step


def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; where there is none (the interpreter), that of the oldest one we know."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)


_HERE: AbstractContextManager[object] = nullcontext()


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Launch on `device`, whichever device is current; the interpreter has nothing to choose."""
    if device.type != "cuda" or device.index in (None, torch.cuda.current_device()):
        return _HERE
    return torch.cuda.device(device)
