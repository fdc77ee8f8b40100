"""What a background is made of."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from training.judge.background import Background, line
from training.judge.light import Light
from training.judge.pattern import pattern

HIGH = 128  # rows of the pictures that are looked at
RADII = tuple(
    r * HIGH
    for r in (0.02, 0.035, 0.05, 0.07, 0.09, 0.11, 0.13, 0.15, 0.17, 0.19, 0.21, 0.24, 0.27, 0.3)
)


def features(behind: Background, lit: Light) -> Tensor:
    """[F, features] of a background in HIGH rows."""
    tone = behind.tone - lit.over(behind.tone.shape[2])
    seen = behind.seen
    count = seen.sum((1, 2), keepdim=True).clamp(min=1)
    tone = (tone - (tone * seen).sum((1, 2), keepdim=True) / count) * seen
    # Only a landscape is brighter above and has its detail below.
    y = line(HIGH, tone)[:, None] * seen
    y = (y - y.sum((1, 2), keepdim=True) / count) * seen
    slope = (tone * y).sum((1, 2)) / y.square().sum((1, 2)).clamp(min=1e-3)
    detail = (tone - F.avg_pool2d(tone[:, None], 9, 1, 4)[:, 0]).square() * seen
    above, below = (
        (detail[:, part].sum((1, 2)) / seen[:, part].sum((1, 2)).clamp(min=1) + 1e-6).log()
        for part in (slice(None, HIGH // 3), slice(-HIGH // 3, None))
    )
    return torch.cat((pattern(tone, seen, RADII), torch.stack((slope, below - above), 1)), 1)
