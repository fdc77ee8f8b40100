"""The machine and the versions behind a figure."""

from __future__ import annotations

import datetime
from typing import Any

import torch

from jali.generation.machine import versions
from jali.version import __version__

PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "numpy")


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what this was measured."""
    installed = versions(PACKAGES)
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": installed.pop("python"),
        "versions": {"jali": __version__, **installed, "torch": torch.__version__},
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = torch.version.cuda
    return found
