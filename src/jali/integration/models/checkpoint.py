"""Where weights come from and go to: folders and hub ids, devices, precisions, offload."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.device import check_device
from jali.error import ArgumentError
from jali.integration.models.integrity import check_integrity, read_part
from jali.integration.models.registry import ModelCard, matching, mismatch
from jali.name import DTYPES

if TYPE_CHECKING:
    import torch

HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
OFFLOADS = (False, True, "model", "sequential")


def choose_device(device: str | torch.device | None) -> torch.device:
    import torch

    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    check_device(str(device))
    device = torch.device(device)
    count = torch.cuda.device_count() if device.type == "cuda" else 0
    if count and (device.index or 0) >= count:
        raise ArgumentError("device", f"is {device}, but there are {count} GPUs, counted from 0")
    return device


def check_offload(offload: bool | str, device: str) -> None:
    """`device` is its kind."""
    if offload not in OFFLOADS:
        raise ArgumentError(
            "cpu_offload", f"is False, True, 'model' or 'sequential', got {offload!r}"
        )
    if offload and device == "cpu":
        raise ArgumentError(
            "cpu_offload",
            "moves parts of a model between the CPU and a GPU, but the device is the CPU; "
            "leave it out",
        )


def choose_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    import torch

    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    name = str(dtype).removeprefix("torch.") if isinstance(dtype, torch.dtype) else dtype
    if name not in DTYPES:
        raise ArgumentError("dtype", f"must be one of {', '.join(DTYPES)}, got {dtype!r}")
    found: torch.dtype = getattr(torch, DTYPES[name])
    return found


def dtype_argument(diffusers: Any) -> str:
    """`torch_dtype` until it was renamed; the new name is refused by older versions silently."""
    major, minor = map(int, diffusers.__version__.split(".")[:2])
    return "dtype" if (major, minor) >= (0, 42) else "torch_dtype"


def find_checkpoint(card: ModelCard, path: str | os.PathLike[str] | None) -> str:
    """A folder that holds a pipeline, or a hub id. A folder is looked through: what is missing or
    damaged is named."""
    if path is None and card.hub is not None:
        return card.hub
    if path is None:
        path = card.location
        if not Path(path, "model_index.json").is_file():
            raise FileNotFoundError(
                f"{Path(path, 'model_index.json')} is missing: this installation of jali came "
                f"without the weights of {card.name}; install it again, or pass path= with their "
                f"folder"
            )
    folder = Path(path).expanduser()
    if not folder.exists():
        if isinstance(path, str) and HUB_ID.fullmatch(path):
            return path
        raise FileNotFoundError(
            f"no folder {path}; path is a local folder or a hub id (owner/name)"
        )
    if not (folder / "model_index.json").is_file():
        raise ValueError(
            f"{folder} holds no model_index.json, so it is not a diffusers pipeline; pass the "
            f"folder that does (converted checkpoints have 'Diffusers' in their name)"
        )
    check_integrity(folder)
    return str(folder)


def check_checkpoint(card: ModelCard, source: str, hub: Mapping[str, Any]) -> None:
    """Refuse another model's checkpoint before its weights are read."""
    index = _read(card, source, "model_index.json", hub)
    config: Mapping[str, Any] = {}
    if card.config and index.get("_class_name") == card.pipeline:
        config = _read(card, source, "transformer/config.json", hub)
    problem = mismatch(card, index, config)
    if not problem:
        return
    others = ", ".join(other.name for other in matching(index, config))
    hint = f"it looks like {others}" if others else "no model of the registry looks like it"
    raise ValueError(f"{source} is not {card.name}: {problem}; {hint}")


def _read(card: ModelCard, source: str, name: str, hub: Mapping[str, Any]) -> Mapping[str, Any]:
    if os.path.isdir(source):
        file = os.path.join(source, name)
        if not os.path.isfile(file):
            raise FileNotFoundError(f"{source} is incomplete: it holds no {name}")
    else:
        from huggingface_hub import hf_hub_download

        with explain_hub_errors(card, source):
            file = hf_hub_download(source, name, **hub)
    return read_part(Path(file))


@contextlib.contextmanager
def explain_hub_errors(card: ModelCard, source: str) -> Iterator[None]:
    """A hub that cannot be reached is the usual reason; say what to do."""
    try:
        yield
    except OSError as error:
        if os.path.isdir(source):
            raise
        raise OSError(
            f"cannot load {card.name} from the hub id {source}: it is not in the hub's cache, and "
            f"fetching it failed ({type(error).__name__}: {str(error).splitlines()[0]}); download "
            f"it once where there is a network, or pass path= with a local folder"
        ) from error
