"""Which pixels of a film are coloured, and how: all that has a colour is a thing."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from jali.nano.grammar import COLOURS


def unit(frames: Tensor) -> Tensor:
    """Frames, uint8 or 0…1, as fp32 in 0…1."""
    return frames.float() / (255 if frames.dtype == torch.uint8 else 1)


def labels(rgb: Tensor) -> Tensor:
    """The nearest colour's index of every vivid pixel, -1 for the others: […] of […, 3]."""
    high, low = rgb.amax(-1), rgb.amin(-1)
    vivid = ((high - low) > 0.5 * high) & ((high - low) > 0.1)
    found = torch.full(vivid.shape, -1, device=rgb.device)
    found[vivid] = hue_distance(rgb[vivid]).argmin(-1)  # few are
    return found


def hue_distance(rgb: Tensor) -> Tensor:
    """How far a pixel's hue is from that of every colour, in turns: […, colours] of […, 3]."""
    palette = torch.tensor(list(COLOURS.values()), device=rgb.device)
    distance = (_hue(rgb)[..., None] - _hue(palette)).abs()
    return torch.minimum(distance, 1 - distance)


def _hue(rgb: Tensor) -> Tensor:
    """In 0…1 around the circle."""
    r, g, b = rgb.unbind(-1)
    around = torch.atan2(math.sqrt(3) * (g - b), 2 * r - g - b)
    return (around / (2 * math.pi)) % 1.0


def despeckled(mask: Tensor) -> Tensor:
    """[F, H, W] without single pixels."""
    return box(mask.float(), 3) > 0.5


def box(x: Tensor, size: int) -> Tensor:
    """Means over a square of so many pixels about every pixel, an odd number: [F, H, W]."""
    tall = F.avg_pool2d(x[:, None], (size, 1), 1, (size // 2, 0))
    return F.avg_pool2d(tall, (1, size), 1, (0, size // 2))[:, 0]


def shown(mask: Tensor) -> Tensor:
    """In which frames a mask is more than noise: [F]."""
    return mask.sum((1, 2)) > 0.002 * mask[0].numel()


def centres(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Centre [F, 2] (x, y) in pixels and area [F] of a mask per frame."""
    y = torch.arange(mask.shape[1], device=mask.device).float()
    x = torch.arange(mask.shape[2], device=mask.device).float()
    weight = mask.float()
    area = weight.sum((1, 2)).clamp(min=1e-6)
    centre = torch.stack(((weight.sum(1) @ x) / area, (weight.sum(2) @ y) / area), 1)
    return centre, area


def spread(length: int, count: int) -> Tensor:
    """Numbers of at most so many frames, from the first to the last."""
    return torch.linspace(0, length - 1, min(count, length)).round().long()
