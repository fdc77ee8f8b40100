"""Which heights, widths and frame counts a model can make, and how much lies behind a token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jali.error import ArgumentError
from jali.integration.models.registry import ModelCard
from jali.value import check_count

if TYPE_CHECKING:
    from torch import nn

    from jali.presets import VideoScale


@dataclass(frozen=True, slots=True)
class Strides:
    """What height and width must be multiples of (pixels per token, or what the pipeline insists
    on), and frames per latent frame (0: an image).

    `limits` are the largest height and width, where the transformer's positions end.
    """

    height: int
    width: int
    frames: int
    limits: tuple[int, int] | None = None


def strides_of(pipe: Any, card: ModelCard) -> Strides:
    """From the loaded VAE and transformer, so that checkpoints with other strides are right too."""
    from jali.integration.geometry import patch_of

    spatial, temporal = _vae_scale(pipe)
    config = pipe.transformer.config
    height, width = (
        math.lcm(spatial * card.packing * side, card.multiple) for side in patch_of(config)[1:]
    )
    limits = None
    if card.config.get("patch_size_t"):  # CogVideoX 1.5 cuts its positions out of a fixed table
        limits = (config.sample_height * spatial, config.sample_width * spatial)
    return Strides(height, width, 0 if card.image else temporal or 1, limits)


def usual_strides(card: ModelCard) -> Strides:
    """Those of the model's own checkpoint, which needs not be there yet."""
    frames, height, width = card.token_size
    # A transformer that pads its latent frames to whole patches takes more than whole patches.
    patch = card.config.get("patch_size_t") or 1
    return Strides(
        math.lcm(height, card.multiple),
        math.lcm(width, card.multiple),
        0 if card.image else frames // patch,
    )


def video_scale_of(pipe: Any, transformer: nn.Module) -> VideoScale | None:
    """Pixels and frames behind one token; None where the pipeline does not say."""
    from jali.integration.geometry import patch_of
    from jali.presets import VideoScale

    spatial, temporal = _vae_scale(pipe)
    if not spatial or not temporal:
        return None
    frames, height, width = patch_of(transformer.config)
    return VideoScale(width=spatial * width, height=spatial * height, depth=temporal * frames)


def _vae_scale(pipe: Any) -> tuple[int, int]:
    """Pixels and frames behind one latent, under the names that pipelines have for them; 0 where
    there is none."""
    spatial = ("vae_scale_factor_spatial", "vae_spatial_compression_ratio", "vae_scale_factor")
    temporal = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
    first, second = (
        next((int(getattr(pipe, name)) for name in names if getattr(pipe, name, None)), 0)
        for names in (spatial, temporal)
    )
    return first, second


def check_size(strides: Strides, height: int, width: int, frames: int, card: ModelCard) -> None:
    """Refuse what the pipeline would round or fail on, naming the nearest sizes that fit."""
    for name, value, stride in (
        ("height", height, strides.height),
        ("width", width, strides.width),
    ):
        check_count(name, value)
        if value % stride:
            raise ArgumentError(
                name,
                f": {card.name} makes a {name} that is a multiple of {stride} pixels, got {value}; "
                f"{_nearest(value - value % stride, stride)}",
            )
    if strides.limits and (height > strides.limits[0] or width > strides.limits[1]):
        raise ArgumentError(
            "height" if height > strides.limits[0] else "width",
            f": {card.name} makes at most {strides.limits[0]}×{strides.limits[1]} pixels "
            f"(height × width), got {height}×{width}",
        )
    check_count("num_frames", frames)
    if not strides.frames:
        if frames != 1:
            raise ArgumentError(
                "num_frames", f": {card.name} makes images: num_frames is 1, got {frames}"
            )
    elif rest := (frames - 1) % strides.frames:
        raise ArgumentError(
            "num_frames",
            f": {card.name} makes {strides.frames}·k + 1 frames, got {frames}; "
            f"{_nearest(frames - rest, strides.frames)}",
        )


def _nearest(below: int, stride: int) -> str:
    return f"the nearest are {' and '.join(str(n) for n in (below, below + stride) if n)}"
