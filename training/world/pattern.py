"""Patterns of a surface: tones 0…1 at points (u, v).

None flickers when it moves: edges are as soft as `pixel`, the size of a pixel in the units of u
and v, and noise is a sum of waves, so that it holds nothing finer than they are.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def inside(distance: Tensor, pixel: Tensor | float) -> Tensor:
    """Cover of a pixel by what lies at positive distance from an edge."""
    return (0.5 + distance / (1.4 * pixel)).clamp(0, 1)


def stripes(v: Tensor, period: Tensor | float, pixel: Tensor | float) -> Tensor:
    away = ((v / period).remainder(1.0) - 0.5).abs()
    return inside((away - 0.25) * period, pixel)


def checks(u: Tensor, v: Tensor, period: Tensor | float, pixel: Tensor | float) -> Tensor:
    a, b = stripes(u, period, pixel), stripes(v, period, pixel)
    return a * b + (1 - a) * (1 - b)


def dots(u: Tensor, v: Tensor, period: Tensor | float, pixel: Tensor | float) -> Tensor:
    """Dark dots, every second row moved by half."""
    row = (v / period).floor()
    a = (u / period + 0.5 * row.remainder(2.0)).remainder(1.0) - 0.5
    b = (v / period).remainder(1.0) - 0.5
    return inside((torch.hypot(a, b) - 0.3) * period, pixel)


def tiles(
    u: Tensor, v: Tensor, period: Tensor | float, pixel: Tensor | float, seed: Tensor
) -> Tensor:
    """Bricks of different tones with dark joints."""
    row = (v / period).floor()
    along = u / (2 * period) + 0.5 * row.remainder(2.0)
    tone = 0.45 + 0.55 * scatter(along.floor(), row, seed)
    a = 0.5 - (along.remainder(1.0) - 0.5).abs()
    b = 0.5 - ((v / period).remainder(1.0) - 0.5).abs()
    return tone * inside(torch.minimum(2 * a, b) * period - 0.055 * period, pixel)


def scatter(i: Tensor, j: Tensor, seed: Tensor) -> Tensor:
    """A number 0…1 for every cell (i, j), as good as random."""
    x = torch.sin(i * 12.9898 + j * 78.233 + seed * 37.719) * 437.585
    return x.remainder(1.0)


def noise(u: Tensor, v: Tensor, phases: Tensor, longest: float, shortest: float) -> Tensor:
    """Waves in all directions, between two lengths, the longer the higher: about -1…1.

    `phases` [n, k] in 0…1 make one field out of many; k is the number of waves.
    """
    count = phases.shape[1]
    total, power = torch.zeros_like(u), 0.0
    for k in range(count):
        phase = phases[:, k].view(-1, 1, 1, 1)
        share = k / max(1, count - 1)
        length = longest * (shortest / longest) ** share
        height = (length / longest) ** 0.6
        # The golden angle spreads directions; the phase of the next wave turns them a little.
        turn = 2.39996 * k + 1.2 * phases[:, (k + 1) % count].view(-1, 1, 1, 1)
        wave = (u * turn.cos() + v * turn.sin()) * (2 * math.pi / length)
        total = total + height * torch.sin(wave + 2 * math.pi * phase)
        power += height * height / 2
    return total / (1.6 * power**0.5)


def leaves(u: Tensor, v: Tensor, period: Tensor | float, pixel: Tensor, seed: Tensor) -> Tensor:
    """Scattered leaves with a rib, each in its own tone and direction; darkness between them."""
    x, y = u / period, v / period
    i, j = x.floor(), y.floor()
    tone = torch.full_like(x, 0.1)
    for down in (-1, 0, 1):
        for right in (-1, 0, 1):
            a, b = i + right, j + down
            cx = a + 0.2 + 0.6 * scatter(a, b, seed)
            cy = b + 0.2 + 0.6 * scatter(a, b, seed + 1)
            angle = 6.2832 * scatter(a, b, seed + 2)
            c, s = angle.cos(), angle.sin()
            p, q = (x - cx) * c + (y - cy) * s, (y - cy) * c - (x - cx) * s
            # Where two discs overlap.
            lens = 0.86 - torch.sqrt(p * p + (q.abs() + 0.52).square())
            cover = inside(lens * period, pixel)
            rib = inside((q.abs() - 0.03) * period, pixel)
            own = (0.35 + 0.65 * scatter(a, b, seed + 3)) * (0.72 + 0.28 * rib)
            tone = tone * (1 - cover) + own * (1 - 0.25 * (q > 0)) * cover
    return tone


def planks(
    u: Tensor, v: Tensor, period: Tensor | float, pixel: Tensor | float, phases: Tensor
) -> Tensor:
    """Boards with grain along them."""
    seed = 9 * phases[:, :1].view(-1, 1, 1, 1)
    board = (v / period).floor()
    own = scatter(board, board * 0, seed)
    bent = noise(u * 0.35 + 3 * own, v + own, phases[:, :8], 0.6, 0.12)
    grain = torch.sin((v * 4.2 / period + 1.5 * bent + 7 * own) * 2 * math.pi) * 0.5 + 0.5
    gap = 0.5 - ((v / period).remainder(1.0) - 0.5).abs()
    return (0.35 + 0.35 * own + 0.3 * grain) * inside(gap * period - 0.035 * period, pixel)
