"""What was found out about pairs of clips: in memory, and as metrics.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from jali.error import InputError, shorten
from jali.evaluation.quality.faults import Checks
from jali.evaluation.quality.interval import Interval, interval
from jali.evaluation.quality.measure import MEASURES
from jali.files import UnreadableError, check_place, read_json, write_json
from jali.presets import schema

KIND, VERSION = "jali-metrics", 1


@dataclass(frozen=True, slots=True)
class Series:
    """One metric of one pair: a value per frame, None where there is none, and their mean."""

    per_frame: tuple[float | None, ...]
    extra: dict[str, float | int | None] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Over the frames that have a value."""
        values = [value for value in self.per_frame if value is not None]
        return math.fsum(values) / len(values) if values else None


@dataclass(frozen=True, slots=True)
class Pair:
    """What was found out about two clips of one name."""

    name: str
    frames: int
    height: int
    width: int
    identical: bool
    series: dict[str, Series | None]  # None where the clips are too small for the metric
    checks: Checks
    reference_checks: Checks
    files: tuple[str, str]
    lossy: tuple[bool, bool]

    def value(self, metric: str) -> float | None:
        """Its mean over frames; "flicker_ratio" is flicker over that of the reference."""
        series = self.series[metric.removesuffix("_ratio")]
        if series is None:
            return None
        return series.extra["ratio"] if metric == "flicker_ratio" else series.mean

    def to_dict(self) -> dict[str, Any]:
        """One of "pairs" in metrics.json."""
        plain = asdict(self)
        files, lossy, _ = plain.pop("files"), plain.pop("lossy"), plain.pop("series")
        for side, name in enumerate(("reference", "generated")):
            plain[name] = {"file": files[side], "lossy": lossy[side]}
        for name, own in self.series.items():
            plain[name] = own and {"mean": own.mean, "per_frame": own.per_frame, **own.extra}
        return _tidy(plain)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All pairs, and over them each metric's mean with its interval."""

    metrics: tuple[str, ...]
    pairs: tuple[Pair, ...]
    only_reference: tuple[str, ...]
    only_generated: tuple[str, ...]
    unavailable: dict[str, str]
    made_with: dict[str, str]

    @property
    def summary(self) -> dict[str, Interval]:
        """Over clips: every clip counts once, however long it is."""
        found = {}
        for metric in self.metrics:
            for name in (metric, "flicker_ratio") if metric == "flicker" else (metric,):
                values = [pair.value(name) for pair in self.pairs]
                known = [value for value in values if value is not None]
                found[name] = interval(known, MEASURES[name].bounds)
        return found

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers must know."""
        notes = []
        for side, what in enumerate(("reference", "generated")):
            lossy = [pair.files[side] for pair in self.pairs if pair.lossy[side]]
            if lossy:
                more = f" and {len(lossy) - 1} more" if len(lossy) > 1 else ""
                notes.append(
                    f"{what}: {Path(lossy[0]).name}{more} read from a lossy file, "
                    "so the codec's own losses are in the numbers"
                )
        same = [pair.name for pair in self.pairs if pair.identical]
        if same:
            notes.append(f"identical clips have no PSNR (it is infinite): {', '.join(same[:5])}")
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        """metrics.json: valid JSON, with null for what is infinite or does not exist."""
        return _tidy(
            {
                "kind": KIND,
                "version": VERSION,
                "metrics": self.metrics,
                "made_with": self.made_with,
                "pairs": [pair.to_dict() for pair in self.pairs],
                "summary": {
                    name: {"mean": own.mean, "low": own.low, "high": own.high, "n": own.n}
                    for name, own in self.summary.items()
                },
                "unmatched": {"reference": self.only_reference, "generated": self.only_generated},
                "unavailable": self.unavailable,
                "notes": self.notes,
            }
        )


def read_evaluation(path: Path) -> dict[str, Any]:
    """A metrics.json as a dictionary; `UnreadableError` says why the file is none."""
    found = read_json(path, KIND)
    try:
        metrics = schema.read(tuple[str, ...], found.get("metrics"), "metrics")
        schema.read(Mapping[str, str], found.get("unavailable") or {}, "unavailable")
        pairs = schema.read(tuple[Mapping[str, Any], ...], found.get("pairs"), "pairs")
        for number, pair in enumerate(pairs):
            _check_pair(pair, metrics, f"pairs[{number}]")
    except ValueError as error:
        raise UnreadableError(f"{path} is damaged: {shorten(error)}") from None
    return found


def _check_pair(pair: Mapping[str, Any], metrics: tuple[str, ...], where: str) -> None:
    """What is read of a pair is of its kind; a metric that is not there could not be computed."""
    schema.read(str, pair.get("name"), f"{where}.name")
    schema.read(int, pair.get("frames"), f"{where}.frames")
    file = schema.read(Mapping[str, Any], pair.get("reference") or {}, f"{where}.reference")
    schema.read(str, file.get("file") or "", f"{where}.reference.file")
    for checks in ("checks", "reference_checks"):
        schema.read(Mapping[str, int], pair.get(checks) or {}, f"{where}.{checks}")
    for metric in metrics:
        if pair.get(metric) is not None:
            curve = schema.read(Mapping[str, Any], pair[metric], f"{where}.{metric}")
            place = f"{where}.{metric}.per_frame"
            schema.read(tuple[float | None, ...], curve.get("per_frame") or [], place)
            schema.read(float | None, curve.get("mean"), f"{where}.{metric}.mean")


def check_output(path: Path) -> None:
    """Refuse a path that is something else than metrics, which would be lost."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file, such as {path / 'metrics.json'}")
    check_place(path)
    if path.exists():
        try:
            read_evaluation(path)
        except UnreadableError:
            raise InputError(
                f"{path} exists and is not a file of metrics; it stays as it is, name another file"
            ) from None


def write_evaluation(found: Evaluation, path: Path) -> None:
    """metrics.json, whole or not at all; only another metrics.json is replaced."""
    check_output(path)
    write_json(path, found.to_dict(), sort_keys=False)


def _tidy(value: Any) -> Any:
    """As JSON can hold it, without what is not finite, and with seven digits: more would be noise,
    and a file of 129 frames gets long."""
    if isinstance(value, dict):
        return {key: _tidy(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_tidy(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value
