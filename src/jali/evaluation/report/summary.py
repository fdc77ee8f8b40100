"""The numbers of a comparison in one row per run, and the one sentence that sums them up."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jali.evaluation.quality.interval import interval
from jali.evaluation.report.comparison import Comparison
from jali.evaluation.report.measure import scale_of
from jali.evaluation.report.run import ComparedRun, same_machine


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over `n` clips, and half the width of its 95 % interval (of one clip: None)."""

    value: float
    within: float | None
    n: int


def mean_of(values: Sequence[float]) -> Mean | None:
    """None of nothing."""
    found = interval(values)
    if found.mean is None:
        return None
    return Mean(found.mean, None if found.high is None else found.high - found.mean, found.n)


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Everything is a mean over the clips; None where nothing says."""

    name: str
    clips: int
    seconds: Mean | None
    seconds_transformer: Mean | None
    speed_up: Mean | None
    budget: float | None
    cost: Mean | None
    sparse_cost: Mean | None
    metrics: Mapping[str, Mean]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an infinite PSNR becomes the word, since JSON has no such number."""
        return _plain(asdict(self))


def rows_of(comparison: Comparison) -> list[RunSummary]:
    return [_row(comparison, place) for place in range(len(comparison.runs))]


def headline(rows: list[RunSummary]) -> tuple[str, str]:
    """(what is said loudly, the rest of the sentence), e.g. ("1.7× faster", " at 31.2 dB")."""
    others = rows[1:]
    fastest = max(others, key=lambda row: row.speed_up.value if row.speed_up else -math.inf)
    if len(others) > 1 and fastest.speed_up:
        loud, quiet = _claim(fastest)
        return loud, f"{quiet} with {fastest.name}"
    return _claim(others[0]) if len(others) == 1 else (f"{len(rows)} runs", " side by side")


def _claim(row: RunSummary) -> tuple[str, str]:
    quality = ""
    if "psnr" in row.metrics:
        mean = row.metrics["psnr"].value
        quality = f"{mean:.1f} dB" if math.isfinite(mean) else "no difference at all"
    elif "ssim" in row.metrics:
        quality = f"an SSIM of {row.metrics['ssim'].value:.3f}"
    if row.speed_up is not None:
        ratio = row.speed_up.value
        if ratio >= 1.05:
            loud = f"{ratio:.1f}× faster"
        elif ratio <= 0.95:
            loud = f"{1 / ratio:.1f}× slower"
        else:
            loud = "As fast"
        return loud, f" at {quality}" if quality else ""
    if quality:
        return quality[0].upper() + quality[1:], f" over {_count(row.clips, 'clip')}"
    return _count(row.clips, "clip"), " side by side"


def _count(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}s"


def facts(run: ComparedRun, clips: Iterable[str], key: str) -> list[float]:
    """A number of each clip's manifest entry, of those clips that have it."""
    found = [run.clips[clip].facts.get(key) for clip in clips]
    return [float(value) for value in found if isinstance(value, int | float)]


def speed_up(comparison: Comparison, place: int, clip: str) -> float | None:
    """How many times faster than the reference, where both were timed on one machine."""
    pair = [comparison.reference, comparison.runs[place]]
    seconds = [value for run in pair for value in facts(run, [clip], "seconds")]
    if not place or len(seconds) < 2 or not seconds[1] or not same_machine(pair):
        return None
    return seconds[0] / seconds[1]


def _row(comparison: Comparison, place: int) -> RunSummary:
    run, clips = comparison.runs[place], comparison.clips
    ratios = [speed_up(comparison, place, clip) for clip in clips]
    budgets = facts(run, clips, "budget")
    measured = comparison.measures[place]
    found = {metric: mean_of(measured.means(metric)) for metric in measured.names()}
    return RunSummary(
        run.name,
        len(clips),
        mean_of(facts(run, clips, "seconds")),
        mean_of(facts(run, clips, "seconds_transformer")),
        mean_of([ratio for ratio in ratios if ratio is not None]),
        sum(budgets) / len(budgets) if budgets else None,
        mean_of(facts(run, clips, "cost")),
        mean_of(facts(run, clips, "sparse_cost")),
        {metric: value for metric, value in found.items() if value is not None},
    )


def best(rows: list[RunSummary], metric: str) -> float | None:
    """The best mean of a metric, where more than one run has it."""
    means = [row.metrics[metric].value for row in rows if metric in row.metrics]
    higher = scale_of(metric).higher
    if len(means) < 2 or higher is None:
        return None
    return max(means) if higher else min(means)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    return value
