"""Stages that take no time and need no model, and leave a trace of every time they ran."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.experiments.experiment import Experiment
from jali.experiments.stage import Stage, StageContext
from jali.files import file_digest, write_json

UNITS = 3


@dataclass(frozen=True)
class Fake:
    """Works in units, one file each, and goes on after those that are there.

    `trouble` is looked up as a file in the folder above the results: `STAGE-UNIT` holds a word
    that says what happens there, and is removed so that it happens once.
    """

    name: str
    reads: str | None = None
    seconds: float = 0.0

    def needless(self, experiment: Experiment) -> str:
        return "not asked for" if self.name == "calibrate" and not experiment.calibrate else ""

    def weight(self, experiment: Experiment) -> float:  # noqa: ARG002
        return 1.0

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        read = folder / self.reads if self.reads else None
        return {
            "budget": experiment.settings.budget if self.name != "calibrate" else None,
            "seed": experiment.settings.seed,
            "read": file_digest(read) if read is not None and read.exists() else None,
        }

    def run(self, context: StageContext) -> Sequence[Path]:
        folder, parts = context.folder, []
        for unit in range(UNITS):
            part = folder / "parts" / f"{self.name}-{unit}"
            parts.append(part)
            if not part.exists():
                note(context, self.name, unit)
                happen(context, f"{self.name}-{unit}")
                time.sleep(self.seconds)
                part.parent.mkdir(exist_ok=True)
                part.write_text(f"{self.name} {unit} seed {context.experiment.settings.seed}\n")
            context.progress(unit + 1, UNITS, f"unit {unit}")
        return [*parts, self.result(context)]

    def result(self, context: StageContext) -> Path:
        names = {"benchmark": "speed", "quality": "quality"}
        kind = names.get(self.name, self.name)
        path = context.folder / f"{kind}.json"
        budget = context.experiment.settings.budget or 1.0
        row = {"variant": context.experiment.variant, "budget": budget, "cost": budget}
        rows = {
            "speed": [
                {"variant": "dense", "seconds": 2.0, "cost": 1.0, "speedup": 1.0},
                {
                    **row,
                    "seconds": 1.0 + budget,
                    "speedup": 2.0 / (1.0 + budget),
                    "cost": budget + 0.25,
                },  # of fewer steps, so another share
            ],
            "quality": [{**row, "psnr": {"mean": 20 + 10 * budget, "low": 1, "high": 40, "n": 2}}],
        }
        facts = {"kind": f"jali-{kind}", "version": 1, "tag": context.experiment.tag}
        facts |= {"steps": 2} if kind == "speed" else {}
        write_json(path, facts | {"rows": rows.get(kind, [])})
        return path


def note(context: StageContext, stage: str, unit: int) -> None:
    with (context.folder.parent / "ran.jsonl").open("a") as file:
        file.write(json.dumps([context.experiment.tag, stage, unit, os.getpid()]) + "\n")


def ran(results: Path) -> list[tuple[str, str, int]]:
    """Every unit that was begun, in order."""
    path = results / "ran.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [tuple(json.loads(line)[:3]) for line in lines]


def trouble(results: Path, tag: str, where: str, what: str, times: int = 1) -> None:
    path = results / "trouble" / f"{tag}-{where}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([what, times]))


def happen(context: StageContext, where: str) -> None:
    path = context.folder.parent / "trouble" / f"{context.experiment.tag}-{where}"
    try:
        what, times = json.loads(path.read_text())
    except FileNotFoundError:
        return
    path.unlink()
    if times > 1:
        path.write_text(json.dumps([what, times - 1]))
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif what == "raise":
        raise RuntimeError("the fake stage was told to fail")
    elif what == "hang":
        time.sleep(3600)
    elif what == "interrupt":
        raise KeyboardInterrupt
    elif what == "full":
        raise OSError(28, "No space left on device", str(context.folder))


def stages(seconds: float = 0.0) -> tuple[Stage, ...]:
    return (
        Fake("calibrate", seconds=seconds),
        Fake("benchmark", "calibrate.json", seconds),
        Fake("quality", "calibrate.json", seconds),
        Fake("report", "quality.json", seconds),
    )


@dataclass(frozen=True)
class Slowly:
    """A factory of stages that can be pickled."""

    seconds: float

    def __call__(self) -> tuple[Stage, ...]:
        return stages(self.seconds)


def eventually(condition: Callable[[], Any], seconds: float = 30.0, every: float = 0.1) -> Any:
    """The first true answer, or a failure after some time."""
    end = time.monotonic() + seconds
    while True:
        found = condition()
        if found:
            return found
        if time.monotonic() > end:
            raise AssertionError(f"{condition} was not true within {seconds} s")
        time.sleep(every)
