"""Clips that are made up: a disc that moves over a ground, and noise on top."""

from __future__ import annotations

import torch
from torch import Tensor


def disc(frames: int, height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ground = torch.rand(1, height // 8 + 1, width // 8 + 1, 3, generator=generator)
    ground = ground.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, :height, :width] * 0.5
    y, x = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
    clip = ground.repeat(frames, 1, 1, 1)
    for t in range(frames):
        inside = (y - height / 2) ** 2 + (x - 8 - 3 * t) ** 2 < (height / 5) ** 2
        clip[t][inside] = torch.tensor([0.9, 0.8, 0.3])
    return (clip * 255).round().to(torch.uint8)


def noisy(frames: Tensor, strength: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randint(-strength, strength + 1, frames.shape, generator=generator)
    return (frames.int() + noise).clamp(0, 255).to(torch.uint8)
