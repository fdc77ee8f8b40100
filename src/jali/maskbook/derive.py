"""From importance to bits: the same shares and the same choice as entropy makes online."""

from __future__ import annotations

import torch
from torch import Tensor

from jali.maskbook.bits import pack
from jali.planning.budget import Budget, blocks_by_entropy
from jali.planning.selection import keep_top
from jali.tokens.layout import BlockLayout


def keep(importance: Tensor, layout: BlockLayout, budget: Budget, sharpness: float) -> Tensor:
    """Which blocks are read. importance fp32 [H, M, N] -> bool [H, M, N], on its device."""
    scores = importance[None]
    # Text rows read everything anyway: what they attend to must not move the budget.
    mixed = layout.has_text_rows and not layout.only_text_rows
    counted = ~layout.text_rows if mixed else None
    shares = blocks_by_entropy(scores, budget, sharpness, counted)
    rows = layout.text_rows if layout.has_text_rows else None
    return keep_top(scores, shares[..., None, None], layout, layout.forced, rows).levels[0] != 0


def keep_bits(
    importance: Tensor, layout: BlockLayout, budget: Budget, sharpness: float
) -> tuple[Tensor, Tensor]:
    """Bits uint8 [H, M, ⌈N / 8⌉], and the cost of every head fp32 [H]."""
    kept = keep(importance, layout, budget, sharpness)
    return pack(kept), kept.mean((-2, -1), dtype=torch.float32)
