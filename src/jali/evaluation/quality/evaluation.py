"""Every pair of clips of two folders, every metric, frame by frame."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jali.clips.source import Batch, Source, open_source
from jali.error import InputError, JobError
from jali.evaluation.quality import metric
from jali.evaluation.quality.faults import Checks, check
from jali.evaluation.quality.measure import MEASURES
from jali.evaluation.quality.pairs import FoundClip, Pairs, check_sizes, lengths_differ, match
from jali.evaluation.quality.perceptual import Perceptual
from jali.evaluation.quality.result import Evaluation, Pair, Series
from jali.evaluation.quality.vmaf import Ffmpeg, find_ffmpeg, vmaf
from jali.name import METRICS as METRICS
from jali.version import __version__

# Pixels of one clip in memory at once.
_PIXELS = {"cpu": 1 << 22, "cuda": 1 << 24}
# The ratio comes with flicker. VGG is left to those who ask: it takes ten times as long as Alex.
DEFAULT = tuple(name for name in METRICS if name != "lpips_vgg")
_NETWORKS = {"lpips": "alex", "lpips_vgg": "vgg"}


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
    if not partial:
        pairs.check_complete()
    if not pairs.matched:
        raise InputError(f"no clip of {reference} has the name of a clip of {generated}")
    return evaluate_pairs(pairs, metrics, device=device, weights=weights, progress=progress)


def evaluate_pairs(
    pairs: Pairs,
    metrics: Sequence[str] | None = None,
    *,
    device: str | torch.device = "cpu",
    weights: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> Evaluation:
    """The same of clips that were matched before."""
    tools, unavailable = _tools(metrics, _device(device), weights)
    check_sizes(pairs.matched)
    found = []
    for number, (one, other) in enumerate(pairs.matched):
        if progress is not None:
            progress(one.name, number, len(pairs.matched))
        found.append(_compare(one, other, tools))
    for name in tools.names:
        if all(pair.series[name] is None for pair in found):
            least = MEASURES[name].smallest_side
            unavailable[name] = f"n/a: needs sides of at least {least} pixels"
    made_with = {"jali": __version__, "torch": torch.__version__, "device": tools.device.type}
    if tools.ffmpeg is not None:
        made_with["ffmpeg"] = tools.ffmpeg.version
    return Evaluation(
        metrics=tools.names,
        pairs=tuple(found),
        only_reference=pairs.only_reference,
        only_generated=pairs.only_generated,
        unavailable=unavailable,
        made_with=made_with,
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


def _compare(one: FoundClip, other: FoundClip, tools: _Tools) -> Pair:
    reference, generated = open_source(one.path), open_source(other.path)
    side = min(reference.height, reference.width)
    fitting = [name for name in tools.names if side >= MEASURES[name].smallest_side]
    # Lists, not tensors: small tensors that live on between large ones keep malloc from giving
    # anything back, and a clip of 129 frames grows to four times its need.
    values: dict[str, list[float]] = {name: [] for name in fitting if name not in _APART}
    times = (_Neighbours(), _Neighbours())
    same: list[bool] = []
    for batch in _read_both(one, reference, other, generated, tools.device):
        a, b = (part.frames.to(tools.device) for part in batch)
        same.extend((a == b).flatten(1).all(1).tolist())
        for name, parts in values.items():
            parts.extend(_per_frame(name, a, b, tools).tolist())
        for time, frames, part in zip(times, (a, b), batch, strict=True):
            time.add(frames, part.nonfinite)
    series: dict[str, Series | None] = dict.fromkeys(tools.names)
    series |= {name: Series(tuple(parts)) for name, parts in values.items()}
    if "psnr" in values:  # that of equal frames is infinite, which neither JSON nor a mean can hold
        finite = (None if math.isinf(value) else value for value in values["psnr"])
        series["psnr"] = Series(tuple(finite), {"identical": sum(same)})
    if "flicker" in fitting:
        series["flicker"] = _flicker(*times)
    if "vmaf" in fitting and tools.ffmpeg is not None:
        found = vmaf(tools.ffmpeg, reference, generated, max(1, torch.get_num_threads()))
        if len(found) != len(same):
            raise JobError(
                f"ffmpeg compared {len(found)} frames of {other.path}, which has {len(same)}"
            )
        series["vmaf"] = Series(tuple(found))
    return Pair(
        name=one.name,
        frames=len(same),
        height=reference.height,
        width=reference.width,
        identical=all(same),
        series=series,
        checks=times[1].checks,
        reference_checks=times[0].checks,
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


def _read_both(
    one: FoundClip, reference: Source, other: FoundClip, generated: Source, device: torch.device
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
        entry.check_frames(counts[0])


class _Neighbours:
    """What needs neighbours in time, over batches: flicker and faults of one clip."""

    def __init__(self) -> None:
        self._last: Tensor | None = None  # the last two frames of the batch before
        self.flicker: list[float] = []  # of all frames but the first and the last
        self.checks = Checks()

    def add(self, frames: Tensor, nonfinite: Tensor) -> None:
        last = self._last
        self.checks += check(frames, nonfinite, None if last is None else last[-1])
        joined = frames if last is None else torch.cat([last, frames])
        if len(joined) > 2:
            self.flicker.extend(metric.flicker(joined)[1:-1].tolist())
        self._last = joined[-2:].clone()


def _flicker(reference: _Neighbours, generated: _Neighbours) -> Series:
    found, wanted = generated.flicker, reference.flicker
    if not found:
        return Series((), {"reference": None, "ratio": None})
    mean = math.fsum(wanted) / len(wanted)
    ratio = math.fsum(found) / len(found) / mean if mean else None
    return Series((None, *found, None), {"reference": mean, "ratio": ratio})
