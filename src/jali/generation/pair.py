"""A run and its dense twin: which folders they go to."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from jali.generation.folder import find_run, visible_names
from jali.generation.manifest import NAME, RunFolderError
from jali.generation.settings import Settings, dense_twin


def plan_runs(settings: Settings, folder: Path, with_dense: bool) -> dict[Path, Settings]:
    """Which resolved settings go to which folder: FOLDER alone, or FOLDER/dense and FOLDER/METHOD.

    Other files in the folder of two raise `RunFolderError`, and so does one run in the place of
    two. Hand the result to `produce_runs`.
    """
    if not with_dense or settings.label == "dense":
        if any((folder / name / NAME).exists() for name in (settings.label, "dense")):
            raise RunFolderError(f"{folder} holds runs in folders of its own; choose another one")
        return {folder: settings}
    if (folder / NAME).exists():
        raise RunFolderError(f"{folder} is a run itself; with --with-dense choose another folder")
    for name in visible_names(folder):
        if name not in ("dense", settings.label):
            raise RunFolderError(f"{folder} holds {name}, which is not of this run; choose another")
    return {folder / "dense": dense_twin(settings), folder / settings.label: settings}


def choose_folder(settings: Settings, prompts: Sequence[str], with_dense: bool) -> Path:
    """A folder by the name of what is made: the first that is free, or holds this very run."""
    share = "" if settings.budget in (None, 1.0) else f"-{settings.budget:g}"
    name = f"{settings.model}-{settings.preset or settings.label}{share}"
    for number in range(1, 10_000):
        folder = Path("outputs") / (name if number == 1 else f"{name}-{number}")
        try:
            for own_folder, own in plan_runs(settings, folder, with_dense).items():
                find_run(own_folder, own, prompts)
        except ValueError:
            continue
        return folder
    raise RunFolderError(f"outputs holds too many runs of {name}; give --output-dir")
