"""A device by name, checked as far as that goes without torch, which takes seconds to load."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from jali.error import ArgumentError

KINDS = ("cpu", "cuda", "mps", "xpu", "meta")
# Where drivers for GPUs appear on Linux: NVIDIA, NVIDIA's Tegra, WSL, AMD.
_DRIVERS = ("nvidiactl", "nvidia0", "nvhost-gpu", "nvgpu", "dxg", "kfd")


def check_device(device: str) -> None:
    """Refuse what is no device, and a GPU where there is none."""
    kind, colon, number = device.partition(":")
    if kind not in KINDS or (colon and not number.isdecimal()):
        raise ArgumentError("device", f"must be cuda or cpu, or one GPU as cuda:1; got {device!r}")
    if kind == "cuda" and not may_have_gpu():
        raise ArgumentError("device", f"is {device}, but torch sees no GPU here")


def may_have_gpu() -> bool:
    """Whether there can be a GPU; torch, where it is loaded, knows."""
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None:
        return bool(cuda.is_available())
    if os.environ.get("CUDA_VISIBLE_DEVICES", "0").strip() in ("", "-1"):
        return False
    return not sys.platform.startswith("linux") or any(
        Path("/dev", name).exists() for name in _DRIVERS
    )
