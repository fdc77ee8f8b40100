"""Caches between steps, as people turn them on and off: those of diffusers, and cache-dit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import diffusers
import tiny
import torch
from diffusers import (
    FasterCacheConfig,
    FirstBlockCacheConfig,
    PyramidAttentionBroadcastConfig,
)

STEPS = 10


class Cache(NamedTuple):
    """How it is turned on for a pipeline, and off again."""

    on: Callable[[Any], None]
    off: Callable[[Any], None] = lambda pipe: pipe.transformer.disable_cache()


def of_diffusers(config: Callable[[Any], Any]) -> Cache:
    return Cache(lambda pipe: pipe.transformer.enable_cache(config(pipe)))


def _mag(_: Any) -> Any:
    """Skips every other step after the first two."""
    from diffusers import MagCacheConfig

    return MagCacheConfig(
        mag_ratios=torch.ones(STEPS), threshold=0.2, max_skip_steps=1, retention_ratio=0.2,
        num_inference_steps=STEPS,
    )  # fmt: skip


def _taylor(**more: Any) -> Callable[[Any], Any]:
    """Computes steps 0, 1, 2 and every third after them. Whole names are matched, so that its own
    patterns find nothing in Wan."""

    def config(_: Any) -> Any:
        from diffusers import TaylorSeerCacheConfig

        return TaylorSeerCacheConfig(
            cache_interval=3, disable_cache_before_step=3, taylor_factors_dtype=torch.float32,
            **more,
        )  # fmt: skip

    return config


def _pab(pipe: Any) -> Any:
    """Every third call computes: it counts calls of a layer, whichever branch they are of."""
    return PyramidAttentionBroadcastConfig(
        spatial_attention_block_skip_range=3, spatial_attention_timestep_skip_range=(100, 960),
        current_timestep_callback=lambda: pipe.current_timestep,
    )  # fmt: skip


def _faster(distilled: bool, every: int) -> Callable[[Any], Any]:
    """With guidance in one batch it also leaves out the unconditional half of it."""

    def config(pipe: Any) -> Any:
        return FasterCacheConfig(
            spatial_attention_block_skip_range=every,
            spatial_attention_timestep_skip_range=(-1, 960),
            unconditional_batch_skip_range=3, unconditional_batch_timestep_skip_range=(-1, 960),
            attention_weight_callback=lambda _: 0.3, is_guidance_distilled=distilled,
            tensor_format="BFCHW", current_timestep_callback=lambda: pipe.current_timestep,
        )  # fmt: skip

    return config


def of_cache_dit(first_blocks: int) -> Cache:
    """The real package. It compares so many blocks, and skips at most two steps in a row."""
    import cache_dit

    def on(pipe: Any) -> None:
        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=first_blocks, Bn_compute_blocks=0, max_warmup_steps=2,
            max_continuous_cached_steps=2, residual_diff_threshold=0.8,
        )  # fmt: skip
        cache_dit.enable_cache(pipe, cache_config=config)

    return Cache(on, cache_dit.disable_cache)


CACHES: dict[str, Cache] = {
    "first block": of_diffusers(lambda _: FirstBlockCacheConfig(threshold=0.15)),
    "pab": of_diffusers(_pab),
    "faster": of_diffusers(_faster(distilled=True, every=3)),
    "cache-dit": of_cache_dit(1),
}
if hasattr(diffusers, "MagCacheConfig"):
    CACHES["mag"] = of_diffusers(_mag)
if hasattr(diffusers, "TaylorSeerCacheConfig"):
    CACHES["taylor"] = of_diffusers(_taylor(cache_identifiers=[r"blocks\.\d+\.attn1"]))
    CACHES["taylor lite"] = of_diffusers(_taylor(use_lite_mode=True))
FASTER_BATCHED = of_diffusers(_faster(distilled=False, every=2))
SMALL = tiny.WAN_CALL | {"height": 64, "width": 64, "num_frames": 5}
