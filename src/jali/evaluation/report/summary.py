"""The numbers of a comparison in one row per run, and the one sentence that sums them up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jali.evaluation.quality.interval import interval
from jali.evaluation.report.measure import RunMetrics
from jali.evaluation.report.run import ComparedRun, same_machine


@dataclass(frozen=True, slots=True)
class Mean:
    """A mean over `n` clips, and half the width of its 95 % interval (of one clip: None)."""

    value: float
    within: float | None
    n: int


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Everything is a mean over the clips; None where nothing says."""

    name: str
    clips: int
    seconds: Mean | None
    seconds_transformer: Mean | None
    speed_up: Mean | None
    speed_up_transformer: Mean | None
    budget: float | None
    cost: Mean | None
    sparse_cost: Mean | None
    metrics: Mapping[str, Mean]

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an infinite PSNR becomes the word, since JSON has no such number."""
        return _plain(asdict(self))


def summarize(
    run: ComparedRun, reference: ComparedRun, metrics: RunMetrics, clips: Sequence[str]
) -> RunSummary:
    """The run over these clips, its speed-up where both runs were timed on one machine."""

    def mean(key: str) -> Mean | None:
        return _mean(run.numbers(clips, key))

    def ratio(key: str) -> Mean | None:
        if run is reference or not same_machine([reference, run]):
            return None
        pairs = [[*reference.numbers([clip], key), *run.numbers([clip], key)] for clip in clips]
        return _mean([pair[0] / pair[1] for pair in pairs if len(pair) == 2 and pair[1]])

    asked = mean("budget")
    return RunSummary(
        name=run.name,
        clips=len(clips),
        seconds=mean("seconds"),
        seconds_transformer=mean("seconds_transformer"),
        speed_up=ratio("seconds"),
        speed_up_transformer=ratio("seconds_transformer"),
        budget=None if asked is None else asked.value,
        cost=mean("cost"),
        sparse_cost=mean("sparse_cost"),
        metrics={n: own for n in metrics.names() if (own := _mean(metrics.means(n, clips)))},
    )


def headline(rows: Sequence[RunSummary]) -> tuple[str, str]:
    """(what is said loudly, the rest of the sentence), e.g. ("1.7× faster", " at 31.2 dB")."""
    others = rows[1:]
    fastest = max(others, key=lambda row: row.speed_up.value if row.speed_up else -math.inf)
    if len(others) > 1 and fastest.speed_up:
        loud, quiet = _claim(fastest)
        return loud, f"{quiet} with {fastest.name}"
    return _claim(others[0]) if len(others) == 1 else (f"{len(rows)} runs", " side by side")


def _claim(row: RunSummary) -> tuple[str, str]:
    quality, clips = "", f"{row.clips} clip{'' if row.clips == 1 else 's'}"
    if "psnr" in row.metrics:
        mean = row.metrics["psnr"].value
        quality = f"{mean:.1f} dB" if math.isfinite(mean) else "no difference at all"
    elif "ssim" in row.metrics:
        quality = f"an SSIM of {row.metrics['ssim'].value:.3f}"
    if row.speed_up is not None:
        ratio, loud = row.speed_up.value, "As fast"
        if ratio >= 1.05:
            loud = f"{ratio:.1f}× faster"
        elif ratio <= 0.95:
            loud = f"{1 / ratio:.1f}× slower"
        return loud, f" at {quality}" if quality else ""
    if quality:
        return quality[0].upper() + quality[1:], f" over {clips}"
    return clips, " side by side"


def _mean(values: Sequence[float]) -> Mean | None:
    """None of nothing."""
    found = interval(values)
    if found.mean is None:
        return None
    return Mean(found.mean, None if found.high is None else found.high - found.mean, found.n)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    return value
