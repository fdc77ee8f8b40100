"""The way to the Triton kernels: loaded when a CUDA tensor first needs them, then remembered."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch


def kernels_run(device: torch.device) -> bool:
    """Whether they can run on this device."""
    found: bool = _package().available(device)
    return found


@functools.cache
def kernels(part: str) -> Any:
    """One of their modules: scores, selection, gather, attention, merge."""
    return importlib.import_module(f"jali.kernels.{part}")


@functools.cache
def _package() -> ModuleType:
    from jali import kernels

    return kernels
