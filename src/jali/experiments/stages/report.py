"""report: one page that shows the clips of an experiment side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jali.experiments.experiment import DENSE, Experiment
from jali.experiments.stage import Stage, StageContext
from jali.experiments.stages.quality import CLIPS
from jali.files import file_digest


class Report(Stage):
    """Writes `report.html`."""

    name = "report"

    def weight(self, experiment: Experiment) -> float:  # noqa: ARG002
        return 1.0

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        manifests = [f"{CLIPS}/{name}/manifest.json" for name in (DENSE, *experiment.variants)]
        metrics = [f"{CLIPS}/{name}/metrics.json" for name in experiment.variants]
        return {
            name: file_digest(folder / name) if (folder / name).exists() else None
            for name in (*manifests, *metrics)
        }

    def run(self, context: StageContext) -> Sequence[Path]:
        from jali.evaluation.report import compare_page, write_page

        page = context.folder / "report.html"
        if context.writes:
            names = (DENSE, *context.experiment.variants)
            context.progress(0, 1, "drawing the page")
            write_page(page, compare_page([context.folder / CLIPS / name for name in names]))
        return [page]
