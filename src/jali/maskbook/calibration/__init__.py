"""Calibration: prompts in, a MaskBook out."""

from __future__ import annotations

from jali.maskbook.calibration.scorer import Antidiagonal, BlockMeans, Sampled, Scorer
from jali.maskbook.calibration.session import BUDGETS, Progress, calibrate

__all__ = [
    "BUDGETS",
    "Antidiagonal",
    "BlockMeans",
    "Progress",
    "Sampled",
    "Scorer",
    "calibrate",
]
