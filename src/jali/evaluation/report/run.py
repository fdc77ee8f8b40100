"""Runs as the page needs them: what was asked, which clips there are, what they cost.

A folder with a manifest is one that `jali generate` wrote. A plain folder of videos works as well;
it has no prompts, timings or costs.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from jali.error import InputError
from jali.evaluation.quality.pairs import BEST_FIRST, MANIFEST, FoundClip, clip_files

# A folder may hold a clip twice, for people and for metrics: the first kind found here is shown.
SHOWN_FIRST = (".mp4", ".m4v", ".webm", ".mov", ".mkv", ".avi", ".gif")
# Settings that change what a clip shows or how long it takes, whatever the method.
COMPARABLE = (
    "model", "path", "lora", "steps", "seed", "guidance", "height", "width", "num_frames",
    "negative_prompt", "arguments", "dtype",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ComparedClip:
    """One clip of a run: the file for people, the one that lost least, and what a manifest says.

    `facts` is its entry there, empty where there is none.
    """

    name: str
    video: Path
    best: Path
    sites: Path | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)

    @property
    def cold(self) -> bool:
        """Whether its seconds hold what is loaded, compiled and tuned once."""
        return bool(self.facts.get("cold"))

    @property
    def prompt(self) -> str:
        return str(self.facts.get("prompt") or "")

    @property
    def exact(self) -> FoundClip:
        """What is measured."""
        return FoundClip(self.name, self.best, self.facts.get("frames"), self.facts.get("fps"))


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """A folder of clips and, where a manifest says so, how they were made."""

    name: str
    folder: Path
    clips: Mapping[str, ComparedClip]
    settings: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, Any] = field(default_factory=dict)
    complete: bool = True

    def numbers(self, clips: Iterable[str], key: str) -> list[float]:
        """A number of each clip's manifest entry, of those clips that have it."""
        found = [self.clips[clip].facts.get(key) for clip in clips]
        return [float(value) for value in found if isinstance(value, int | float)]


def read_runs(folders: Sequence[Path], names: Sequence[str] = ()) -> list[ComparedRun]:
    """The runs in `folders`, the reference first, each with a name of its own.

    A single folder that holds run folders stands for them, its `dense` one being the reference.
    """
    if not folders:
        raise InputError("name the reference folder and at least one more")
    folders = _runs_inside(folders[0]) if len(folders) == 1 else list(folders)
    if names and len(names) != len(folders):
        raise InputError(f"there are {len(folders)} runs, and {len(names)} names for them")
    if len(names) != len(set(names)):
        raise InputError(f"names must differ, got {', '.join(names)}")
    runs = [_read(folder) for folder in folders]
    if names:
        return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]
    return _with_distinct_names(runs)


def _read(folder: Path) -> ComparedRun:
    """The run in `folder`, with or without a manifest."""
    _check_folder(folder)
    if (folder / MANIFEST).exists():
        return _with_manifest(folder)
    videos = clip_files(folder, SHOWN_FIRST)
    if not videos:
        raise InputError(
            f"{folder} holds neither a {MANIFEST} nor videos ({', '.join(SHOWN_FIRST)})"
        )
    best = clip_files(folder, BEST_FIRST)
    clips = {name: ComparedClip(name, path, best[name]) for name, path in sorted(videos.items())}
    return ComparedRun(folder.resolve().name, folder, clips)


def differing_settings(runs: Sequence[ComparedRun]) -> list[str]:
    """In words, what besides the method differs between the runs and so colours every number."""
    told = [run for run in runs if run.settings]
    said = []
    for key in COMPARABLE:
        values = [run.settings.get(key) for run in told]
        if len({json.dumps(value, sort_keys=True) for value in values}) > 1:
            said.append(f"{key.replace('_', ' ')} ({', '.join(map(str, values))})")
    return said


def same_machine(runs: Sequence[ComparedRun]) -> bool:
    """Whether times of the runs may be divided by each other."""
    return len({json.dumps(dict(run.machine), sort_keys=True) for run in runs}) == 1


def _runs_inside(folder: Path) -> list[Path]:
    _check_folder(folder)
    found = sorted(path.parent for path in folder.glob(f"*/{MANIFEST}"))
    found.sort(key=lambda path: path.name != "dense")
    if len(found) < 2:
        raise InputError(
            f"{folder} is one run, and a comparison needs two: name the reference, then the others "
            "(or a folder that holds several runs, as `jali generate --with-dense` makes it)"
        )
    return found


def _check_folder(folder: Path) -> None:
    if not folder.exists():
        raise InputError(f"there is no folder {folder}")
    if not folder.is_dir():
        raise InputError(f"{folder} is a file; name the folder that holds it")
    try:
        next(folder.iterdir(), None)
    except OSError as error:
        raise InputError(f"{folder} cannot be read: {error.strerror}") from None


def _with_manifest(folder: Path) -> ComparedRun:
    from jali.generation.manifest import read_run

    run = read_run(folder)
    if not run.clips:
        raise InputError(f"the run in {folder} has no clips yet")
    clips = {
        clip.name: ComparedClip(
            clip.name,
            run.path(clip.video),
            run.path(clip.lossless or clip.video),
            run.path(clip.sites),
            asdict(clip),
        )
        for clip in run.clips
    }
    settings = run.settings.to_dict()
    method = settings.get("preset") or run.settings.label
    budget = settings.get("budget")
    total = settings.get("total")
    share = f" total {total:g}" if total is not None else "" if budget is None else f" {budget:g}"
    name = method if method == "dense" else f"{method}{share}"
    versions = {"jali": run.jali, **(run.versions or {})}
    return ComparedRun(name, folder, clips, settings, run.machine or {}, versions, run.complete)


def _with_distinct_names(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Runs of the same name get their folder's, and where that is the same too, a number."""
    for rename in (lambda run, _: run.folder.resolve().name, lambda run, n: f"{run.name} ({n})"):
        names = [run.name for run in runs]
        runs = [
            replace(run, name=rename(run, place)) if names.count(run.name) > 1 else run
            for place, run in enumerate(runs, 1)
        ]
    return runs
