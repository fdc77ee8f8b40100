"""What no metric should have to tell: black frames, frames that stand still, NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# As ffmpeg's blackdetect: nearly all pixels below a tenth of full light.
_DARK, _NEARLY_ALL = 0.1 * 255, 0.98
# A still picture can come back from a lossy codec a level or two off; any motion is more.
_STILL = 2


@dataclass(frozen=True, slots=True)
class Checks:
    """How many frames of a clip are black, repeat the frame before, or held NaN or infinity."""

    black: int = 0
    frozen: int = 0
    nan: int = 0

    def __add__(self, other: Checks) -> Checks:
        """Of two parts of a clip together."""
        return Checks(self.black + other.black, self.frozen + other.frozen, self.nan + other.nan)


def check(frames: Tensor, nonfinite: Tensor, before: Tensor | None) -> Checks:
    """Of uint8 frames [f, H, W, 3]; `before` is the frame ahead of them, if there is one."""
    weights = torch.tensor([0.299, 0.587, 0.114], device=frames.device)
    black = frozen = 0
    for frame in frames:  # one at a time, since the floats are four times the frames
        dark = (frame.float() @ weights) < _DARK
        black += int(dark.float().mean() >= _NEARLY_ALL)
        if before is not None:
            frozen += int((frame.short() - before.short()).abs().max() <= _STILL)
        before = frame
    return Checks(black, frozen, int(nonfinite.sum()))
