"""One bit per block: block j of a row is bit j % 8 of byte j // 8, and what is left over is 0."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.kernels.lists import BlockList
from jali.planning.plan import BlockPlan
from jali.tokens.layout import BlockLayout


def width(blocks: int) -> int:
    """Bytes for a row of so many blocks."""
    return -(-blocks // 8)


def pack(kept: Tensor) -> Tensor:
    """bool or uint8 (0, 1) [..., N] -> uint8 [..., ⌈N / 8⌉]."""
    N = kept.shape[-1]
    padded = F.pad(kept.to(torch.uint8), (0, 8 * width(N) - N)).unflatten(-1, (-1, 8))
    weight = 1 << torch.arange(8, device=kept.device)
    return (padded * weight).sum(-1).to(torch.uint8)


def unpack(packed: Tensor, blocks: int) -> Tensor:
    """uint8 [..., ⌈N / 8⌉] -> uint8 [..., N] of 0 and 1."""
    shift = torch.arange(8, dtype=torch.uint8, device=packed.device)
    spread = (packed[..., None] >> shift) & 1
    return spread.flatten(-2)[..., :blocks]


def plan_of(packed: Tensor, layout: BlockLayout) -> BlockPlan:
    """The plan of bits [H, M, ⌈N / 8⌉], on their device and for every sample of a batch."""
    if packed.is_cuda:
        from jali import kernels

        if kernels.available(packed.device):
            from jali.kernels.select_bitmask import bitmask_lists

            counts, indices = bitmask_lists(packed[None], layout.N)
            return BlockPlan(layout, (1,), given={1: BlockList(counts, indices)})
    return BlockPlan(layout, (1,), map=unpack(packed, layout.N)[None].contiguous())
