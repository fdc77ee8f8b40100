"""What lies behind all things: how bright it is, where it is seen."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from training.judge.colour import box, labels

REACH = 0.0625  # about a thing there are its shadow and soft edges, in heights
FLOOR = 0.02  # added before logarithms: in black there is nothing but noise


@dataclass(frozen=True)
class Background:
    """Logarithms of brightness, so that light adds to them: fp32 [F, H, W], and where the
    background is seen: 1, else 0."""

    tone: Tensor
    seen: Tensor

    def mean(self, values: Tensor, size: int) -> Tensor:
        """Means over what is seen in a square of so many pixels about every pixel: [F, H, W]."""
        total, share = (box(x, size) for x in (values * self.seen, self.seen))
        return total / share.clamp(min=1e-3)


def background(rgb: Tensor, high: int) -> Background:
    """Of frames [F, H, W, 3] in 0…1, in so many rows."""
    small = resized(rgb, high)
    coloured = (labels(small) >= 0).float()[:, None]
    size = 2 * round(REACH * high) + 1
    seen = 1 - F.max_pool2d(coloured, size, 1, size // 2)[:, 0]
    return Background((small.mean(-1) + FLOOR).log(), seen)


def resized(rgb: Tensor, high: int) -> Tensor:
    """Frames [F, H, W, 3] in so many rows."""
    if rgb.shape[1] == high:
        return rgb
    wide = round(high * rgb.shape[2] / rgb.shape[1])
    moved = F.interpolate(rgb.permute(0, 3, 1, 2), (high, wide), mode="bilinear", antialias=True)
    return moved.permute(0, 2, 3, 1)


def line(count: int, like: Tensor) -> Tensor:
    """Middles of so many pixels, −½…½."""
    return (torch.arange(count, device=like.device) + 0.5) / count - 0.5
