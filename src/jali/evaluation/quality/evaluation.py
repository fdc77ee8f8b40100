"""Every pair of clips of two folders, every metric, frame by frame; and what that comes to."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.clips.source import Batch, Source, open_source
from jali.error import InputError, JobError
from jali.evaluation.quality import metric
from jali.evaluation.quality.faults import Checks, check, total
from jali.evaluation.quality.interval import Interval, interval
from jali.evaluation.quality.pairs import Entry, lengths_differ, match, sizes_agree
from jali.evaluation.quality.perceptual import NETS, Perceptual
from jali.evaluation.quality.vmaf import SMALLEST_SIDE, Ffmpeg, find_ffmpeg, vmaf
from jali.files import whole_file
from jali.version import __version__

KIND, VERSION = "jali-metrics", 1
# Pixels of one clip in memory at once.
_PIXELS = {"cpu": 1 << 22, "cuda": 1 << 24}


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric as people meet it: title, whether more of it is better, digits, least side."""

    title: str
    higher_is_better: bool | None
    digits: int
    smallest_side: int = 1


MEASURES = {
    "psnr": Measure("PSNR, dB", True, 2),
    "ssim": Measure("SSIM", True, 4, 6),
    "ms_ssim": Measure("MS-SSIM", True, 4, metric.MS_SSIM_SIDE),
    "lpips": Measure("LPIPS (Alex)", False, 4, NETS["alex"].smallest_side),
    "lpips_vgg": Measure("LPIPS (VGG)", False, 4, NETS["vgg"].smallest_side),
    "vmaf": Measure("VMAF", True, 2, SMALLEST_SIDE),
    "flicker": Measure("flicker", None, 5),
    "flicker_ratio": Measure("flicker, ratio", None, 3),
}
# The ratio comes with flicker. VGG is left to those who ask: it takes ten times as long as Alex.
METRICS = ("psnr", "ssim", "ms_ssim", "lpips", "lpips_vgg", "vmaf", "flicker")
DEFAULT = tuple(name for name in METRICS if name != "lpips_vgg")
_NETWORKS = {"lpips": "alex", "lpips_vgg": "vgg"}


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

    def to_dict(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "name": self.name,
            "frames": self.frames,
            "height": self.height,
            "width": self.width,
            "identical": self.identical,
            "checks": asdict(self.checks),
            "reference_checks": asdict(self.reference_checks),
            "reference": {"file": self.files[0], "lossy": self.lossy[0]},
            "generated": {"file": self.files[1], "lossy": self.lossy[1]},
        }
        for name, series in self.series.items():
            found[name] = series and {
                "mean": _tidy(series.mean),
                "per_frame": [_tidy(value) for value in series.per_frame],
                **{key: _tidy(value) for key, value in series.extra.items()},
            }
        return found


@dataclass(frozen=True, slots=True)
class Evaluation:
    """All pairs, and over them each metric's mean with its 95 % interval."""

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
        for name in self.metrics:
            series = [pair.series[name] for pair in self.pairs]
            means = [one.mean for one in series if one is not None and one.mean is not None]
            found[name] = interval(means)
            if name == "flicker":
                ratios = [one.extra["ratio"] for one in series if one is not None]
                found["flicker_ratio"] = interval([r for r in ratios if r is not None])
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
        return {
            "kind": KIND,
            "version": VERSION,
            "metrics": list(self.metrics),
            "made_with": self.made_with,
            "pairs": [pair.to_dict() for pair in self.pairs],
            "summary": {
                name: {
                    "mean": _tidy(found.mean),
                    "low": _tidy(found.low),
                    "high": _tidy(found.high),
                    "n": found.n,
                }
                for name, found in self.summary.items()
            },
            "unmatched": {
                "reference": list(self.only_reference),
                "generated": list(self.only_generated),
            },
            "unavailable": self.unavailable,
            "notes": list(self.notes),
        }


def evaluate(
    reference: str | Path,
    generated: str | Path,
    metrics: Sequence[str] | None = None,
    *,
    device: str | torch.device = "cpu",
    weights: Path | None = None,
    partial: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> Evaluation:
    """Compare clips of the same names in two places.

    Each place is a run (a folder with manifest.json), a folder of clips, or one clip. Metrics that
    are named must be computable; of the default ones, those that are not are listed in
    `unavailable`. Clips without a partner are an error, unless `partial`. `progress` hears the
    clip's name, its number and their count before each clip.
    """
    pairs = match(Path(reference), Path(generated))
    _all_have_partners(pairs.only_reference, pairs.only_generated, reference, generated, partial)
    if not pairs.matched:
        raise InputError(f"no clip of {reference} has the name of a clip of {generated}")
    tools, unavailable = _tools(metrics, _device(device), weights)
    sizes_agree(pairs.matched)
    found = []
    for number, (one, other) in enumerate(pairs.matched):
        if progress is not None:
            progress(one.name, number, len(pairs.matched))
        found.append(_pair(one, other, tools))
    for name in tools.names:
        if all(pair.series[name] is None for pair in found):
            least = MEASURES[name].smallest_side
            unavailable[name] = f"n/a: needs sides of at least {least} pixels"
    return Evaluation(
        metrics=tools.names,
        pairs=tuple(found),
        only_reference=pairs.only_reference,
        only_generated=pairs.only_generated,
        unavailable=unavailable,
        made_with=tools.made_with(),
    )


def read_evaluation(path: Path) -> dict[str, Any]:
    """A metrics.json as a dictionary, or an error that says why the file is none."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as metrics: {error}") from None
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise InputError(f'{path} holds no metrics: its "kind" is not "{KIND}"')
    if found.get("version") != VERSION:
        raise InputError(f"{path} has version {found.get('version')}, expected {VERSION}")
    return found


def writable(path: Path) -> None:
    """Refuse a path that is something else than metrics, which would be lost."""
    if path.is_dir():
        raise InputError(f"{path} is a folder; name a file, such as {path / 'metrics.json'}")
    if path.exists():
        try:
            read_evaluation(path)
        except InputError:
            raise InputError(
                f"{path} exists and is not a file of metrics; it stays as it is, name another file"
            ) from None


def write_evaluation(found: Evaluation, path: Path) -> None:
    """metrics.json, whole or not at all; only another metrics.json is replaced."""
    writable(path)
    text = json.dumps(found.to_dict(), indent=1, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise JobError(f"{path.parent} cannot be made: {error.strerror}") from None
    with whole_file(path) as temporary:
        temporary.write_text(text)


def _all_have_partners(
    only_reference: Sequence[str],
    only_generated: Sequence[str],
    reference: str | Path,
    generated: str | Path,
    partial: bool,
) -> None:
    if partial or not (only_reference or only_generated):
        return
    parts = [
        f"{len(names)} only in {place} ({', '.join(names[:3])}{', …' if len(names) > 3 else ''})"
        for names, place in ((only_reference, reference), (only_generated, generated))
        if names
    ]
    raise InputError(
        f"clips without a partner of the same name: {'; '.join(parts)} "
        "(--partial compares the others)"
    )


def _device(given: str | torch.device) -> torch.device:
    try:
        device = torch.device(given)
    except RuntimeError:
        raise InputError(f"device must be cpu, cuda or such as cuda:1, got {given!r}") from None
    count = torch.cuda.device_count()
    if device.type == "cuda" and (device.index or 0) >= count:
        raise InputError(f"there is no {given}: PyTorch finds {count} CUDA devices here")
    return device


@dataclass(frozen=True, slots=True)
class _Tools:
    """What was loaded once for all pairs."""

    names: tuple[str, ...]
    device: torch.device
    networks: dict[str, Perceptual]
    ffmpeg: Ffmpeg | None

    def made_with(self) -> dict[str, str]:
        found = {"jali": __version__, "torch": torch.__version__, "device": self.device.type}
        if self.ffmpeg is not None:
            found["ffmpeg"] = self.ffmpeg.version
        return found


def _tools(
    metrics: Sequence[str] | None, device: torch.device, weights: Path | None
) -> tuple[_Tools, dict[str, str]]:
    asked = tuple(dict.fromkeys(DEFAULT if metrics is None else metrics))
    unknown = [name for name in asked if name not in METRICS]
    if unknown or not asked:
        raise InputError(f"metrics are {', '.join(METRICS)}; got {', '.join(unknown) or 'none'}")
    unavailable: dict[str, str] = {}
    networks: dict[str, Perceptual] = {}
    ffmpeg = None
    for name in asked:
        try:
            if name in _NETWORKS:
                networks[name] = Perceptual.load(_NETWORKS[name], device, weights)
            elif name == "vmaf":
                ffmpeg = find_ffmpeg()
        except InputError as error:
            if metrics is not None:
                raise
            unavailable[name] = str(error)
    names = tuple(name for name in asked if name not in unavailable)
    return _Tools(names, device, networks, ffmpeg), unavailable


def _pair(one: Entry, other: Entry, tools: _Tools) -> Pair:
    reference, generated = open_source(one.path), open_source(other.path)
    side = min(reference.height, reference.width)
    fitting = [name for name in tools.names if side >= MEASURES[name].smallest_side]
    # Lists, not tensors: small tensors that live on between large ones keep malloc from giving
    # anything back, and a clip of 129 frames grows to four times its need.
    values: dict[str, list[float]] = {name: [] for name in fitting if name not in _APART}
    still = (_Time(), _Time())
    same: list[bool] = []
    for batch in _together(one, reference, other, generated, tools.device):
        a, b = (part.frames.to(tools.device) for part in batch)
        same.extend((a == b).flatten(1).all(1).tolist())
        for name, parts in values.items():
            parts.extend(_per_frame(name, a, b, tools).tolist())
        for time, frames, part in zip(still, (a, b), batch, strict=True):
            time.add(frames, part.nonfinite)
    series: dict[str, Series | None] = dict.fromkeys(tools.names)
    for name, parts in values.items():
        series[name] = Series(tuple(parts))
    if "psnr" in values:
        series["psnr"] = _finite(values["psnr"], sum(same))
    if "flicker" in fitting:
        series["flicker"] = _flicker(*still)
    if "vmaf" in fitting and tools.ffmpeg is not None:
        series["vmaf"] = _vmaf(tools.ffmpeg, reference, generated, len(same))
    return Pair(
        name=one.name,
        frames=len(same),
        height=reference.height,
        width=reference.width,
        identical=all(same),
        series=series,
        checks=still[1].checks,
        reference_checks=still[0].checks,
        files=(str(one.path), str(other.path)),
        lossy=(reference.lossy, generated.lossy),
    )


_APART = ("vmaf", "flicker")  # computed from more than the frames of one batch


def _per_frame(name: str, a: Tensor, b: Tensor, tools: _Tools) -> Tensor:
    if name in tools.networks:
        return metric.perceptual_distance(tools.networks[name], a, b)
    found = {"psnr": metric.psnr, "ssim": metric.ssim, "ms_ssim": metric.ms_ssim}[name](a, b)
    assert found is not None  # sides were checked
    return found


def _together(
    one: Entry, reference: Source, other: Entry, generated: Source, device: torch.device
) -> Iterator[tuple[Batch, Batch]]:
    """Batches of the same frames of both clips."""
    pixels = _PIXELS.get(device.type, _PIXELS["cuda"])
    size = max(1, min(32, pixels // (reference.height * reference.width)))
    counts = [0, 0]
    short = False
    both = itertools.zip_longest(reference.batches(size), generated.batches(size))
    for a, b in both:
        counts[0] += 0 if a is None else len(a.frames)
        counts[1] += 0 if b is None else len(b.frames)
        short = short or counts[0] != counts[1]
        if not short:  # otherwise only count on, to say by how much they differ
            yield a, b
    if short:
        raise lengths_differ(one, counts[0], other, counts[1])
    for entry in (one, other):
        if entry.frames and entry.frames != counts[0]:
            raise InputError(
                f"{entry.path} has {counts[0]} frames, but its manifest says {entry.frames}"
            )


class _Time:
    """What needs neighbours in time, over batches: flicker and faults of one clip."""

    def __init__(self) -> None:
        self._last: Tensor | None = None  # the last two frames of the batch before
        self.flicker: list[float] = []  # of all frames but the first and the last
        self._checks: list[Checks] = []

    def add(self, frames: Tensor, nonfinite: Tensor) -> None:
        last = self._last
        self._checks.append(check(frames, nonfinite, None if last is None else last[-1]))
        joined = frames if last is None else torch.cat([last, frames])
        if len(joined) > 2:
            self.flicker.extend(metric.flicker(joined)[1:-1].tolist())
        self._last = joined[-2:].clone()

    @property
    def checks(self) -> Checks:
        return total(self._checks)


def _flicker(reference: _Time, generated: _Time) -> Series:
    found, wanted = generated.flicker, reference.flicker
    if not found:
        return Series((), {"reference": None, "ratio": None})
    mean = math.fsum(wanted) / len(wanted)
    ratio = math.fsum(found) / len(found) / mean if mean else None
    return Series((None, *found, None), {"reference": mean, "ratio": ratio})


def _finite(values: list[float], equal: int) -> Series:
    """PSNR of equal frames is infinite, which neither JSON nor a mean can hold."""
    finite = [None if math.isinf(value) else value for value in values]
    return Series(tuple(finite), {"identical": equal})


def _vmaf(ffmpeg: Ffmpeg, reference: Source, generated: Source, frames: int) -> Series:
    values = vmaf(ffmpeg, reference, generated, threads=max(1, torch.get_num_threads()))
    if len(values) != frames:
        raise JobError(
            f"ffmpeg compared {len(values)} frames of {generated.path}, which has {frames}"
        )
    return Series(tuple(values))


def _tidy(value: float | int | None) -> float | int | None:
    """Seven digits: more would be noise, and a file of 129 frames gets long."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.7g}") if math.isfinite(value) else None
