"""Metrics of each run against the reference: read where they lie, measured where they do not."""

from __future__ import annotations

import filecmp
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.evaluation.quality.evaluation import evaluate_pairs
from jali.evaluation.quality.pairs import Pairs
from jali.evaluation.quality.result import read_evaluation
from jali.evaluation.report.run import ComparedRun

METRICS = "metrics.json"


@dataclass(frozen=True, slots=True)
class MetricCurve:
    """One metric of one clip. `math.inf` is the PSNR of equal frames, None is no value."""

    mean: float
    per_frame: tuple[float | None, ...]


@dataclass(frozen=True, slots=True)
class RunMetrics:
    """A run against the reference: per clip its metrics and, in words, what is wrong with it."""

    clips: Mapping[str, Mapping[str, MetricCurve]]
    faults: Mapping[str, str]
    unavailable: Mapping[str, str]

    def names(self) -> list[str]:
        """Metrics that at least one clip has."""
        return list(dict.fromkeys(name for clip in self.clips.values() for name in clip))

    def means(self, metric: str, clips: Sequence[str]) -> list[float]:
        """Clip by clip; those that equal the reference count only where all of them do."""
        curves = [self.clips[clip] for clip in clips if clip in self.clips]
        found = [curve[metric].mean for curve in curves if metric in curve]
        return [mean for mean in found if math.isfinite(mean)] or found


NO_METRICS = RunMetrics({}, {}, {})


def read_metrics(
    reference: ComparedRun,
    run: ComparedRun,
    frames: Mapping[str, int],
    names: Sequence[str] | None,
    notes: list[str],
) -> RunMetrics:
    """Metrics of the clips in `frames` (their lengths by name).

    `names` None reads the folder's metrics.json, or measures with the usual metrics where there is
    none that fits; no names want none; names are measured now.
    """
    if names is not None and not names:
        return NO_METRICS
    path = run.folder / METRICS
    if names is None and path.exists():
        found = read_evaluation(path)
        why_not = _why_unfit(found, reference, frames)
        if not why_not:
            return _metrics(found, frames)
        notes.append(f"{path} {why_not}, so {run.name} was measured again.")
    matched = tuple((reference.clips[name].exact, run.clips[name].exact) for name in frames)
    pairs = Pairs(reference.folder, run.folder, matched, (), ())
    return _metrics(evaluate_pairs(pairs, names).to_dict(), frames)


def _why_unfit(found: Mapping[str, Any], reference: ComparedRun, frames: Mapping[str, int]) -> str:
    """Why the metrics are not those of these clips; empty when they are."""
    pairs = {pair.get("name"): pair for pair in found.get("pairs") or ()}
    for name, count in frames.items():
        if name not in pairs:
            return f"says nothing of {name}"
        if pairs[name].get("frames") != count:
            return f"says {name} has {pairs[name].get('frames')} frames instead of {count}"
        against = Path((pairs[name].get("reference") or {}).get("file") or "")
        if against.is_file() and not _same(against, reference.folder / against.name):
            return f"was measured against {against.parent}"
    return ""


def _same(one: Path, other: Path) -> bool:
    """Whether two files are one, or copies of each other: folders are moved and copied about."""
    return other.is_file() and (one.samefile(other) or filecmp.cmp(one, other, shallow=False))


def _metrics(found: Mapping[str, Any], frames: Mapping[str, int]) -> RunMetrics:
    pairs = {pair["name"]: pair for pair in found["pairs"] if pair["name"] in frames}
    return RunMetrics(
        {
            clip: {n: curve for n in found["metrics"] if (curve := _curve(n, pair.get(n)))}
            for clip, pair in pairs.items()
        },
        {clip: fault for clip, pair in pairs.items() if (fault := _faults(pair))},
        dict(found.get("unavailable") or {}),
    )


def _curve(metric: str, told: Mapping[str, Any] | None) -> MetricCurve | None:
    if not told:
        return None
    # The one metric that can be infinite is written as null where it is.
    absent = math.inf if metric == "psnr" else None
    mean = absent if told.get("mean") is None else told["mean"]
    values = tuple(absent if value is None else value for value in told.get("per_frame") or ())
    return None if mean is None else MetricCurve(mean, values)


def _faults(pair: Mapping[str, Any]) -> str:
    """What the clip has and the reference has not."""
    usual = pair.get("reference_checks") or {}
    worse = {k: n - usual.get(k, 0) for k, n in (pair.get("checks") or {}).items()}
    return ", ".join(f"{n} more {kind} frames" for kind, n in worse.items() if n > 0)
