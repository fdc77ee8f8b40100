"""Everything a page shows, read and checked: runs, clips that all of them have, films, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.evaluation.report.cost import read_sites
from jali.evaluation.report.error import ReportError
from jali.evaluation.report.film import Film, read_film
from jali.evaluation.report.measure import NO_METRICS, RunMetrics, metrics_of
from jali.evaluation.report.run import (
    ComparedClip,
    ComparedRun,
    differing_settings,
    read_runs,
    same_machine,
)

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs over the same clips, the reference first.

    `films` and `sites` hold one entry per clip, in it one per run; `measures` one per run, empty
    for the reference.
    """

    runs: tuple[ComparedRun, ...]
    clips: tuple[str, ...]
    films: Mapping[str, tuple[Film, ...]]
    sites: Mapping[str, tuple[Mapping[str, Any] | None, ...]]
    measures: tuple[RunMetrics, ...]
    notes: tuple[str, ...]

    @property
    def reference(self) -> ComparedRun:
        return self.runs[0]

    def metrics(self) -> list[str]:
        """Metrics that any run has."""
        return list(dict.fromkeys(name for m in self.measures for name in m.names()))

    def prompt(self, clip: str) -> str:
        return next((run.clips[clip].prompt for run in self.runs if run.clips[clip].prompt), "")


def read_comparison(
    folders: Sequence[Path],
    names: Sequence[str] = (),
    metrics: Sequence[str] | None = None,
    limit: int | None = None,
    progress: Progress = lambda _: None,
) -> Comparison:
    """Read the runs in `folders`; see `jali.evaluation.report.compare_page`."""
    runs = read_runs(folders, names)
    notes: list[str] = []
    clips = _in_every(runs, limit, notes)
    films: dict[str, tuple[Film, ...]] = {}
    sites: dict[str, tuple[Mapping[str, Any] | None, ...]] = {}
    for clip in clips:
        progress(f"reading {clip}")
        each = [run.clips[clip] for run in runs]
        films[clip] = tuple(read_film(one.video, one.facts.get("fps")) for one in each)
        _alike(each, films[clip])
        sites[clip] = tuple(None if one.sites is None else read_sites(one.sites) for one in each)
    lengths = {clip: films[clip][0].frames for clip in clips}
    measures = [NO_METRICS]
    for run in runs[1:]:
        progress(f"metrics of {run.name}")
        measures.append(metrics_of(runs[0], run, lengths, metrics, notes))
    _remark(runs, measures, notes)
    return Comparison(tuple(runs), tuple(clips), films, sites, tuple(measures), tuple(notes))


def _in_every(runs: Sequence[ComparedRun], limit: int | None, notes: list[str]) -> list[str]:
    shared = [name for name in runs[0].clips if all(name in run.clips for run in runs)]
    if not shared:
        first = ", ".join(f"{run.folder} has {next(iter(run.clips))}" for run in runs)
        raise ReportError(f"no clip has the same name in every folder ({first})")
    for run in runs:
        lonely = [name for name in run.clips if name not in shared]
        if lonely:
            more = f" and {len(lonely) - 1} more" if len(lonely) > 1 else ""
            notes.append(f"Only some runs have {lonely[0]}{more} (here: {run.name}); left out.")
    if limit is not None and len(shared) > limit:
        notes.append(f"The first {limit} of {len(shared)} clips are shown and counted.")
        shared = shared[:limit]
    return shared


def _alike(clips: Sequence[ComparedClip], films: Sequence[Film]) -> None:
    first = films[0]
    for clip, film in zip(clips, films, strict=True):
        told = clip.facts.get("frames")
        if told is not None and told != film.frames:
            raise ReportError(
                f"{clip.video} has {film.frames} frames, but its manifest says {told}"
            )
        if (film.height, film.width) != (first.height, first.width):
            raise ReportError(
                f"{clip.video} is {film.width}×{film.height}, but the reference "
                f"{clips[0].video} is {first.width}×{first.height}"
            )
        if film.frames != first.frames:
            raise ReportError(
                f"{clip.video} has {film.frames} frames, but the reference "
                f"{clips[0].video} has {first.frames}"
            )


def _remark(runs: Sequence[ComparedRun], measures: Sequence[RunMetrics], notes: list[str]) -> None:
    """What a reader must know before believing a number."""
    besides = differing_settings(runs)
    if besides:
        notes.append(f"Besides the method, these differ between the runs: {'; '.join(besides)}.")
    timed = [run for run in runs if run.machine]
    if len(timed) > 1 and not same_machine(timed):
        notes.append("The runs come from different machines, so no speed-up is given.")
    notes.extend(f"The run {run.name} is not finished." for run in runs if not run.complete)
    for run, measured in zip(runs, measures, strict=True):
        notes.extend(f"{run.name}, {clip}: {told}." for clip, told in measured.faults.items())
