"""Jobs are other processes; they must find what these tests give them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = str(Path(__file__).parent)
paths = [HERE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from real_slurm import cluster, results, slurm  # noqa: E402

__all__ = ["cluster", "results", "slurm"]
