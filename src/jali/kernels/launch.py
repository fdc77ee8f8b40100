"""Kernel launches: grid, numbers and constants follow from shapes and strides, so they are worked
out once and remembered."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


class TensorSpec(NamedTuple):
    """What a launch depends on of a tensor: equal specs take the same launch."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    aligned: bool  # to 16 bytes, as tensor descriptors need it

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


def spec_of(x: Tensor) -> TensorSpec:
    """The spec of a tensor. One that jali laid out itself carries it: several kernels ask."""
    known: TensorSpec | None = getattr(x, "jali_spec", None)
    return known or TensorSpec(x.shape, x.stride(), x.dtype, x.device, x.data_ptr() % 16 == 0)


class Launch:
    """A kernel, its grid, the numbers that follow its tensors, and what it is compiled for.

    It runs on the device of its tensors, whichever device is current. Triton's own way from a call
    to a compiled kernel looks at every argument and at its settings anew, and takes longer than
    the launch; what it found for tensors of the same dtypes and alignment is remembered.
    """

    __slots__ = ("compiled", "fixed", "grid", "kernel", "numbers", "options")

    def __init__(
        self,
        kernel: Any,
        grid: tuple[int, ...],
        numbers: tuple[int | float, ...],
        constants: Mapping[str, Any],
    ) -> None:
        self.kernel, self.numbers = kernel, numbers
        self.grid = (*grid, 1, 1)[:3]
        self.options = {"grid": self.grid, "warmup": False, **constants}
        # A compiled kernel is called by position: numbers, then the constants in their order.
        in_order = (constants[name] for name in kernel.arg_names if name in constants)
        self.fixed = (*numbers, *in_order)
        self.compiled: dict[Any, Callable[..., None]] = {}

    def __call__(self, *tensors: Any) -> None:
        first = tensors[0]
        device = (first.base if type(first) is TensorDescriptor else first).get_device()
        if device >= 0 and device != torch.cuda.current_device():
            with torch.cuda.device(device):
                return self(*tensors)
        # All that decides which compiled kernel takes these tensors.
        marks: list[Any] = [device]
        for x in tensors:
            if x is None:
                marks.append(None)
            elif type(x) is TensorDescriptor:
                marks.append(x.base.dtype)
            else:
                marks += x.dtype, x.data_ptr() & 15
        run = self.compiled.get(key := tuple(marks))
        if run is not None:
            return run(*tensors, *self.fixed)
        found = self.kernel.run(*tensors, *self.numbers, **self.options)
        if found is not None:  # the interpreter has nothing to remember
            self.compiled[key] = found[self.grid]
        return None


def capability(device: torch.device) -> tuple[int, int]:
    """Of a GPU; where there is none (the interpreter), that of the oldest one we know."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (8, 0)
