"""The numbers of a comparison in one row per run, and the one sentence that sums them up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from jali.evaluation.quality.interval import POSITIVE, SHARE, Interval, interval
from jali.evaluation.quality.measure import describe
from jali.evaluation.report.measure import RunMetrics
from jali.evaluation.report.run import ComparedRun, same_machine


@dataclass(frozen=True, slots=True)
class RunSummary:
    """One run. Everything is a mean over the clips; None where nothing says.

    Seconds are those of a whole clip, or of its transformer calls, and so are the speed-ups. First
    clips, which load and compile, count only where there are no others, and in no speed-up.
    """

    name: str
    clips: int
    seconds: Interval | None
    seconds_transformer: Interval | None
    speed_up: Interval | None
    speed_up_transformer: Interval | None
    budget: float | None
    cost: Interval | None
    sparse_cost: Interval | None
    metrics: Mapping[str, Interval]
    total: float | None = None  # asked of the whole run, in place of a budget

    def to_dict(self) -> dict[str, Any]:
        """Plain values; an infinite PSNR becomes the word, since JSON has no such number."""
        return _plain(asdict(self))


def summarize(
    run: ComparedRun, reference: ComparedRun, metrics: RunMetrics, clips: Sequence[str]
) -> RunSummary:
    """The run over these clips, its speed-up where both runs were timed on one machine."""

    def mean(key: str, bounds: tuple[float, float] = POSITIVE) -> Interval | None:
        return _interval(run.numbers(clips, key), bounds)

    def mean_time(key: str) -> Interval | None:
        return _interval(run.numbers(_warm(run, clips), key), POSITIVE) or mean(key)

    def ratio(key: str) -> Interval | None:
        if run is reference or not same_machine([reference, run]):
            return None
        like = _warm(reference, _warm(run, clips))
        pairs = [[*reference.numbers([clip], key), *run.numbers([clip], key)] for clip in like]
        ratios = [pair[0] / pair[1] for pair in pairs if len(pair) == 2 and min(pair) > 0]
        return _interval(ratios, POSITIVE)

    asked = mean("budget", SHARE)
    found = {
        name: _interval(metrics.means(name, clips), describe(name).bounds)
        for name in metrics.names()
    }
    return RunSummary(
        name=run.name,
        clips=len(clips),
        seconds=mean_time("seconds"),
        seconds_transformer=mean_time("seconds_transformer"),
        speed_up=ratio("seconds"),
        speed_up_transformer=ratio("seconds_transformer"),
        budget=None if asked is None else asked.mean,
        cost=mean("cost", SHARE),
        sparse_cost=mean("sparse_cost", SHARE),
        metrics={name: own for name, own in found.items() if own},
        total=run.settings.get("total"),
    )


def _warm(run: ComparedRun, clips: Sequence[str]) -> list[str]:
    return [clip for clip in clips if not run.clips[clip].cold]


def _interval(values: Sequence[float], bounds: tuple[float, float]) -> Interval | None:
    """None of nothing."""
    return interval(values, bounds) if values else None


@dataclass(frozen=True, slots=True)
class Headline:
    """One sentence about a comparison: what is said loudly, the rest, and whether it is praise."""

    loud: str
    quiet: str
    praise: bool = False


def headline(rows: Sequence[RunSummary]) -> Headline:
    """Such as "1.7× faster at 31.2 dB". Of several runs none is picked: from the slowest to the
    fastest, each with what it is called and how near it came."""
    slowest, *between = sorted(rows[1:], key=lambda row: _speed(row) or 0.0)
    fastest = between[-1] if between else slowest
    one, other = _speed(slowest), _speed(fastest)
    many, clips = len(rows) > 2, f"{slowest.clips} clip{'' if slowest.clips == 1 else 's'}"
    if one is None or other is None:
        if many:
            return Headline(f"{len(rows)} runs", " side by side")
        near = _nearness(slowest)
        if near:
            return Headline(near[0].upper() + near[1:], f" over {clips}")
        return Headline(clips, " side by side")
    near = " to ".join(dict.fromkeys(filter(None, map(_nearness, (slowest, fastest)))))
    names = f", {slowest.name} to {fastest.name}" if many else ""
    return Headline(_pace(one, other), (f" at {near}" if near else "") + names, one >= FASTER)


FASTER, SLOWER = 1.05, 0.95  # between them, as fast as far as anybody can tell


def _speed(row: RunSummary) -> float | None:
    return row.speed_up.mean if row.speed_up else None


def _pace(one: float, other: float) -> str:
    """From the slower speed-up to the faster, in words."""
    ends, word = (one, other), "as fast"
    if one >= FASTER:
        word = "faster"
    elif other <= SLOWER:
        ends, word = (1 / other, 1 / one), "slower"
    elif one > SLOWER and other < FASTER:
        return "As fast"
    return f"{' to '.join(dict.fromkeys(f'{end:.1f}×' for end in ends))} {word}"


def _nearness(row: RunSummary) -> str:
    """How near a run came to the reference, by the metric that most people know."""
    psnr, ssim = row.metrics.get("psnr"), row.metrics.get("ssim")
    if psnr and psnr.mean is not None:
        return f"{psnr.mean:.1f} dB" if math.isfinite(psnr.mean) else "no difference at all"
    return f"an SSIM of {ssim.mean:.3f}" if ssim else ""


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {"value" if key == "mean" else key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "inf" if value > 0 else "-inf"
    return value
