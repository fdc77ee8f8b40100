"""Calibration: prompts in, a MaskBook out."""

from __future__ import annotations

from jali.calibrate.calibration import BUDGETS, Progress, calibrate
from jali.calibrate.scorer import Antidiagonal, BlockMeans, Sampled, Scorer

__all__ = [
    "BUDGETS",
    "Antidiagonal",
    "BlockMeans",
    "Progress",
    "Sampled",
    "Scorer",
    "calibrate",
]
