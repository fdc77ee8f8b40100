"""Triton kernels: scores, selection, pooling, gathers and attention.

Nothing of Triton is imported here: `load` brings a module of kernels when a CUDA tensor first needs
it, and remembers it. PyTorch code with the same meaning stands beside every call.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any

import torch


@functools.cache
def load(part: str) -> Any:
    """A module of kernels by its name: scores, selection, gather or attention."""
    return importlib.import_module(f"jali.kernels.{part}")


@functools.cache
def available(device: torch.device) -> bool:
    """Whether these kernels can run on the device."""
    return not why_unavailable(device)


@functools.cache
def why_unavailable(device: torch.device) -> tuple[str, ...]:
    """The reasons they cannot, in words."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"needs a CUDA device, the tensors are on {device.type}")
    elif torch.cuda.get_device_capability(device) < (8, 0):
        major, minor = torch.cuda.get_device_capability(device)
        reasons.append(f"needs compute capability 8.0 (Ampere) or newer, this is {major}.{minor}")
    if importlib.util.find_spec("triton") is None:
        reasons.append("triton is not installed: pip install 'jali[triton]'")
    return tuple(reasons)
