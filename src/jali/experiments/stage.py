"""A stage, and what is remembered of it: skipped only if inputs and outputs are what they were."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from jali.experiments.experiment import Experiment
from jali.experiments.results import Results
from jali.experiments.storage import UnreadableError, digest, file_digest, read_json, write_json

log = logging.getLogger("jali")
KIND = "jali-stage"
Progress = Callable[[int, int, str], None]  # (done, total, what): units are the stage's own


@dataclass(frozen=True, slots=True)
class Context:
    """What a stage gets: the experiment, where its files go, and whom to tell how far it is.

    `resuming` says that what an earlier attempt left half-done has the same inputs as this one.
    `shared` is passed along the stages of one run, for what is slow to load. Of several ranks that
    work on one experiment only the one that `writes` does.
    """

    experiment: Experiment
    folder: Path
    progress: Progress
    resuming: bool = False
    writes: bool = True
    shared: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Stage(Protocol):
    """One part of an experiment. It resumes by itself from whatever it left in the folder."""

    @property
    def name(self) -> str: ...

    def needed(self, experiment: Experiment) -> str:
        """Why there is nothing to do, in words; empty where there is."""
        ...

    def weight(self, experiment: Experiment) -> float:
        """How much work it is, in steps of dense generation: for the time that is left."""
        ...

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        """Everything that decides the outputs, as JSON: settings, and digests of files it reads."""
        ...

    def run(self, context: Context) -> Sequence[Path]:
        """Do it; returns the files it made."""
        ...


def inputs_digest(stage: Stage, experiment: Experiment, folder: Path) -> str:
    from jali import __version__

    return digest({"jali": __version__, "stage": stage.name, **stage.inputs(experiment, folder)})


def why_again(stage: Stage, experiment: Experiment, results: Results) -> str:
    """Why a stage has to run, in words; empty where its outputs are complete and its inputs the
    same, to the byte."""
    folder, path = results.folder(experiment.tag), results.record(experiment.tag, stage.name)
    try:
        record = read_json(path, KIND)
        outputs = _outputs(record, path)
    except FileNotFoundError:
        return "not done yet"
    except UnreadableError as error:
        return str(error)
    if record.get("inputs") != inputs_digest(stage, experiment, folder):
        return "its inputs have changed"
    return damage(folder, outputs)


def damage(folder: Path, outputs: Mapping[str, str]) -> str:
    """The first output that is missing or not what it was, in words."""
    for name, expected in outputs.items():
        try:
            found = file_digest(folder / name)
        except FileNotFoundError:
            return f"{folder / name} is missing"
        except OSError as error:
            return f"{folder / name} cannot be read: {error.strerror}"
        if found != expected:
            return f"{folder / name} is not what the stage wrote"
    return ""


def run_stage(stage: Stage, context: Context, results: Results) -> float:
    """Run it, and remember what it read and made; returns seconds."""
    experiment, folder = context.experiment, context.folder
    record = results.record(experiment.tag, stage.name)
    before = inputs_digest(stage, experiment, folder)
    _discard_damaged(record, before, folder)
    record.unlink(missing_ok=True)  # from here on its outputs are in flux
    begun = results.begun(experiment.tag, stage.name)
    context = replace(context, resuming=_begun(begun) == before)
    write_json(begun, {"inputs": before})
    began = time.monotonic()
    files = stage.run(context)
    seconds = time.monotonic() - began
    outputs = {str(path.relative_to(folder)): file_digest(path) for path in sorted(files)}
    facts = {"kind": KIND, "version": 1, "stage": stage.name, "inputs": before}
    write_json(record, facts | {"outputs": outputs, "seconds": round(seconds, 3)})
    return seconds


def _begun(path: Path) -> str | None:
    """The inputs of the attempt that wrote what lies there."""
    try:
        return str(read_json(path).get("inputs"))
    except (OSError, UnreadableError):
        return None


def _discard_damaged(record: Path, inputs: str, folder: Path) -> None:
    """Outputs that are not what the stage wrote would be taken for finished work; they go."""
    try:
        known = read_json(record, KIND)
        outputs = _outputs(known, record)
    except (OSError, UnreadableError):
        return
    for name, expected in outputs.items():
        path = folder / name
        if known.get("inputs") == inputs and path.is_file() and file_digest(path) != expected:
            log.warning("%s is not what the stage wrote; it is made again", path)
            path.unlink()


def recorded_outputs(results: Results, tag: str, stage: str) -> dict[str, str]:
    """The outputs of a stage that was completed; FileNotFoundError or UnreadableError else."""
    path = results.record(tag, stage)
    return _outputs(read_json(path, KIND), path)


def _outputs(record: Mapping[str, Any], path: Path) -> dict[str, str]:
    outputs = record.get("outputs")
    if not isinstance(outputs, dict) or not all(
        isinstance(name, str)
        and isinstance(value, str)
        and not Path(name).is_absolute()
        and ".." not in Path(name).parts
        for name, value in outputs.items()
    ):
        raise UnreadableError(f"{path} lists no outputs")
    return outputs
