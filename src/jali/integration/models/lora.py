"""LoRA weights: where they lie, and into which expert of a pipeline they go."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.error import ArgumentError
from jali.integration.models.checkpoint import HUB_ID

Lora = str | os.PathLike[str]


@dataclass(frozen=True, slots=True)
class LoraSource:
    """A repository or folder, and the file in it; no file means the usual one."""

    location: str
    folder: str | None = None
    file: str | None = None


def lora_source(lora: Lora) -> LoraSource:
    """What a file, a folder with one file, a hub id or REPO:FOLDER/FILE means."""
    path = Path(lora).expanduser()
    if path.is_file():
        return LoraSource(str(path.parent), file=path.name)
    if path.is_dir():
        files = sorted(file.name for file in path.glob("*.safetensors"))
        if len(files) != 1:
            what = f"{len(files)} .safetensors files ({', '.join(files)})" if files else "none"
            raise ArgumentError(
                "lora", f": {path} should hold one .safetensors file, and holds {what}"
            )
        return LoraSource(str(path), file=files[0])
    repo, _, inside = str(lora).partition(":")
    if not HUB_ID.fullmatch(repo):
        raise FileNotFoundError(f"no LoRA at {lora}; pass a file, a folder or REPO:FOLDER/FILE")
    if not inside:
        return LoraSource(repo)
    folder, _, file = inside.rpartition("/")
    if not file:
        raise ArgumentError("lora", f"{str(lora)!r} names no file; write REPO:FOLDER/FILE")
    return LoraSource(repo, folder or None, file)


def lora_sources(lora: Lora | Sequence[Lora | None], experts: int) -> tuple[LoraSource | None, ...]:
    """One for each expert. A single LoRA is for all of them; a pair is for the high-noise and the
    low-noise expert, either of which may go without (None)."""
    if isinstance(lora, str | os.PathLike):
        return (lora_source(lora),) * experts
    if experts == 1 or len(lora) != experts:
        raise ValueError(
            f"this model has {experts} expert{'s' * (experts > 1)}, but lora names {len(lora)} of "
            f"them: {lora!r}; "
            + ("give one LoRA" if experts == 1 else "give one for both, or a pair (high, low)")
        )
    return tuple(None if each is None else lora_source(each) for each in lora)


def load_lora(pipe: Any, sources: Sequence[LoraSource | None], hub: Mapping[str, Any]) -> None:
    """Load each expert's LoRA into it."""
    if not hasattr(pipe, "load_lora_weights"):
        raise ValueError(f"{type(pipe).__name__} takes no LoRA")
    for expert, source in zip(("transformer", "transformer_2"), sources, strict=False):
        if source is None:
            continue
        second = {"load_into_transformer_2": True} if expert == "transformer_2" else {}
        pipe.load_lora_weights(
            source.location, weight_name=source.file, subfolder=source.folder, adapter_name="jali",
            **second, **hub,
        )  # fmt: skip
        # diffusers only warns where no weight of the file fits, and then generates without it.
        if "jali" not in getattr(getattr(pipe, expert), "peft_config", {}):
            raise ValueError(
                f"no weight of the LoRA {source.file or source.location} fits this model's {expert}"
            )
