"""The light on a film: which of the known lights leaves the background most even."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from training.judge.background import Background, line
from training.world.film import lights, unit

COLUMNS = 10  # of the picture, whose brightness is followed


@dataclass(frozen=True)
class Light:
    """Its words, "" where it does not change, and the logarithm of it: [F, columns]."""

    words: str
    field: Tensor

    def over(self, wide: int) -> Tensor:
        """The logarithm of it in so many columns: [F, 1, wide]."""
        return torch.nn.functional.interpolate(self.field[:, None], wide, mode="linear")


NO_LIGHT = Light("", torch.zeros(1, COLUMNS))


def light(behind: Background) -> Light:
    tone = _columns(behind.tone * behind.seen)
    weight = _columns(behind.seen)
    tone = tone / weight.clamp(min=1e-3)
    t = torch.arange(len(tone), device=tone.device)[:, None] / unit(len(tone))
    known = {"": torch.ones_like(tone)} | lights(line(COLUMNS, tone)[None] + 0.5, t)
    errors = {}
    for words, lit in known.items():
        left = tone - lit.log()
        mean = (left * weight).sum() / weight.sum().clamp(min=1e-3)
        errors[words] = float(((left - mean).square() * weight).sum())
    best = min(errors, key=errors.__getitem__)
    return Light(best, known[best].log().expand_as(tone))


def _columns(x: Tensor) -> Tensor:
    """Means of columns: [F, COLUMNS] of [F, H, W]."""
    return torch.nn.functional.adaptive_avg_pool1d(x.mean(1), COLUMNS)
