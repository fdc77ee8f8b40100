"""Everything a page shows, read and checked: runs, clips that all of them have, films, metrics."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.error import InputError
from jali.evaluation.report.cost import read_sites
from jali.evaluation.report.difference import Difference, read_difference
from jali.evaluation.report.film import Film, read_film
from jali.evaluation.report.measure import NO_METRICS, RunMetrics, read_metrics
from jali.evaluation.report.run import (
    ComparedClip,
    ComparedRun,
    differing_settings,
    read_runs,
    same_machine,
)
from jali.evaluation.report.summary import RunSummary, headline, summarize

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Runs over the same clips, the reference first.

    `films`, `sites` and `differences` hold one entry per clip, in it one per run (the reference
    differs from itself in nothing: None); `metrics` one per run, empty for the reference.
    """

    runs: tuple[ComparedRun, ...]
    clips: tuple[str, ...]
    films: Mapping[str, tuple[Film, ...]]
    sites: Mapping[str, tuple[Mapping[str, Any] | None, ...]]
    differences: Mapping[str, tuple[Difference | None, ...]]
    metrics: tuple[RunMetrics, ...]
    notes: tuple[str, ...]

    @property
    def metric_names(self) -> list[str]:
        """Metrics that any run has."""
        return list(dict.fromkeys(name for found in self.metrics for name in found.names()))

    def rows(self, clips: Sequence[str] | None = None) -> list[RunSummary]:
        """The numbers of each run, over all clips or these."""
        chosen = self.clips if clips is None else clips
        return [
            summarize(run, self.runs[0], metrics, chosen)
            for run, metrics in zip(self.runs, self.metrics, strict=True)
        ]

    def headline(self) -> str:
        said = headline(self.rows())
        return said.loud + said.quiet

    def prompt(self, clip: str) -> str:
        return next((run.clips[clip].prompt for run in self.runs if run.clips[clip].prompt), "")

    def to_dict(self) -> dict[str, Any]:
        """What the page says in numbers, for machines."""
        return {
            "kind": "jali-comparison",
            "version": 1,
            "headline": self.headline(),
            "clips": list(self.clips),
            "rows": [row.to_dict() for row in self.rows()],
            "notes": list(self.notes),
        }


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
    clips = _shared_clips(runs, limit, notes)
    films: dict[str, tuple[Film, ...]] = {}
    sites: dict[str, tuple[Mapping[str, Any] | None, ...]] = {}
    differences: dict[str, tuple[Difference | None, ...]] = {}
    for clip in clips:
        progress(f"reading {clip}")
        each = [run.clips[clip] for run in runs]
        films[clip] = tuple(read_film(one.video, one.facts.get("fps")) for one in each)
        _check_sizes(each, films[clip])
        sites[clip] = tuple(None if one.sites is None else read_sites(one.sites) for one in each)
        first, fps = each[0].exact, films[clip][0].fps
        apart = (read_difference(first, one.exact, fps) for one in each[1:])
        differences[clip] = (None, *apart)
    lengths = {clip: films[clip][0].frames for clip in clips}
    found = [NO_METRICS]
    for run in runs[1:]:
        progress(f"metrics of {run.name}")
        found.append(read_metrics(runs[0], run, lengths, metrics, notes))
    notes.extend([*_remarks(runs, found), *_first_clips(runs, clips)])
    return Comparison(
        tuple(runs), tuple(clips), films, sites, differences, tuple(found), tuple(notes)
    )


def _shared_clips(runs: Sequence[ComparedRun], limit: int | None, notes: list[str]) -> list[str]:
    shared = [name for name in runs[0].clips if all(name in run.clips for run in runs)]
    if not shared:
        first = ", ".join(f"{run.folder} has {next(iter(run.clips))}" for run in runs)
        raise InputError(f"no clip has the same name in every folder ({first})")
    for run in runs:
        lonely = [name for name in run.clips if name not in shared]
        if lonely:
            more = f" and {len(lonely) - 1} more" if len(lonely) > 1 else ""
            notes.append(f"Only some runs have {lonely[0]}{more} (here: {run.name}); left out.")
    if limit is not None and len(shared) > limit:
        notes.append(f"The first {limit} of {len(shared)} clips are shown and counted.")
    return shared[:limit]


def _check_sizes(clips: Sequence[ComparedClip], films: Sequence[Film]) -> None:
    first, reference = films[0], f"but the reference {clips[0].video}"
    for clip, film in zip(clips, films, strict=True):
        told = clip.facts.get("frames")
        if told is not None and told != film.frames:
            raise InputError(f"{clip.video} has {film.frames} frames, but its manifest says {told}")
        if (film.height, film.width) != (first.height, first.width):
            raise InputError(
                f"{clip.video} is {film.width}×{film.height}, {reference} is "
                f"{first.width}×{first.height}"
            )
        if film.frames != first.frames:
            raise InputError(
                f"{clip.video} has {film.frames} frames, {reference} has {first.frames}"
            )


def _remarks(runs: Sequence[ComparedRun], metrics: Sequence[RunMetrics]) -> list[str]:
    """What a reader must know before believing a number."""
    notes = []
    besides = differing_settings(runs)
    if besides:
        notes.append(f"Besides the method, these differ between the runs: {'; '.join(besides)}.")
    timed = [run for run in runs if run.machine]
    if len(timed) > 1 and not same_machine(timed):
        notes.append("The runs come from different machines, so no speed-up is given.")
    notes.extend(f"The run {run.name} is not finished." for run in runs if not run.complete)
    for run, found in zip(runs, metrics, strict=True):
        notes.extend(f"{run.name}, {clip}: {told}." for clip, told in found.faults.items())
    return notes


def _first_clips(runs: Sequence[ComparedRun], clips: Sequence[str]) -> list[str]:
    """Which seconds are with loading and compilation, and what follows from that."""
    cold = {run.name: sum(run.clips[clip].cold for clip in clips) for run in runs}
    notes = []
    if some := [name for name, count in cold.items() if 0 < count < len(clips)]:
        notes.append(
            f"A first clip takes its seconds with loading and compilation, so they are in no mean "
            f"and no speed-up (here: {', '.join(some)})."
        )
    if alone := [name for name, count in cold.items() if count == len(clips)]:
        notes.append(
            f"All seconds of {', '.join(alone)} are those of a first clip, with loading and "
            f"compilation, so no speed-up over or of it is given."
        )
    return notes
