"""What came of a tuning: the point that was chosen, what held-out clips say of it, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jali.evaluation.arena.record import Record
from jali.evaluation.arena.row import Row
from jali.evaluation.quality.interval import (
    FEWEST,
    POSITIVE,
    interval,
    interval_of_next,
)
from jali.evaluation.quality.measure import describe
from jali.evaluation.tuning.search import margin
from jali.evaluation.tuning.trial import Trials
from jali.integration import forecast
from jali.integration.models.registry import model_card
from jali.integration.recipe import DIGITS, Measured, RunSize, Spread, Target
from jali.methods import Method
from jali.presets import VideoScale

UNITS = {"psnr": " dB", "ssim": "", "lpips": "", "speedup": "×"}


@dataclass(frozen=True)
class Found:
    """A point that was tried on the prompts that decide: what they show in the mean."""

    row: Row
    records: tuple[Record, ...]
    metrics: Mapping[str, float]

    def margin(self, target: Target) -> float:
        return margin(target, self.metrics[target.metric])

    def __str__(self) -> str:
        return f"{self.row.label} at a total of {self.row.total:g}"


def bounds_of(metric: str) -> tuple[float, float]:
    """Between which values a metric can be."""
    return POSITIVE if metric == "speedup" else describe(metric).bounds


def found_of(trials: Trials, row: Row, firsts: Sequence[int]) -> Found:
    known = trials.results.of(row)
    records = tuple(known[first] for first in firsts)
    names = [*records[0].metrics, "speedup"]
    return Found(row, records, {name: trials.value(records, name) for name in names})


def choose(candidates: Sequence[Found], target: Target, saves: str = "time") -> Found | None:
    """Of every method and curve the total on the edge; of those that meet a quality the fastest (or
    the one with the least work), of those that meet a speed the nearest to dense. None where none
    does."""
    edge: dict[str, Found] = {}
    most = target.metric == "speedup"
    for one in sorted(candidates, key=lambda one: one.row.total or 0, reverse=not most):
        if one.margin(target) >= 0:
            edge[f"{one.row.label} {one.row.spread}"] = one
    return max(edge.values(), key=lambda one: worth(one, target, saves), default=None)


def worth(one: Found, target: Target, saves: str) -> float:
    """What is wanted the most of, among all that meet a target."""
    if target.metric == "speedup":
        return one.metrics["psnr"]
    if saves == "time":
        return one.metrics["speedup"]
    return -sum(record.achieved + record.planning for record in one.records) / len(one.records)


def measured_of(trials: Trials, records: Sequence[Record]) -> Measured:
    """What held-out clips say, with the intervals of their mean and of one more clip."""
    sizes = [len(trials.results.group(record.first)) for record in records]
    names = [n for n in ("psnr", "ssim", "lpips") if all(n in r.metrics for r in records)]

    def mean(name: str) -> float:
        weighed = (getattr(r, name) * n for r, n in zip(records, sizes, strict=True))
        return round(sum(weighed) / sum(sizes), 4)

    return Measured(
        clips=sum(sizes),
        metrics={n: _spread(trials.values(records, n), n) for n in (*names, "speedup")},
        work=mean("achieved"),
        planning=mean("planning"),
    )


def _spread(values: Sequence[float], metric: str) -> Spread:
    bounds, digits = bounds_of(metric), DIGITS[metric] + 2
    found, more = interval(values, bounds), interval_of_next(values, bounds)
    assert found.mean is not None

    def rounded(value: float | None) -> float | None:
        return None if value is None else round(value, digits)

    ends = more or (None, None)
    return Spread(
        round(found.mean, digits), rounded(found.low), rounded(found.high), *map(rounded, ends)
    )


def elsewhere(model: str, run: RunSize, method: Method, work: float) -> dict[str, float]:
    """By the cost model, how many times as fast all transformer calls would be on the devices that
    it knows. Not where dense attention is shorter than what a sparse call takes at least: there
    launches decide, and the model knows arithmetic."""
    card, found = model_card(model), {}
    frames, height, width = card.token_size
    box = VideoScale(width, height, frames).box(run.num_frames, run.height, run.width)
    for device, known in forecast.constants()["devices"].items():
        pooled = method.executed_ratios != (1,)
        backend = "torch" if "fa4" not in known else "fa4+triton" if pooled else "fa4"
        call: dict[str, Any] = {
            "head_dim": card.head_dim, "tokens": box.tokens + card.text_tokens, "cost": work,
            "backend": backend,
        }  # fmt: skip
        times = forecast.attention_times(heads=card.batch * card.heads, device=device, **call)
        if times is None or times[0] < known[backend]["fixed_ms"]:
            continue
        faster = forecast.speedup_on(
            device, heads=card.heads, batch=card.batch, sparse_share=1.0, layers=sum(card.layers),
            weights=card.weights, **call,
        )  # fmt: skip
        assert faster is not None
        found[device] = round(faster, 2)
    return found


# In words


def say_held_out(target: Target, measured: Measured) -> tuple[bool, list[str]]:
    """Whether held-out clips meet the target in their mean, and what to know of that."""
    said, spread = [], measured.metrics[target.metric]
    if measured.clips < FEWEST:
        said.append(
            f"Fewer than {FEWEST} held-out clips say nothing about how far the next ones differ."
        )
    speed = measured.metrics["speedup"].mean
    if speed < 1 and target.metric != "speedup":
        said.append(f"Held-out clips took longer than dense ones: {speed:.2f} times their speed.")
    if target.is_met(spread.mean):
        return True, said
    by = f"{-margin(target, spread.mean):.{DIGITS[target.metric]}f}{UNITS[target.metric]}"
    best = spread.low if target.metric == "lpips" else spread.high
    if best is not None and target.is_met(best):
        said.append(
            f"Held-out clips miss the target by {by} in the mean, which {measured.clips} clips "
            f"cannot tell from meeting it."
        )
    else:
        said.append(f"Held-out clips miss the target by {by} in the mean: ask for more.")
    return False, said


def say_point(one: Found, target: Target) -> str:
    """A point and what it showed, where it was not taken."""
    metric = target.metric if target.metric != "speedup" else "psnr"
    value = f"{one.metrics[metric]:.{DIGITS[metric]}f}{UNITS[metric]}"
    value = f"{metric.upper()} {value}" if metric != "psnr" else value
    return f"{one} has {value} at {one.metrics['speedup']:.2f} times the speed of dense"


def say_unmet(found: Sequence[Found], target: Target) -> str:
    """How close it came."""
    nearest = max(found, key=lambda one: one.margin(target))
    return f"Nothing that was tried reaches {target}; {say_point(nearest, target)}."
