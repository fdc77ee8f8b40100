"""The preset of a loaded model, and whether one is meant for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from jali.integration.models.registry import model_of
from jali.integration.models.size import video_scale_of
from jali.methods import METHODS
from jali.presets import Preset, load_preset, presets
from jali.value import suggest


def preset_for(
    name: str, model: str | None, pipe: Any = None,
    transformers: Sequence[tuple[str, nn.Module]] = (),
) -> Preset:  # fmt: skip
    """A preset by name. Where it differs between models and none is named, the pipeline tells."""
    known = sorted({preset.name for preset in presets()})
    if name.replace("-", "_") not in known:
        raise ValueError(f"unknown method or preset {name!r}{suggest(name, [*METHODS, *known])}")
    try:
        return load_preset(name, model)
    except ValueError:
        found = model_of(pipe, transformers) if model is None and transformers else None
        if found is None:
            raise
        return load_preset(name, found)


def check_preset(preset: Preset, pipe: Any, transformers: Sequence[tuple[str, nn.Module]]) -> None:
    """Refuse a preset whose video_scale is not the pixels and frames behind a token here. What it
    says of the text is checked against the grid of every call."""
    here, own = video_scale_of(pipe, transformers[0][1]), preset.video_scale
    if own is not None and here is not None and own != here:
        raise ValueError(
            f"preset {preset.name!r} of {preset.source} is for {own.depth} frames and "
            f"{own.height}×{own.width} pixels a token by its video_scale, but this pipeline makes "
            f"a token of {here.depth} frames and {here.height}×{here.width} pixels"
        )
