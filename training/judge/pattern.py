"""Numbers that tell patterns apart, whichever way they are turned.

How alike a surface is to itself a distance away, in how many directions; how its brightness is
distributed; how sharp its edges are. A probe (`probe.py`) makes words of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

ANGLES = 24
HARMONICS = 4  # the mean over all directions, and waves of two, four and six around the circle
SHARES = (0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
FLAT = 0.005  # contrast, in logarithms of brightness: less is a step of 256, or noise
FAINT = 0.03  # contrast, in logarithms of brightness, of which half is believed


def pattern(tone: Tensor, mask: Tensor, radii: Sequence[float]) -> Tensor:
    """[n, radii * HARMONICS + shares + 3] of [n, h, w], where the mask [n, h, w] is 1."""
    count = mask.sum((1, 2)).clamp(min=1)[:, None, None]
    tone = (tone - (tone * mask).sum((1, 2), keepdim=True) / count) * mask
    contrast = (tone.square().sum((1, 2)) / count[:, 0, 0]).sqrt().clamp(min=1e-4)
    around = self_likeness(tone, mask, radii) * (contrast / (contrast + FAINT))[:, None]
    tone = tone / contrast[:, None, None]
    down, right = torch.gradient(tone, dim=(1, 2))
    inner = -F.max_pool2d(-mask[:, None], 3, 1, 1)[:, 0]
    steep = (down.square() + right.square()) * inner
    inside = inner.sum((1, 2)).clamp(min=1)
    steepness = steep.sum((1, 2)) / inside + 1e-6
    # 1 where the slope is the same everywhere, less where it is gathered in edges.
    even = (steep.sqrt().sum((1, 2)) / inside).square() / steepness
    edges = torch.stack((contrast.log(), steepness.log(), even), 1)
    return torch.cat((around, quantiles(tone, mask, SHARES), edges), 1)


def flat(features: Tensor, radii: Sequence[float]) -> Tensor:
    """Which features that begin with those of `pattern` are of a surface without one: [n]."""
    return features[:, len(radii) * HARMONICS + len(SHARES)] < math.log(FLAT)


def self_likeness(tone: Tensor, mask: Tensor, radii: Sequence[float]) -> Tensor:
    """Autocorrelation on circles of such radii, as heights of its waves around the circle."""
    pad = int(max(radii)) + 2
    size = (tone.shape[1] + pad, tone.shape[2] + pad)
    waves = torch.fft.rfft2(torch.stack((tone, mask), 1), s=size)
    product, pairs = torch.fft.irfft2(waves.abs().square(), s=size).unbind(1)
    alike = product / pairs.clamp(min=1)
    alike = alike / alike[:, :1, :1].clamp(min=1e-8)
    alike = torch.roll(alike, (pad, pad), (1, 2))[:, None, : 2 * pad + 1, : 2 * pad + 1]
    turn = torch.arange(ANGLES, device=tone.device) * (math.pi / ANGLES)
    far = torch.tensor(radii, device=tone.device)[:, None] / pad
    grid = torch.stack((far * turn.cos(), far * turn.sin()), -1).expand(len(tone), -1, -1, -1)
    circles = F.grid_sample(alike, grid, align_corners=True)[:, 0]
    heights = torch.fft.rfft(circles).abs()[..., 1:HARMONICS] / ANGLES
    return torch.cat((circles.mean(-1, keepdim=True), heights), -1).flatten(1)


def quantiles(values: Tensor, mask: Tensor, shares: Sequence[float]) -> Tensor:
    """[n, shares] of values [n, h, w] where the mask is 1."""
    ordered = values.masked_fill(mask < 0.5, math.inf).flatten(1).sort(1).values
    last = (mask >= 0.5).sum((1, 2)).clamp(min=1) - 1
    at = (last[:, None] * torch.tensor(shares, device=values.device)).round().long()
    return ordered.gather(1, at).nan_to_num(posinf=0.0)
