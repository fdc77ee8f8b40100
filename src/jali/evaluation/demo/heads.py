"""Made-up attention heads that differ the way the heads of a video model do.

No weights are needed: keys and queries carry features whose products fall off with distance in
time and space (a head looks near itself, along time, over its own frame), features of a smooth
random field (it looks at what is alike), and a constant (it looks at a sink).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.tokens.grid import Box, TokenGrid

FAR = math.inf
SINK_TOKENS = 48


@dataclass(frozen=True)
class HeadKind:
    """What one kind of head looks at.

    `distance` is how far in (t, h, w), in tokens; each strength is the logit at the best match.
    """

    name: str
    distance: tuple[float, float, float]
    proximity: float = 0.0
    similarity: float = 0.0
    sink: float = 0.0


HEAD_KINDS = (
    HeadKind("local", (1.0, 3.0, 4.0), proximity=10, similarity=1),
    HeadKind("temporal", (FAR, 2.5, 3.0), proximity=10, similarity=1),
    HeadKind("frame", (0.6, FAR, FAR), proximity=8, similarity=2),
    HeadKind("semantic", (4.0, 12.0, 16.0), proximity=1, similarity=10),
    HeadKind("diffuse", (4.0, 10.0, 14.0), proximity=2, similarity=2),
    HeadKind("sink", (1.5, 4.0, 5.0), proximity=7, similarity=1, sink=8),
)


@dataclass(frozen=True, eq=False)
class MadeUpHeads:
    """q, k, v [1, H, S, D] over a video grid, and what kind each head is."""

    grid: TokenGrid
    kinds: tuple[str, ...]
    q: Tensor
    k: Tensor
    v: Tensor


def make_heads(
    shape: tuple[int, int, int], heads: int = 6, head_dim: int = 64, seed: int = 0
) -> MadeUpHeads:
    """Heads of every kind in turn, for a frames × height × width grid; `seed` decides it all."""
    generator = torch.Generator().manual_seed(seed)
    box = Box(*shape)
    kinds = [HEAD_KINDS[i % len(HEAD_KINDS)] for i in range(heads)]
    pairs = [_head(kind, box, head_dim, generator) for kind in kinds]
    values = [
        _field(box, head_dim, generator) + _noise(box, head_dim, 0.5, generator) for _ in kinds
    ]
    q, k = (torch.stack(part)[None] for part in zip(*pairs, strict=True))
    return MadeUpHeads(
        TokenGrid((box,)), tuple(kind.name for kind in kinds), q, k, torch.stack(values)[None]
    )


def _head(
    kind: HeadKind, box: Box, head_dim: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Queries and keys [S, D] whose scaled products are the kind's strengths at the best match."""
    content = head_dim // 4
    position = head_dim - content - 2
    gain = head_dim**0.25
    near = _position(box, kind.distance, position, generator) * math.sqrt(kind.proximity) * gain
    alike = F.normalize(_field(box, content, generator), dim=-1) * math.sqrt(kind.similarity) * gain
    shared = torch.cat([near, alike], dim=-1)
    constant = math.sqrt(kind.sink) * gain
    is_sink = torch.arange(box.tokens) < SINK_TOKENS
    q, k = (shared + _noise(box, shared.shape[1], 0.2, generator) for _ in range(2))
    q_sink = torch.full((box.tokens, 1), constant)
    return (
        F.pad(torch.cat([q, q_sink], dim=-1), (0, head_dim - shared.shape[1] - 1)),
        F.pad(torch.cat([k, q_sink * is_sink[:, None]], -1), (0, head_dim - shared.shape[1] - 1)),
    )


def _position(
    box: Box, distance: tuple[float, float, float], dim: int, generator: torch.Generator
) -> Tensor:
    """Unit features [S, dim] whose product falls off like a bell curve of width `distance`."""
    axes = [torch.arange(n, dtype=torch.float32) for n in box.shape]
    where = torch.cartesian_prod(*axes).view(-1, 3)
    waves = torch.randn(3, dim // 2, generator=generator) / torch.tensor(distance)[:, None]
    phase = where @ waves
    return torch.cat([phase.cos(), phase.sin()], dim=-1) / math.sqrt(dim // 2)


def _field(box: Box, channels: int, generator: torch.Generator) -> Tensor:
    """A smooth random field over the box, [S, channels] of unit variance."""
    coarse = [max(2, -(-n // step)) for n, step in zip(box.shape, (4, 6, 6), strict=True)]
    noise = torch.randn(1, channels, *coarse, generator=generator)
    field = F.interpolate(noise, box.shape, mode="trilinear", align_corners=True)[0]
    field = field.flatten(1).T
    return (field - field.mean(0)) / field.std(0, correction=0).clamp_min(1e-6)


def _noise(box: Box, channels: int, size: float, generator: torch.Generator) -> Tensor:
    return torch.randn(box.tokens, channels, generator=generator) * size
