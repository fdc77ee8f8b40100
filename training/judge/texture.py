"""What is drawn on a thing, seen in a window that goes and grows with it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from training.judge.colour import centres, hue_distance, shown
from training.judge.outline import areas, best, overlaps, window
from training.judge.pattern import pattern, quantiles

SIDE = 56  # pixels of the window
SPAN = 1.12  # radii that it reaches from the middle of the thing
RADII = tuple(
    r * SIDE / (2 * SPAN)
    for r in (0.06, 0.1, 0.15, 0.2, 0.25, 0.3, 0.36, 0.42, 0.48, 0.55, 0.62, 0.7, 0.8, 0.9, 1.0)
)
HOLE = 9  # pixels of the window: so wide may the white spot on a shiny thing be
LEAST = 60  # pixels of the window, that must show it


def features(rgb: Tensor, mask: Tensor, colour: int) -> tuple[Tensor, Tensor]:
    """[F, features] of the thing that a mask [F, H, W] shows in frames [F, H, W, 3], and how much
    each frame counts [F]: those in which it is whole and large count most."""
    there = shown(mask)
    rgb, mask = rgb[there], mask[there]
    if not len(mask):
        return rgb.new_zeros(0, 0), rgb.new_zeros(0)
    fits = overlaps(mask)
    shape = best(fits)
    centre, area = centres(mask)
    reach = SPAN * (area / areas()[shape]).sqrt()
    both = torch.cat((rgb, mask[..., None]), -1).permute(0, 3, 1, 2)
    seen = window(both, centre, reach, SIDE)
    picture, whole = seen[:, :3], _filled(seen, colour)
    tone, bulge = _flattened((picture.mean(1) + 0.02).log(), whole)
    high, low = picture.amax(1), picture.amin(1)
    pale = quantiles(low / high.clamp(min=1e-3), whole, (0.5, 0.8, 0.95, 0.99))
    pale = pale[:, 1:] - pale[:, :1]
    found = torch.cat((pattern(tone, whole, RADII), bulge, pale, (8 * pale).clamp(max=1)), 1)
    weight = fits[:, shape] ** 4 * area / area.max() * (whole.sum((1, 2)) > LEAST)
    return found, weight


def _filled(seen: Tensor, colour: int) -> Tensor:
    """The thing without its edges, white spots included: [F, SIDE, SIDE]."""
    picture, mask = seen[:, :3], (seen[:, 3:] > 0.5).float()
    closed = -F.max_pool2d(-F.max_pool2d(mask, HOLE, 1, HOLE // 2), HOLE, 1, HOLE // 2)
    high, low = picture.amax(1), picture.amin(1)
    pale = (high > 0.3) & (high - low > 0.2 * high)
    alike = hue_distance(picture.permute(0, 2, 3, 1))[..., colour] < 1 / 16
    full = torch.maximum(mask[:, 0], closed[:, 0] * (pale & alike))
    return -F.max_pool2d(-full[:, None], 5, 1, 2)[:, 0]


def _flattened(tone: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Tones without what light makes of an even surface, and how much it bulges: [F, 1]."""
    line = torch.linspace(-SPAN, SPAN, SIDE, device=tone.device)
    v, u = torch.meshgrid(line, line, indexing="ij")
    base = torch.stack((torch.ones_like(u), u, v, u * u + v * v))
    masked = (base * mask[:, None]).flatten(2)
    square = masked @ masked.transpose(1, 2) + 1e-3 * torch.eye(4, device=tone.device)
    share = torch.linalg.solve(square, masked @ (tone * mask).flatten(1)[..., None])
    return tone - (share.transpose(1, 2) @ base.flatten(1)).view_as(tone), share[:, 3]
