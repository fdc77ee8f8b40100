"""One experiment: everything that decides its numbers, as a value."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from jali.experiments.results import check_tag

CACHED = "cached"  # the variant that replays a calibrated book
# These cannot change a number, so another value is no other experiment.
INDIFFERENT = ("tag",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """Calibrate, benchmark, quality, report: of one model, size, method and budget.

    `completed` fills in what is None with the model's and the method's defaults; only such an
    experiment is run. Dense is part of every experiment, and `cached` of those that have a book:
    made by the calibrate stage, or given as `masks`. Metrics that are not named are all that can
    run where the job runs.
    """

    tag: str
    model: str
    path: str | None = None
    height: int | None = None
    width: int | None = None
    num_frames: int | None = None
    steps: int | None = None
    guidance: float | None = None
    seed: int = 0
    method: str = "entropy"
    preset: str | None = None
    budget: float | None = None
    warmup_frac: float | int | None = None
    dense_first_layer: bool | None = None
    backend: str = "auto"
    num_prompts: int = 5
    prompts: tuple[str, ...] | None = None
    calibrate: bool = True
    calibration_prompts: int = 2
    masks: str | None = None
    bench_steps: int = 5
    bench_repeats: int = 3
    metrics: tuple[str, ...] | None = None
    cpu_offload: bool = False
    context_parallel: int = 1
    tensor_parallel: int = 1
    device: str | None = None
    dtype: str | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        check_tag(self.tag)
        counts = ("num_prompts", "calibration_prompts", "bench_steps", "bench_repeats",
                  "context_parallel", "tensor_parallel")  # fmt: skip
        for name in counts:
            _check_count(name, getattr(self, name))
        for name in ("height", "width", "num_frames", "steps", "threads"):
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        for name in ("calibrate", "cpu_offload", "dense_first_layer"):
            value = getattr(self, name)
            optional = name == "dense_first_layer" and value is None
            if not optional and not isinstance(value, bool):
                raise ValueError(f"{name} must be true or false, got {value!r}")
        for name in ("model", "path", "method", "preset", "backend", "masks", "device", "dtype"):
            value = getattr(self, name)
            optional = value is None and name not in ("model", "method", "backend")
            if not optional and (not isinstance(value, str) or not value.strip()):
                raise ValueError(f"{name} must be text, got {value!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be an int >= 0, got {self.seed!r}")
        _check_number("budget", self.budget, 0.0, 1.0, above=True)
        _check_number("guidance", self.guidance, 0.0, math.inf)
        if isinstance(self.warmup_frac, float):
            _check_number("warmup_frac", self.warmup_frac, 0.0, 1.0)
        elif self.warmup_frac is not None and (
            isinstance(self.warmup_frac, bool)
            or not isinstance(self.warmup_frac, int)
            or self.warmup_frac < 0
        ):
            raise ValueError(
                f"warmup_frac is a share in [0, 1] or a count of steps, got {self.warmup_frac!r}"
            )
        for name in ("prompts", "metrics"):
            value = getattr(self, name)
            object.__setattr__(self, name, None if value is None else tuple(value))
        if self.prompts is not None and not (self.prompts and all(self.prompts)):
            raise ValueError("prompts must be at least one text, and none of them empty")
        if self.metrics is not None and not self.metrics:
            raise ValueError("name at least one metric, e.g. psnr")
        if self.preset is not None and self.method != "entropy":
            raise ValueError("give a method or a preset, not both: a preset names its method")
        if self.context_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError("give context_parallel or tensor_parallel, not both")

    @property
    def ranks(self) -> int:
        return max(self.context_parallel, self.tensor_parallel)

    @property
    def variant(self) -> str:
        """What the sparse rows are called."""
        return self.preset or self.method

    @property
    def wants_book(self) -> bool:
        """Whether there is something to calibrate: entropy's importance is what a book holds."""
        recorded = self.method in ("entropy", CACHED) and self.preset is None
        return recorded and self.calibrate and self.masks is None

    @property
    def has_book(self) -> bool:
        return self.wants_book or self.masks is not None

    @property
    def variants(self) -> tuple[str, ...]:
        """The sparse runs of this experiment."""
        if self.variant == CACHED:
            return (CACHED,)
        return (self.variant, CACHED) if self.has_book else (self.variant,)

    def completed(self) -> Experiment:
        """With every default filled in, checked against the registry and the methods."""
        from jali.backends import check_name
        from jali.integration.models.registry import model_card
        from jali.methods import METHODS, near

        card = model_card(self.model)
        if self.preset is not None:
            from jali.presets import load_preset

            load_preset(self.preset, card.name)
        elif self.method == "dense":
            raise ValueError("dense is measured in every experiment; name a sparse method")
        elif self.method not in METHODS and self.method != CACHED:
            known = [name for name in (*METHODS, CACHED) if name != "dense"]
            raise ValueError(f"unknown method {self.method!r}{near(self.method, known)}")
        if self.ranks > 1 and self.wants_book:
            raise ValueError(
                "calibrating needs every head in one process: with context_parallel or "
                "tensor_parallel give masks (a book made on one GPU serves), or skip calibration"
            )
        if self.method == CACHED and not self.has_book:
            raise ValueError("method cached needs masks, or the calibrate stage")
        if self.metrics is not None:
            from jali.evaluation.quality.evaluation import METRICS

            for name in self.metrics:
                if name not in METRICS:
                    raise ValueError(f"unknown metric {name!r}{near(name, METRICS)}")
        check_name(self.backend)
        by_name = self.preset is None
        height, width = self.height or card.height, self.width or card.width
        frames = self.num_frames or card.frames
        check_static_size(card.name, height, width, frames)
        return replace(
            self,
            model=card.name,
            height=height,
            width=width,
            num_frames=frames,
            steps=self.steps or card.steps,
            guidance=card.guidance.scale if self.guidance is None else self.guidance,
            budget=0.5 if self.budget is None and by_name else self.budget,
            warmup_frac=0.2 if self.warmup_frac is None and by_name else self.warmup_frac,
            dense_first_layer=(
                True if self.dense_first_layer is None and by_name else self.dense_first_layer
            ),
        )

    def to_dict(self) -> dict[str, Any]:
        return {
            f.name: list(v) if isinstance(v := getattr(self, f.name), tuple) else v
            for f in dataclasses.fields(self)
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Experiment:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"an experiment has no {', '.join(unknown)}; known: {sorted(known)}")
        return cls(**data)

    def differences(self, other: Experiment) -> list[str]:
        """What of another experiment is not the same, in words."""
        mine, theirs = self.to_dict(), other.to_dict()
        return [
            f"{name} {theirs[name]!r}, now {mine[name]!r}"
            for name in mine
            if name not in INDIFFERENT and mine[name] != theirs[name]
        ]


def check_static_size(model: str, height: int, width: int, frames: int) -> None:
    """Refuse a size that a model cannot make, before any of it is loaded or submitted."""
    from jali.experiments.scale import known_strides
    from jali.integration.models.registry import model_card
    from jali.integration.models.size import check_size

    strides = known_strides(model)
    if strides is not None:
        check_size(strides, height, width, frames, model_card(model))


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name} must be an int >= 1, got {value!r}")


def _check_number(name: str, value: Any, low: float, high: float, *, above: bool = False) -> None:
    if value is None:
        return
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if (
        not number
        or not math.isfinite(value)
        or not low <= value <= high
        or (above and value == low)
    ):
        where = f"above {low:g} and at most {high:g}" if above else f"in [{low:g}, {high:g}]"
        raise ValueError(f"{name} must be a number {where}, got {value!r}")
