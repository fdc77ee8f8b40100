"""What is measured on: shapes of the models people run, and q, k, v of those shapes.

Inputs are noise, or tensors whose heads differ as a trained model's do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jali.tokens.grid import Box, TokenGrid

KINDS = ("gaussian", "structured")


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's self-attention: heads × head dim over a grid."""

    name: str
    heads: int
    head_dim: int
    grid: TokenGrid

    @property
    def tokens(self) -> int:
        return self.grid.tokens

    @property
    def flops(self) -> float:
        """Of dense attention, one sample: two products of 2·S²·D each."""
        return 4.0 * self.heads * self.tokens**2 * self.head_dim


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("wan-480p", 12, 128, TokenGrid.video(21, 30, 52)),
        Shape("wan-720p", 12, 128, TokenGrid.video(21, 45, 80)),
        Shape("cogvideox-5b", 48, 64, TokenGrid.video(13, 30, 45, text=226)),
        Shape("hunyuan-540p", 24, 128, TokenGrid.video(33, 34, 60, text=256, text_side="back")),
        Shape("psa-32k", 12, 128, TokenGrid.flat(32_768)),
        Shape("tiny", 4, 64, TokenGrid.video(4, 16, 16)),
    )
}


def make_inputs(
    kind: str, shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """[1, H, S, D] views of [1, S, H, D] memory, the order in which a transformer makes them."""
    if kind not in KINDS:
        raise ValueError(f"inputs are {' or '.join(KINDS)}, got {kind!r}")
    generator = torch.Generator(device).manual_seed(seed)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    noise = [torch.randn(size, generator=generator, device=device, dtype=dtype) for _ in range(3)]
    q, k, v = (x.transpose(1, 2) for x in noise)
    if kind == "structured":
        _add_structure(q, k, shape, generator)
    return q, k, v


def _add_structure(q: Tensor, k: Tensor, shape: Shape, generator: torch.Generator) -> None:
    """Give every head a pattern, in place: near in space, same place in time, or a sink.

    Random Fourier features turn a position into a direction, so that q·k falls off with distance
    at a scale of the head's own. Gains are log-normal: some heads look everywhere, some at almost
    nothing.
    """
    H, D = shape.heads, shape.head_dim
    place = _places(shape).to(q.device)  # [S, 3] in 0..1
    # About 3, from 1 to 10.
    gain = torch.exp(1.1 + 0.5 * torch.randn(H, generator=generator, device=q.device))
    for head in range(H):
        pattern = head % 4  # local, temporal, sink, spread
        if pattern == 2:
            direction = torch.randn(D, generator=generator, device=q.device)
            direction *= math.sqrt(D) / direction.norm()
            first = place[:, 0] <= 0
            q[:, head] += (0.5 * gain[head] * direction).to(q.dtype)
            k[:, head, first] += (0.5 * direction).to(k.dtype)
            continue
        if pattern == 3:
            continue
        falloff = torch.tensor([1.0, 9.0, 16.0] if pattern == 0 else [0.5, 30.0, 50.0])
        frequency = torch.randn(3, D // 2, generator=generator, device=q.device)
        phase = place @ (frequency * falloff.to(q.device)[:, None])
        feature = torch.cat([phase.cos(), phase.sin()], dim=-1)  # norm² is D / 2
        strength = math.sqrt(2.0) * gain[head].sqrt()
        q[:, head] += (strength * feature).to(q.dtype)
        k[:, head] += (strength * feature).to(k.dtype)


def _places(shape: Shape) -> Tensor:
    """Where each token lies, each axis in 0..1; text lies outside, at −1. [S, 3]."""
    places = torch.full((shape.tokens, 3), -1.0)
    for start, segment in shape.grid.spans():
        if isinstance(segment, Box):
            axes = [torch.arange(n) / max(n, 2) for n in segment.shape]
            places[start : start + segment.tokens] = torch.cartesian_prod(*axes)
    return places
