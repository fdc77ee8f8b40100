"""What caches between steps and sparse attention give alone and together, on nano.

    python -m benchmarks.stacking --output benchmarks/results/stacking-nano-cpu.json

Every clip has the prompt and noise of the dense run without a cache, and PSNR is against that run's
frames. Seconds are of the denoising loop on one thread, as the processor counted them, so that a
busy machine does not show much; runs of one prompt follow each other, and only their ratios are
stated. Runs without sparse attention go through the method `dense`: the stock operation, which also
counts what a cache skips. A file that is there already goes on where it ended.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import datetime
import io
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali import __version__, load_pipeline, sparse_processor_mode
from jali.files import read_json, write_json
from jali.generation.machine import cpu_name
from training.autoencoder import decode_whole
from training.scene import prompts

SIZE = {"height": 128, "width": 128, "num_frames": 17}
STEPS, GUIDANCE = 12, 4.0
SPARSE: dict[str, dict[str, Any]] = {
    "none": {"method": "dense"},
    "entropy": {"method": "entropy", "total": 0.4, "dense_first_layer": True},
    "entropy, first block sparse": {"method": "entropy", "total": 0.4},
}
PAIRS = [
    *(("none", sparse) for sparse in SPARSE),
    *(("first block", sparse) for sparse in SPARSE),
    *(
        (cache, sparse)
        for cache in ("cache-dit", "mag", "taylor", "pab", "faster")
        for sparse in ("none", "entropy")
    ),
]


def configs(pipe: Any, ratios: list[float]) -> dict[str, Any]:
    """As their authors set them, but for what twelve steps need."""
    import diffusers as d

    attention: dict[str, Any] = {
        "spatial_attention_block_skip_range": 2,
        "spatial_attention_timestep_skip_range": (100, 900),
        "current_timestep_callback": lambda: pipe.current_timestep,
    }
    return {
        "first block": d.FirstBlockCacheConfig(threshold=0.2),
        "mag": d.MagCacheConfig(
            mag_ratios=ratios, threshold=0.12, max_skip_steps=2, num_inference_steps=STEPS
        ),
        "taylor": d.TaylorSeerCacheConfig(
            cache_interval=3, disable_cache_before_step=3, use_lite_mode=True,
            taylor_factors_dtype=torch.float32,
        ),
        "pab": d.PyramidAttentionBroadcastConfig(**attention),
        "faster": d.FasterCacheConfig(
            **attention, is_guidance_distilled=True, tensor_format="BCFHW",
            attention_weight_callback=lambda _: 0.5,
        ),
    }  # fmt: skip


@contextlib.contextmanager
def cached(pipe: Any, name: str, ratios: list[float]) -> Iterator[None]:
    """The pipeline with a cache."""
    if name == "none":
        yield
    elif name == "cache-dit":
        import cache_dit

        config = cache_dit.DBCacheConfig(
            Fn_compute_blocks=1, Bn_compute_blocks=0, max_warmup_steps=3,
            max_continuous_cached_steps=2, residual_diff_threshold=0.2,
        )  # fmt: skip
        taylor = cache_dit.TaylorSeerCalibratorConfig(taylorseer_order=1)
        cache_dit.enable_cache(pipe, cache_config=config, calibrator_config=taylor)
        yield
        cache_dit.disable_cache(pipe)
    else:
        pipe.transformer.enable_cache(configs(pipe, ratios)[name])
        yield
        pipe.transformer.disable_cache()


def mag_ratios(pipe: Any, denoise: Callable[[], Any]) -> list[float]:
    """What MagCache wants to know of a model: it prints it."""
    from diffusers import MagCacheConfig

    pipe.transformer.enable_cache(MagCacheConfig(calibrate=True, num_inference_steps=STEPS))
    with contextlib.redirect_stdout(io.StringIO()) as said:
        denoise()
    pipe.transformer.disable_cache()
    line = next(line for line in said.getvalue().splitlines() if line.startswith("[1"))
    return [round(x, 4) for x in ast.literal_eval(line)]


class Studio:
    """nano on one thread."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        self.pipe = load_pipeline("nano", device="cpu", dtype=torch.float32)
        self.pipe.set_progress_bar_config(disable=True)

    def denoise(self, text: str, seed: int) -> Tensor:
        return self.pipe(
            text, **SIZE, num_inference_steps=STEPS, guidance_scale=GUIDANCE, output_type="latent",
            generator=torch.Generator().manual_seed(seed),
        ).frames  # fmt: skip

    @torch.no_grad()
    def frames(self, latents: Tensor) -> Tensor:
        vae = self.pipe.vae
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        clip = decode_whole(vae, latents * std + mean).clamp(-1, 1) * 0.5 + 0.5
        return (clip * 255).round()

    def row(self, text: str, seed: int, pair: tuple[str, str], ratios: list[float]) -> Any:
        cache, sparse = pair
        with (
            cached(self.pipe, cache, ratios),
            sparse_processor_mode(self.pipe, **SPARSE[sparse], finite="off") as run,
        ):
            start, wall = time.process_time(), time.perf_counter()
            latents = self.denoise(text, seed)
            seconds, wall = time.process_time() - start, time.perf_counter() - wall
        stats = run.stats()
        calls = stats.sums.calls + stats.skipped
        done = stats.sums.done / (stats.sums.work / stats.sums.calls) / calls
        return self.frames(latents), {
            "prompt": seed, "cache": cache, "sparse": sparse, "seconds": round(seconds, 2),
            "wall": round(wall, 2), "skipped": stats.skipped, "calls": calls,
            "attention": round(done, 4),
        }  # fmt: skip


def psnr(one: Tensor, other: Tensor) -> float:
    return float(20 * torch.log10(255 / (one - other).square().mean().sqrt()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=3)
    parser.add_argument("--only", type=int, help="one of them")
    given = parser.parse_args()
    logging.disable(logging.WARNING)
    studio = Studio()
    texts = list(prompts(given.prompts))
    known: dict[str, Any] = read_json(given.output) if given.output.exists() else {}
    ratios = known.get("mag_ratios") or mag_ratios(
        studio.pipe, lambda: studio.denoise(texts[0], 100)
    )
    rows: list[dict[str, Any]] = known.get("rows", [])
    for seed, text in enumerate(texts):
        made = {(row["cache"], row["sparse"]) for row in rows if row["prompt"] == seed}
        if made == set(PAIRS) or given.only not in (None, seed):
            continue
        dense = studio.frames(studio.denoise(text, seed))  # also warms up
        for pair in PAIRS:
            if pair in made:
                continue
            frames, row = studio.row(text, seed, pair, ratios)
            same = torch.equal(frames, dense)
            row["psnr"] = None if same else round(psnr(frames, dense), 2)
            rows.append(row)
            print(row, flush=True)
            write_json(given.output, {
                "rows": rows, "mag_ratios": ratios, "size": SIZE, "steps": STEPS,
                "guidance": GUIDANCE, "date": datetime.date.today().isoformat(),
                "jali": __version__, "torch": torch.__version__,
                "machine": cpu_name(), "threads": 1,
            })  # fmt: skip


if __name__ == "__main__":
    main()
