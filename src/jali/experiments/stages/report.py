"""report: one page that shows the clips of an experiment side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.experiments.experiment import Experiment
from jali.experiments.stage import Context
from jali.experiments.stages.quality import CLIPS
from jali.experiments.stages.variant import DENSE
from jali.experiments.storage import file_digest

PAGE = "report.html"


@dataclass(frozen=True, slots=True)
class Report:
    """Writes `report.html`."""

    name: str = "report"

    def needed(self, experiment: Experiment) -> str:  # noqa: ARG002
        return ""

    def weight(self, experiment: Experiment) -> float:  # noqa: ARG002
        return 1.0

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        read = [
            *(folder / CLIPS / name / "manifest.json" for name in (DENSE, *experiment.variants)),
            *(folder / CLIPS / name / "metrics.json" for name in experiment.variants),
        ]
        return {str(p.relative_to(folder)): file_digest(p) if p.exists() else None for p in read}

    def run(self, context: Context) -> Sequence[Path]:
        from jali.evaluation.report import compare_page, write_page

        page = context.folder / PAGE
        if context.writes:
            names = (DENSE, *context.experiment.variants)
            context.progress(0, 1, "drawing the page")
            write_page(page, compare_page([context.folder / CLIPS / name for name in names]))
        return [page]
