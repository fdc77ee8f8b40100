"""Real clips take minutes and both CPUs: a suite of its own, beside which nothing else runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "experiments"))

from real_slurm import cluster, results, slurm

__all__ = ["cluster", "results", "slurm"]
