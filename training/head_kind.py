"""Kinds of heads: how spread out the attention of each is, and how far it looks in t, h, w."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jali.planning.site import Site
from jali.tokens.grid import Box, TokenGrid

NEAR = 0.5  # of the distance that even attention would look


@dataclass(frozen=True, slots=True)
class Head:
    """One head at one site. `entropy` is 1 where all keys weigh the same; `distance` is the mean
    distance it looks along frames, height and width, as a share of what even attention looks."""

    site: Site
    head: int
    entropy: float
    distance: tuple[float, float, float]

    @property
    def kind(self) -> str:
        """local (near in everything), temporal (near in the picture, far in time), frame (near in
        time, far in the picture), or global."""
        in_time, in_picture = self.distance[0] < NEAR, max(self.distance[1:]) < NEAR
        if in_picture:
            return "local" if in_time else "temporal"
        return "frame" if in_time else "global"


def heads_of(q: Tensor, k: Tensor, grid: TokenGrid, site: Site, scale: float) -> list[Head]:
    """Every head of one call, q and k [1, H, S, D], by 512 of its video queries."""
    places, box = _places(grid)
    places = places.to(q.device)
    video = places[:, 0] >= 0
    at = video.nonzero()[:, 0]
    at = at[torch.linspace(0, len(at) - 1, min(512, len(at))).round().long().to(q.device)]
    apart = (places[at, None] - places[video]).abs()
    found, even = [], apart.mean((0, 1))
    for h in range(q.shape[1]):
        key = k[0, h * k.shape[1] // q.shape[1]].float()
        weight = ((q[0, h, at].float() @ key.T) * scale).softmax(-1)
        entropy = -(weight * weight.clamp_min(1e-30).log()).sum(-1).mean() / math.log(len(key))
        seen = weight[:, video]
        seen = seen / seen.sum(-1, keepdim=True).clamp_min(1e-30)
        far = (apart * seen[..., None]).sum(1).mean(0)
        distance = [
            float(f / e) if size > 1 else 0.0 for f, e, size in zip(far, even, box, strict=True)
        ]
        found.append(Head(site, h, float(entropy), (distance[0], distance[1], distance[2])))
    return found


def _places(grid: TokenGrid) -> tuple[Tensor, tuple[int, int, int]]:
    """(t, h, w) of every token of the largest box, −1 for all others, and that box."""
    boxes = [(start, segment) for start, segment in grid.spans() if isinstance(segment, Box)]
    if not boxes:
        raise ValueError(f"heads look along frames, height and width, and {grid} has no such grid")
    start, largest = max(boxes, key=lambda found: found[1].tokens)
    places = torch.full((grid.tokens, 3), -1.0)
    lines = [torch.arange(size, dtype=torch.float32) for size in largest.shape]
    places[start : start + largest.tokens] = torch.cartesian_prod(*lines)
    return places, largest.shape
