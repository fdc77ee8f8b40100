"""Experiments: calibrate, benchmark, quality in one job; sweeps of them, here or on Slurm."""

from __future__ import annotations

from jali.experiments.experiment import Experiment
from jali.experiments.job import run_experiment
from jali.experiments.resources import Resources
from jali.experiments.results import Results
from jali.experiments.sweep import Sweep, read_sweep

Place = Results  # its name in earlier pages

__all__ = ["Experiment", "Resources", "Results", "Sweep", "read_sweep", "run_experiment"]
