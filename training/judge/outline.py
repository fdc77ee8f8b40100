"""Shapes, told by laying known outlines over a mask."""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch.nn import functional as F

from jali.nano.grammar import SHAPES
from training.film import distance
from training.judge.colour import centres, spread

OUTLINE = 40  # pixels of a normalised outline
ANGLES = 36


def shape(mask: Tensor) -> str:
    """What nine frames of a mask [F, H, W] look most like."""
    return SHAPES[best(overlaps(mask[spread(len(mask), 9)]))]


def best(overlap: Tensor) -> int:
    """The shape that fits best, of [F, shapes]."""
    # Frames in which it is cut off or covered count less than those in which something fits.
    return int((overlap**4).mean(0).argmax())


def overlaps(mask: Tensor) -> Tensor:
    """How well every shape fits, at its best angle: intersection over union [F, shapes]."""
    outlines = _normalised(mask).flatten(1)
    known = _outlines(mask.device)
    both = outlines @ known.T
    either = outlines.sum(1, keepdim=True) + known.sum(1) - both
    return (both / either).view(len(mask), len(SHAPES), ANGLES).amax(-1)


def _normalised(mask: Tensor) -> Tensor:
    """Masks moved to their centre and scaled to one area: fp32 [F, OUTLINE, OUTLINE]."""
    centre, area = centres(mask)
    reach = 2.2 * (area / math.pi).sqrt()
    return (window(mask.float()[:, None], centre, reach, OUTLINE)[:, 0] > 0.5).float()


def window(picture: Tensor, centre: Tensor, reach: Tensor, side: int) -> Tensor:
    """Squares [F, C, side, side] of pictures [F, C, H, W], so far in pixels about a centre."""
    high, wide = picture.shape[2:]
    line = torch.linspace(-1, 1, side, device=picture.device)
    x = centre[:, 0, None, None] + reach[:, None, None] * line
    y = centre[:, 1, None, None] + reach[:, None, None] * line[:, None]
    x, y = torch.broadcast_tensors(x, y)
    grid = torch.stack((2 * (x + 0.5) / wide - 1, 2 * (y + 0.5) / high - 1), -1)
    return F.grid_sample(picture, grid, align_corners=False)


@functools.lru_cache(maxsize=4)
def _outlines(device: torch.device) -> Tensor:
    """Every shape at every angle: fp32 [shapes * angles, OUTLINE²]."""
    line = torch.linspace(-1.3, 1.3, 128, device=device)
    v, u = torch.meshgrid(line, line, indexing="ij")
    made = []
    for kind in range(len(SHAPES)):
        for step in range(ANGLES):
            angle = 2 * math.pi * step / ANGLES
            c, s = math.cos(angle), math.sin(angle)
            which = torch.tensor(kind, device=device)
            made.append(distance(u * c + v * s, v * c - u * s, which) < 0)
    return _normalised(torch.stack(made)).flatten(1)


@functools.cache
def areas() -> tuple[float, ...]:
    """Of every shape, its radius being 1."""
    line = torch.linspace(-1.3, 1.3, 261)
    v, u = torch.meshgrid(line, line, indexing="ij")
    kinds = range(len(SHAPES))
    return tuple(float((distance(u, v, torch.tensor(k)) < 0).sum()) * 1e-4 for k in kinds)
