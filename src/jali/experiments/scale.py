"""What an experiment costs before it is run: tokens, GPU time and disk, from the cost model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jali.experiments.experiment import Experiment

if TYPE_CHECKING:
    from jali.integration.models.size import Strides

Q_BLOCK, K_BLOCK = 256, 128  # of a book's masks
LOSSLESS = 0.45  # bytes of ffv1 per byte of RGB: generated clips lie between 0.3 and 0.6
PEOPLE = 0.01  # the same for the mp4 beside it
RECORDING = 1.1  # a calibrating run against a dense one
# A transformer that pads its latent frames to whole patches takes more lengths than whole patches.
FRAMES = {"cogvideox1.5-5b": 4}


def known_strides(model: str) -> Strides | None:
    """What a size must be a multiple of; None for a model whose geometry is not written down."""
    from jali.integration.models.registry import MODELS
    from jali.integration.models.size import Strides

    card = MODELS.get(model)
    if card is None:
        return None
    frames, height, width = card.token_size
    return Strides(height, width, 0 if card.image else FRAMES.get(model, frames))


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds on one device, and bytes on disk. Loading, text encoder and VAE come on top."""

    tokens: int
    dense_clip: float
    sparse_clip: float
    calibrate: float
    benchmark: float
    quality: float
    book_bytes: int
    scratch_bytes: int  # while calibrating: two running means
    clip_bytes: int

    @property
    def seconds(self) -> float:
        return self.calibrate + self.benchmark + self.quality

    @property
    def bytes(self) -> int:
        return self.book_bytes + self.clip_bytes


def forecast(
    experiment: Experiment, device: str = "NVIDIA H200", backend: str = "fa4"
) -> Forecast | None:
    """Of a completed experiment; None for a model or device that nobody measured."""
    from jali.integration.forecast import attention_times, constants
    from jali.integration.models.registry import MODELS

    e, card = experiment, MODELS.get(experiment.model)
    known = constants()["devices"].get(device)
    if card is None or known is None:
        return None
    if not (e.height and e.width and e.num_frames and e.steps):
        raise ValueError("a forecast is of a completed experiment")
    card = dataclasses.replace(card, height=e.height, width=e.width, frames=e.num_frames)
    tokens = card.tokens
    guided = 1 if card.guidance.kind == "embedded" else 2  # with and without the prompt
    times = attention_times(
        heads=guided * card.heads, head_dim=card.head_dim, tokens=tokens,
        cost=0.5 if e.budget is None else e.budget, device=device, backend=backend,
    )  # fmt: skip
    if times is None:
        return None
    layers = sum(card.layers)
    rest = 2.0 * card.weights * tokens * guided / 1e9 / known["linear_tflops"]
    dense_layers = int(bool(e.dense_first_layer))
    dense = (rest + layers * times[0]) / 1e3
    sparse = (rest + (layers - dense_layers) * times[1] + dense_layers * times[0]) / 1e3
    variants, prompts = len(e.variants), len(e.prompts) if e.prompts else e.num_prompts
    dense_clip, sparse_clip = e.steps * dense, _sparse_clip(e, e.steps, dense, sparse)
    bench = min(e.bench_steps, e.steps)
    one_round = bench * dense + variants * _sparse_clip(e, bench, dense, sparse)
    blocks = math.ceil(tokens / Q_BLOCK) * math.ceil(tokens / K_BLOCK)
    blocks *= layers * e.steps * card.heads * e.wants_book
    pixels = e.height * e.width * e.num_frames * 3
    return Forecast(
        tokens=tokens,
        dense_clip=dense_clip,
        sparse_clip=sparse_clip,
        calibrate=e.calibration_prompts * dense_clip * RECORDING if e.wants_book else 0.0,
        benchmark=(e.bench_repeats + 1) * one_round,  # the first round warms up
        quality=prompts * (dense_clip + variants * sparse_clip),
        book_bytes=blocks + blocks // 8,  # importance in 8 bits, and one bit for the budget
        scratch_bytes=2 * 4 * blocks,
        clip_bytes=round(prompts * (1 + variants) * pixels * (LOSSLESS + PEOPLE)),
    )


def _sparse_clip(e: Experiment, steps: int, dense: float, sparse: float) -> float:
    warm = e.warmup_frac or 0
    count = math.ceil(warm * steps - 1e-9) if isinstance(warm, float) else min(warm, steps)
    return count * dense + (steps - count) * sparse


# What docs/scale.md shows: one line for each model and size, at the defaults of `experiment run`.
SHOWN: tuple[tuple[str, int | None, int | None], ...] = (
    ("wan-t2v-1.3b", None, None), ("wan-t2v-1.3b", 720, 1280), ("wan-t2v-14b", None, None),
    ("wan-t2v-14b", 720, 1280), ("wan2.2-ti2v-5b", None, None), ("wan2.2-t2v-a14b", None, None),
    ("cogvideox-5b", None, None), ("cogvideox1.5-5b", None, None), ("hunyuan-video", None, None),
    ("hunyuan-video-1.5", None, None), ("ltx-video", None, None),
)  # fmt: skip


def table() -> str:
    """GPU time and disk of one experiment for each model, as Markdown."""
    lines = [
        "| model | size | tokens | one clip dense | one clip at 0.5 | calibrate | benchmark "
        "| quality | one job | book | scratch | clips |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model, height, width in SHOWN:
        e = Experiment(tag="x", model=model, height=height, width=width).completed()
        found = forecast(e)
        assert found is not None, model
        times = (
            found.dense_clip, found.sparse_clip, found.calibrate, found.benchmark, found.quality,
            found.seconds,
        )  # fmt: skip
        cells = [_duration(seconds) for seconds in times]
        sizes = map(_size, (found.book_bytes, found.scratch_bytes, found.clip_bytes))
        lines.append(
            f"| `{model}` | {e.height}×{e.width}×{e.num_frames} | {found.tokens:,} | "
            + " | ".join([*cells[:-1], f"**{cells[-1]}**", *sizes])
            + " |"
        )
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _size(count: int) -> str:
    megabytes = count / 2**20
    gigabytes = megabytes / 1024
    if megabytes < 1000:
        return f"{megabytes:.0f} MB"
    return f"{gigabytes:.1f} GB" if gigabytes < 20 else f"{gigabytes:.0f} GB"
