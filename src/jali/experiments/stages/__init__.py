"""The stages of an experiment, in order."""

from __future__ import annotations

from jali.experiments.stage import Stage
from jali.experiments.stages.benchmark import Benchmark
from jali.experiments.stages.calibration import Calibration
from jali.experiments.stages.quality import Quality
from jali.experiments.stages.report import Report

__all__ = ["Benchmark", "Calibration", "Quality", "Report", "all_stages"]


def all_stages() -> tuple[Stage, ...]:
    """calibrate ▶ benchmark ▶ quality ▶ report."""
    return (Calibration(), Benchmark(), Quality(), Report())
