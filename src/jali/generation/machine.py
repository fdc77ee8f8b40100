"""The machine and the versions behind a clip."""

from __future__ import annotations

import importlib.metadata
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "diffusers", "transformers", "triton", "flash-attn-4", "av")


def machine(device: str) -> dict[str, Any]:
    """What computes: the device by name, the CPU, and how many threads torch uses."""
    import torch

    name = cpu_name()
    if device == "cuda" and torch.cuda.is_available():
        name = torch.cuda.get_device_name()
    return {"device": name, "cpu": cpu_name(), "threads": torch.get_num_threads()}


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str | None]:
    """None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
