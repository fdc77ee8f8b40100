"""What the background does: it stays, goes left, right, up or down, comes nearer or goes away.

One movement is laid over all pixels and frames: brightness changes as its gradient says. Stripes
show only what goes across them, so each way is tried at the paces that the world has, and the one
that explains most is taken. A background that drifts left and a camera that pans right look alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.judge.background import Background, line
from training.judge.light import Light
from training.world.film import unit
from training.world.words import DIRECTIONS, VIEWS

BLUR = 3  # pixels, against noise; more of it hides the detail of hills
# The slowest and quickest, in heights a unit of time, and in logarithms of the size.
PACES = {"drift": (0.2, 0.45), "zoom": (0.28, 0.6)}
LEAST = 0.02  # of all pixels, that show the background in two frames
AXES = {
    "left": (0, -1),
    "right": (0, 1),
    "up": (1, -1),
    "down": (1, 1),
    "in": (2, 1),
    "out": (2, -1),
}


def asked_view(words: str) -> str:
    """What the background does where a sentence says so: `words` of `VIEWS`."""
    way = words.rpartition(" ")[2]
    if "pans" in words:
        return dict(zip(DIRECTIONS, ("right", "left", "down", "up"), strict=True))[way]
    return way if words in VIEWS and words else "still"


def view(behind: Background, lit: Light) -> str | None:
    """ "still", a direction, "in" or "out"; None where too little of it is seen."""
    frames, high, wide = behind.tone.shape
    whole = _whole(behind.seen).float()
    known = whole[1:] * whole[:-1]
    if frames < 2 or float(known.mean()) < LEAST:
        return None
    tone = behind.mean(behind.tone - lit.over(wide), BLUR)
    mean = (tone * whole).sum((1, 2)) / whole.sum((1, 2)).clamp(min=1)
    tone = tone - mean[:, None, None]
    down, right = ((g[1:] + g[:-1]) / 2 * known for g in torch.gradient(tone, dim=(1, 2)))
    outward = right * line(wide, tone) * (wide / high) + down * line(high, tone)[:, None]
    ways = torch.stack((right, down, outward)).flatten(1) * (high / unit(frames))
    change = ((tone[1:] - tone[:-1]) * known).flatten()
    size, along = ways.square().sum(1).tolist(), (-ways @ change).tolist()
    # What is left of the change when a way is taken at its best pace, against none.
    left = {"still": 0.0}
    for name, (axis, sign) in AXES.items():
        slow, quick = PACES["zoom" if axis == 2 else "drift"]
        pace = min(max(sign * along[axis] / max(size[axis], 1e-12), slow), quick)
        left[name] = size[axis] * pace**2 - 2 * sign * along[axis] * pace
    return min(left, key=left.__getitem__)


def _whole(seen: Tensor) -> Tensor:
    """Where nothing within two pixels is hidden."""
    hidden = torch.nn.functional.max_pool2d(1 - seen[:, None], 5, 1, 2)[:, 0]
    return hidden == 0
