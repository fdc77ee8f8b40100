"""Which model of the registry a pipeline is, and whether a preset is meant for it."""

from __future__ import annotations

from typing import Any

from torch import nn

from jali.integration.geometry import patch_of
from jali.integration.models.registry import MODELS, ModelCard
from jali.presets import Preset, VideoScale, load_preset


def model_of(pipe: Any, transformers: list[tuple[str, nn.Module]]) -> str | None:
    """The registry's name of a loaded model, by its class, depth and heads; None where no card, or
    more than one, fits. Another pipeline around the same transformer (image to video) counts."""
    config = getattr(transformers[0][1], "config", None)
    if config is None:
        return None
    found = [card for card in MODELS.values() if _same_size(card, config)]
    if pipe is not None:
        found = [card for card in found if card.experts == len(transformers)]
        found = [card for card in found if card.pipeline == type(pipe).__name__] or found
    return found[0].name if len(found) == 1 else None


def _same_size(card: ModelCard, config: Any) -> bool:
    stacks = [config.get(name) for name in ("num_layers", "num_single_layers")]
    sizes = (config.get("num_attention_heads"), config.get("attention_head_dim"))
    return (
        tuple(depth for depth in stacks if depth) == card.layers
        and sizes == (card.heads, card.head_dim)
        and all((config.get(k) or None) == (v or None) for k, v in card.config.items())
    )


def preset_for(
    name: str, model: str | None, pipe: Any, transformers: list[tuple[str, nn.Module]]
) -> Preset:
    """A preset by name. Where it differs between models and none is named, the pipeline tells."""
    if model is not None:
        return load_preset(name, model)
    try:
        return load_preset(name)
    except ValueError:
        found = model_of(pipe, transformers)
        if found is None:
            raise
        return load_preset(name, found)


def check_preset(preset: Preset, pipe: Any, transformers: list[tuple[str, nn.Module]]) -> None:
    """Refuse a preset whose video_scale is not the pixels and frames behind a token here. What it
    says of the text is checked against the grid of every call."""
    here = scale_of(pipe, transformers[0][1])
    if preset.video_scale is None or here is None or preset.video_scale == here:
        return
    own = preset.video_scale
    raise ValueError(
        f"preset {preset.name!r} of {preset.source} is for {own.depth} frames and "
        f"{own.height}×{own.width} pixels a token by its video_scale, but this pipeline makes a "
        f"token of {here.depth} frames and {here.height}×{here.width} pixels"
    )


def scale_of(pipe: Any, transformer: nn.Module) -> VideoScale | None:
    """Pixels and frames behind one token; None where the pipeline does not say."""
    spatial = _first(pipe, "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
    temporal = _first(pipe, "vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    if not spatial or not temporal:
        return None
    frames, high, wide = patch_of(transformer.config)
    return VideoScale(width=spatial * wide, height=spatial * high, depth=temporal * frames)


def _first(pipe: Any, *names: str) -> int | None:
    values = (getattr(pipe, name, None) for name in names)
    return next((int(value) for value in values if value), None)
