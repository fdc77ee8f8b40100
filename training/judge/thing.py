"""How many things there are."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from jali.nano.grammar import COLOURS
from training.judge.colour import despeckled

THING = 0.0022  # the least area of a thing, in squares of the picture's height
SHOWN = 0.22  # of the frames, in which a thing is seen at least


def count(labels: Tensor) -> int:
    """How many coloured things a clip shows, by the colours of its pixels [F, H, W].

    Things of one colour are counted apart where nothing coloured joins them: what is before a
    thing does not cut it in two.
    """
    islands = _islands(labels >= 0)
    least = THING * labels.shape[1] ** 2
    total = 0
    for colour in range(len(COLOURS)):
        mask = labels == colour
        if not bool((mask.sum((1, 2)) > least / 2).any()):
            continue
        mask = despeckled(mask)
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
    small = F.max_pool2d(wide, 2, 2, ceil_mode=True)[:, 0] > 0
    rows, columns = _runs(small)[small], _runs(small.mT).mT[small]
    number = rows
    while True:
        spread = _largest(_largest(number, columns), rows)
        if torch.equal(spread, number):
            break
        number = spread
    found = torch.zeros_like(small, dtype=torch.long)
    found[small] = number
    large = found.repeat_interleave(2, 1).repeat_interleave(2, 2)
    return large[:, : mask.shape[1], : mask.shape[2]]


def _runs(mask: Tensor) -> Tensor:
    """Numbers from 1 of what hangs together in a row."""
    starts = mask & ~F.pad(mask, (1, 0))[..., :-1]
    return starts.flatten().cumsum(0).view(mask.shape)


def _largest(number: Tensor, group: Tensor) -> Tensor:
    """The largest number of everyone's group."""
    largest = number.new_zeros(int(group.max()) + 1 if len(group) else 1)
    return largest.scatter_reduce(0, group, number, "amax")[group]
