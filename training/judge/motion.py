"""What a thing does, told by where its pixels go, and how fast."""

from __future__ import annotations

from torch import Tensor

from training.judge.colour import box, centres

MOVED = 0.15  # heights
GROWN = 0.65  # of the logarithm of the area
BENT = 0.15  # of the length of a path
TURNED = 0.05  # mean change of an object's surface in an eighth of a second
SLOW, QUICK = 0.37, 0.57  # heights in a unit of time


def motion(rgb: Tensor, mask: Tensor, seen: Tensor) -> str:
    """Of a mask [F, H, W] that is there in the frames `seen` [F]."""
    where = seen.nonzero()[:, 0]
    centre, area = centres(mask[where])
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


def pace(mask: Tensor, seen: Tensor, unit: float) -> str | None:
    """ "", "slowly" or "quickly", with `unit` frames to a unit of time."""
    where = seen.nonzero()[:, 0]
    if len(where) < 4:
        return None
    # In the middle of its way it is least cut off by the border.
    where = where[len(where) // 4 : len(where) - len(where) // 4]
    centre, _ = centres(mask[where])
    way = (centre[-1] - centre[0]).norm() / mask.shape[1]
    speed = float(way) / (int(where[-1] - where[0]) / unit)
    return "slowly" if speed < SLOW else "quickly" if speed > QUICK else ""


def _bend(centre: Tensor) -> float:
    """How far a path leaves the straight line, as a share of its length: the middle of a moon that
    spins goes round."""
    way = centre[-1] - centre[0]
    x, y = (centre - centre[0]).unbind(1)
    return float((x * way[1] - y * way[0]).abs().max() / way.square().sum().clamp(min=1e-6))


def _turning(rgb: Tensor, mask: Tensor, apart: int = 4) -> float:
    """How much the object's own picture changes, apart from the light on it."""
    grey, within = rgb.mean(-1) * mask, mask.float()
    near = 2 * (mask.shape[1] // 16) + 1
    # Light changes slowly from place to place, a texture does not.
    light, area = (box(x, near) for x in (grey, within))
    grey = grey * area / light.clamp(min=1e-4)
    union = (mask[apart:] | mask[:-apart]).sum((1, 2)).clamp(min=1)
    change = (grey[apart:] - grey[:-apart]).abs().sum((1, 2)) / union
    return float(change.median())
