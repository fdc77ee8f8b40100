"""calibrate: a book of what attention looks at, from a few dense runs."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.experiments.experiment import Experiment
from jali.experiments.results import Results
from jali.experiments.stage import Stage, StageContext, why_again
from jali.experiments.stages.run import (
    BOOK,
    calibration_prompts,
    load_pipeline,
    pin_threads,
    pixel_inputs,
)

if TYPE_CHECKING:
    from jali.maskbook.calibration import Progress


class Calibration(Stage):
    """Writes `masks.safetensors`. Killed at any moment it loses the prompt in progress."""

    name = "calibrate"

    def needless(self, experiment: Experiment) -> str:
        if experiment.settings.masks is not None:
            return f"the book {experiment.settings.masks} is given"
        if not experiment.calibrate:
            return "calibration is left out"
        if not experiment.wants_book:
            return f"{experiment.variant} plans as it goes, there is nothing to calibrate"
        return ""

    def weight(self, experiment: Experiment) -> float:
        return experiment.calibration_prompts * (experiment.settings.steps or 1)

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:  # noqa: ARG002
        return pixel_inputs(experiment) | {
            "prompts": list(calibration_prompts(experiment)),
            "budget": experiment.settings.budget,
        }

    def run(self, context: StageContext) -> Sequence[Path]:
        from jali.maskbook.calibration import calibrate

        experiment, book = context.experiment, context.folder / BOOK
        if not context.resuming:
            book.unlink(missing_ok=True)
            shutil.rmtree(book.with_name(f"{BOOK}.partial"), ignore_errors=True)

        def progress(at: Progress) -> None:
            what = "writing the book" if at.writing else f"prompt {at.prompt + 1} of {at.prompts}"
            done = at.prompts * at.steps if at.writing else at.prompt * at.steps + at.step
            context.progress(done, at.prompts * at.steps, what)

        s = experiment.settings
        with pin_threads(experiment):
            calibrate(
                load_pipeline(context), calibration_prompts(experiment), book, model=s.model,
                steps=s.steps, seed=s.seed, budgets=(0.5 if s.budget is None else s.budget,),
                resume=True, progress=progress, height=s.height, width=s.width,
                num_frames=s.num_frames, guidance=s.guidance,
            ).close()  # fmt: skip
        return [book]


def with_own_book(experiment: Experiment, results: Results) -> Experiment:
    """Without calibration: the book that an earlier run left under this tag, if there is one."""
    own = results.folder(experiment.tag) / BOOK
    if not own.is_file():
        return experiment
    as_before = replace(experiment, calibrate=True)
    if as_before.wants_book and not why_again(Calibration(), as_before, results):
        return as_before  # complete and unchanged, so it is skipped by itself
    return replace(experiment, settings=replace(experiment.settings, masks=str(own)))
