"""Reading a clip back: which colour, shape and motion does it show, how fast, how many things?

No network judges here. Colours are told by hue, motion by where the coloured pixels go, shapes by
laying known outlines over them. How often it is right about true clips is measured beside every
result (`evidence.py`).
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from jali.nano.grammar import COLOURS, SHAPES
from training.film import distance

MOVED = 0.15  # heights
GROWN = 0.65  # of the logarithm of the area
BENT = 0.15  # of the length of a path
TURNED = 0.05  # mean change of an object's surface in an eighth of a second
OUTLINE = 40  # pixels of a normalised outline
ANGLES = 36
THING = 0.0022  # the least area of a thing, in squares of the picture's height
SHOWN = 0.22  # of the frames, in which a thing is seen at least
SLOW, QUICK = 0.37, 0.57  # heights in a unit of time


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a clip shows; None where nothing coloured is seen."""

    colour: str | None
    shape: str | None
    motion: str | None


def judge(frames: Tensor) -> Verdict:
    """`frames`: [F, H, W, 3], uint8 or 0…1."""
    rgb = _unit(frames)
    best, mask, seen = _most(rgb)
    if int(seen.sum()) < 2:
        return Verdict(None, None, None)
    return Verdict(list(COLOURS)[best], _shape(mask[seen]), _motion(rgb, mask, seen))


def count_things(frames: Tensor) -> int:
    """How many coloured things a clip shows, [F, H, W, 3] as above.

    Things of one colour are counted apart where nothing coloured joins them: what is before a
    thing does not cut it in two.
    """
    labels = _labels(_unit(frames))
    islands = _islands(labels >= 0)
    least = THING * labels.shape[1] ** 2
    total = 0
    for colour in range(len(COLOURS)):
        mask = _despeckled(labels == colour)
        if not bool((mask.sum((1, 2)) > least).any()):
            continue
        seen = [
            int((torch.bincount(island[shown]) > least).sum())
            for island, shown in zip(islands, mask, strict=True)
        ]
        # So many as a fair part of the frames show at once.
        total += sorted(seen, reverse=True)[int(SHOWN * len(seen))]
    return total


def _islands(mask: Tensor) -> Tensor:
    """Numbers of the connected parts, of every frame: [F, H, W], 0 where there is nothing."""
    wide = F.max_pool2d(mask.float()[:, None], 3, 1, 1)
    small = F.max_pool2d(wide, 2, 2, ceil_mode=True)
    number = torch.arange(1, small[0].numel() + 1, device=mask.device).view(1, *small.shape[1:])
    found = number * small
    while True:
        spread = F.max_pool2d(found, 3, 1, 1) * small
        for _ in range(7):
            spread = F.max_pool2d(spread, 3, 1, 1) * small
        if torch.equal(spread, found):
            break
        found = spread
    large = found.repeat_interleave(2, 2).repeat_interleave(2, 3)
    return large[:, 0, : mask.shape[1], : mask.shape[2]].long()


def speed(frames: Tensor, unit: float) -> str | None:
    """Of something that moves: "", "slowly" or "quickly", with `unit` frames to a unit of time."""
    _, mask, seen = _most(_unit(frames))
    where = seen.nonzero()[:, 0]
    if len(where) < 4:
        return None
    # In the middle of its way it is least cut off by the border.
    where = where[len(where) // 4 : len(where) - len(where) // 4]
    centre, _ = _centres(mask[where])
    way = (centre[-1] - centre[0]).norm() / mask.shape[1]
    pace = float(way) / (int(where[-1] - where[0]) / unit)
    return "slowly" if pace < SLOW else "quickly" if pace > QUICK else ""


def _unit(frames: Tensor) -> Tensor:
    return frames.float() / (255 if frames.dtype == torch.uint8 else 1)


def _most(rgb: Tensor) -> tuple[int, Tensor, Tensor]:
    """The colour that there is most of, where it is [F, H, W], and in which frames."""
    labels = _labels(rgb)
    best = int(torch.stack([(labels == i).sum() for i in range(len(COLOURS))]).argmax())
    mask = _despeckled(labels == best)
    return best, mask, mask.sum((1, 2)) > 0.002 * mask[0].numel()


def _labels(rgb: Tensor) -> Tensor:
    """The nearest colour's index of every vivid pixel; -1 for the others."""
    high, low = rgb.amax(-1), rgb.amin(-1)
    vivid = ((high - low) > 0.5 * high) & ((high - low) > 0.1)
    distance = (_hue(rgb)[..., None] - _hue(_palette(rgb.device))).abs()
    nearest = torch.minimum(distance, 1 - distance).argmin(-1)
    return torch.where(vivid, nearest, -1)


def _palette(device: torch.device) -> Tensor:
    return torch.tensor(list(COLOURS.values()), device=device)


def _hue(rgb: Tensor) -> Tensor:
    """In 0…1 around the circle."""
    r, g, b = rgb.unbind(-1)
    around = torch.atan2(math.sqrt(3) * (g - b), 2 * r - g - b)
    return (around / (2 * math.pi)) % 1.0


def _despeckled(mask: Tensor) -> Tensor:
    return F.avg_pool2d(mask.float()[:, None], 3, 1, 1)[:, 0] > 0.5


def _centres(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Centre [F, 2] (x, y) in pixels and area [F] of a mask per frame."""
    y = torch.arange(mask.shape[1], device=mask.device).float()
    x = torch.arange(mask.shape[2], device=mask.device).float()
    weight = mask.float()
    area = weight.sum((1, 2)).clamp(min=1e-6)
    centre = torch.stack(((weight.sum(1) @ x) / area, (weight.sum(2) @ y) / area), 1)
    return centre, area


def _motion(rgb: Tensor, mask: Tensor, seen: Tensor) -> str:
    where = seen.nonzero()[:, 0]
    centre, area = _centres(mask[where])
    n = max(1, len(where) // 10)
    growth = float((area[-n:].mean() / area[:n].mean()).log())
    if abs(growth) > GROWN:
        return "grows" if growth > 0 else "shrinks"
    dx, dy = ((centre[-n:].mean(0) - centre[:n].mean(0)) / mask.shape[1]).tolist()
    if max(abs(dx), abs(dy)) > MOVED and _bend(centre) < BENT:
        if abs(dx) > abs(dy):
            return "right" if dx > 0 else "left"
        return "down" if dy > 0 else "up"
    return "spins" if _turning(rgb, mask) > TURNED else "stays"


def _bend(centre: Tensor) -> float:
    """How far a path leaves the straight line, as a share of its length: the middle of a moon that
    spins goes round."""
    way = centre[-1] - centre[0]
    x, y = (centre - centre[0]).unbind(1)
    return float((x * way[1] - y * way[0]).abs().max() / way.square().sum().clamp(min=1e-6))


def _turning(rgb: Tensor, mask: Tensor, apart: int = 4) -> float:
    """How much the object's own picture changes, apart from the light on it."""
    grey, within = (rgb.mean(-1) * mask)[:, None], mask.float()[:, None]
    near = 2 * (mask.shape[1] // 16) + 1
    # Light changes slowly from place to place, a texture does not.
    light, area = (F.avg_pool2d(x, near, 1, near // 2) for x in (grey, within))
    grey = (grey * area / light.clamp(min=1e-4))[:, 0]
    union = (mask[apart:] | mask[:-apart]).sum((1, 2)).clamp(min=1)
    change = (grey[apart:] - grey[:-apart]).abs().sum((1, 2)) / union
    return float(change.median())


def _shape(mask: Tensor) -> str:
    looked = mask[torch.linspace(0, len(mask) - 1, min(9, len(mask))).round().long()]
    outlines = _normalised(looked).flatten(1)
    known = _outlines(mask.device)
    both = outlines @ known.T
    either = outlines.sum(1, keepdim=True) + known.sum(1) - both
    overlap = (both / either).view(len(looked), len(SHAPES), ANGLES).amax(-1)
    # Frames in which it is cut off or covered count less than those in which something fits.
    return SHAPES[int((overlap**4).mean(0).argmax())]


def _normalised(mask: Tensor) -> Tensor:
    """Masks moved to their centre and scaled to one area: fp32 [F, OUTLINE, OUTLINE]."""
    centre, area = _centres(mask)
    _, high, wide = mask.shape
    reach = 2.2 * (area / math.pi).sqrt()
    line = torch.linspace(-1, 1, OUTLINE, device=mask.device)
    x = centre[:, 0, None, None] + reach[:, None, None] * line
    y = centre[:, 1, None, None] + reach[:, None, None] * line[:, None]
    x, y = torch.broadcast_tensors(x, y)
    grid = torch.stack((2 * (x + 0.5) / wide - 1, 2 * (y + 0.5) / high - 1), -1)
    picked = F.grid_sample(mask.float()[:, None], grid, align_corners=False)[:, 0]
    return (picked > 0.5).float()


@functools.lru_cache(maxsize=4)
def _outlines(device: torch.device) -> Tensor:
    """Every shape at every angle: fp32 [shapes * angles, OUTLINE²]."""
    line = torch.linspace(-1.3, 1.3, 128, device=device)
    v, u = torch.meshgrid(line, line, indexing="ij")
    made = []
    for shape in range(len(SHAPES)):
        for step in range(ANGLES):
            angle = 2 * math.pi * step / ANGLES
            c, s = math.cos(angle), math.sin(angle)
            kind = torch.tensor(shape, device=device)
            made.append(distance(u * c + v * s, v * c - u * s, kind) < 0)
    return _normalised(torch.stack(made)).flatten(1)
