"""The way to the Triton kernels: loaded when a CUDA tensor first needs them, then remembered."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def kernels_run(device: torch.device) -> bool:
    """Whether they can run on this device."""
    from jali.kernels import available

    return available(device)


@functools.cache
def kernels(part: str) -> Any:
    """One of their modules: scores, selection, gather, attention."""
    return importlib.import_module(f"jali.kernels.{part}")
