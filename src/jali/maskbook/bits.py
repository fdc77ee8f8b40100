"""One bit per block: block j of a row is bit j % 8 of byte j // 8, and what is left over is 0.

Which blocks are kept of an importance is decided as entropy decides it online: the same shares,
the same choice.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.kernels.lists import BlockList
from jali.planning.budget import Budget, blocks_by_entropy
from jali.planning.plan import BlockPlan
from jali.planning.selection import keep_top
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


def keep_bits(
    importance: Tensor, layout: BlockLayout, budget: Budget, sharpness: float
) -> tuple[Tensor, Tensor]:
    """The blocks that a budget keeps of an importance fp32 [H, M, N], on its device.

    Returns bits uint8 [H, M, ⌈N / 8⌉], and the cost of every head fp32 [H].
    """
    scores = importance[None]
    rows = layout.text_rows if layout.has_text_rows else None
    # Text rows read everything anyway: what they attend to must not move the budget.
    counted = None if rows is None or layout.only_text_rows else ~rows
    shares = blocks_by_entropy(scores, budget, sharpness, counted)
    plan = keep_top(scores, shares[..., None, None], layout, layout.forced, rows)
    kept = plan.levels[0] != 0
    return pack(kept), plan.costs[0]


def plan_of(packed: Tensor, layout: BlockLayout) -> BlockPlan:
    """The plan of bits [H, M, ⌈N / 8⌉], on their device and for every sample of a batch."""
    if packed.is_cuda:
        from jali import kernels

        if kernels.available(packed.device):
            from jali.kernels.select_bitmask import bitmask_lists

            counts, indices = bitmask_lists(packed[None], layout.N)
            return BlockPlan(layout, (1,), given={1: BlockList(counts, indices)})
    return BlockPlan(layout, (1,), map=unpack(packed, layout.N)[None].contiguous())
