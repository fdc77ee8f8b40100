"""What an experiment costs before it is run: tokens, GPU time and disk, from the cost model."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jali.experiments.experiment import Experiment

if TYPE_CHECKING:
    from jali.generation import Settings
    from jali.integration.models.size import Strides

Q_BLOCK, K_BLOCK = 256, 128  # of a book's masks
LOSSLESS = 0.45  # bytes of ffv1 per byte of RGB: generated clips lie between 0.3 and 0.6
PEOPLE = 0.01  # the same for the mp4 beside it
RECORDING = 1.1  # a calibrating run against a dense one


def known_strides(model: str) -> Strides | None:
    """What a size must be a multiple of; None for a model whose geometry is not written down."""
    from jali.integration.models.registry import MODELS
    from jali.integration.models.size import usual_strides

    return usual_strides(MODELS[model]) if model in MODELS else None


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

    e, s = experiment, experiment.settings
    card = MODELS.get(s.model)
    known = constants()["devices"].get(device)
    if card is None or known is None:
        return None
    if not (s.height and s.width and s.num_frames and s.steps):
        raise ValueError("a forecast is of a completed experiment")
    card = dataclasses.replace(card, height=s.height, width=s.width, frames=s.num_frames)
    tokens = card.tokens
    guided = 1 if card.guidance.kind == "embedded" else 2  # with and without the prompt
    times = attention_times(
        heads=guided * card.heads, head_dim=card.head_dim, tokens=tokens,
        cost=0.5 if s.budget is None else s.budget, device=device, backend=backend,
    )  # fmt: skip
    if times is None:
        return None
    layers = sum(card.layers)
    rest = 2.0 * card.weights * tokens * guided / 1e9 / known["linear_tflops"]
    dense_layers = int(bool(s.dense_first_layer))
    dense = (rest + layers * times[0]) / 1e3
    sparse = (rest + (layers - dense_layers) * times[1] + dense_layers * times[0]) / 1e3
    variants, prompts = len(e.variants), len(e.prompts) if e.prompts else e.num_prompts
    dense_clip, sparse_clip = s.steps * dense, _sparse_clip(s, s.steps, dense, sparse)
    bench = min(e.bench_steps, s.steps)
    one_round = bench * dense + variants * _sparse_clip(s, bench, dense, sparse)
    blocks = math.ceil(tokens / Q_BLOCK) * math.ceil(tokens / K_BLOCK)
    blocks *= layers * s.steps * card.heads * e.wants_book
    pixels = s.height * s.width * s.num_frames * 3
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


def _sparse_clip(settings: Settings, steps: int, dense: float, sparse: float) -> float:
    warm = settings.warmup_frac or 0
    count = math.ceil(warm * steps - 1e-9) if isinstance(warm, float) else min(warm, steps)
    return count * dense + (steps - count) * sparse
