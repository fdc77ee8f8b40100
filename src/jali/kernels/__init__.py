"""Triton kernels: scores, selection, pooling, gathers and attention.

A leaf of the library: imported only where a CUDA tensor is at hand and Triton is installed.
"""

from __future__ import annotations

import functools
import importlib.util

import torch


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
