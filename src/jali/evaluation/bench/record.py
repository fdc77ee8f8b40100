"""The machine and the versions behind a figure."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import torch

from jali.version import __version__

PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cutlass-dsl", "numpy")


def machine(device: torch.device) -> dict[str, Any]:
    """Where and with what this was measured."""
    versions: dict[str, str | None] = {"jali": __version__}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    versions["torch"] = torch.__version__
    found: dict[str, Any] = {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "versions": versions,
        "cpu_threads": torch.get_num_threads(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        found["gpu"] = properties.name
        found["gpu_memory_gib"] = round(properties.total_memory / 2**30)
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["cuda"] = torch.version.cuda
    return found


def write(path: Path, result: dict[str, Any]) -> None:
    """The whole file or nothing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
