"""What a plan costs: how many pairs of a query and a key are computed, of all there are.

A block pair that is read costs its queries times what there is to read in it: its real keys, or at
a pooling ratio one mean for every group that holds a real key. So a short last block costs what it
has, and padded keys are on neither side: dense attention is queries times real keys. (A causal
plan costs the blocks it reads, of all Sq · Sk pairs: a block on the diagonal is computed whole.)
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from jali import kernels
from jali.kernels.lists import group_size
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

if TYPE_CHECKING:
    from jali.planning.plan import BlockPlan


def pairs_read(plan: BlockPlan) -> Tensor:
    """Pairs that every head computes, on the device. int64 [B|1, H|1].

    B is that of the plan, or of the padding where samples differ in their keys.
    """
    layout = plan.layout
    sizes = read_sizes(layout, plan.ratios, plan.padding)
    rows = layout.row_sizes
    if kernels.available(layout.device):
        found: Tensor = kernels.load("plan_work").pairs_read(plan.lists, plan.ratios, sizes, rows)
        return found
    each = []
    for ratio, size in zip(plan.ratios, sizes, strict=True):
        keys = torch.where(plan.levels == ratio, size[:, None, None], 0).sum(-1)  # [B, H, M]
        each.append((keys * rows).sum(-1))
    return torch.stack(each).sum(0)


def pairs_of_dense(layout: BlockLayout, padding: KeyPadding | None) -> Tensor:
    """Pairs that dense attention computes for one head, on the device. int64 [B|1, 1]."""
    return layout.q.tokens * read_sizes(layout, (1,), padding)[0].sum(-1, keepdim=True)


# Layers of a transformer call share layout and padding.
@functools.lru_cache(maxsize=16)
def read_sizes(layout: BlockLayout, ratios: tuple[int, ...], padding: KeyPadding | None) -> Tensor:
    """What there is to read in every key block at each ratio: real keys, or groups that hold one.
    int32 [R, B|1, N]."""
    tokens, block = layout.k.tokens, layout.blocks.k
    if padding is None:
        real = torch.ones(1, tokens, dtype=torch.bool, device=layout.device)
    else:
        real = padding.valid(tokens)
    real = F.pad(real, (0, layout.N * block - tokens)).unflatten(1, (layout.N, block))
    return torch.stack(
        [
            real.unflatten(2, (-1, group_size(ratio, block))).any(-1).sum(-1, dtype=torch.int32)
            for ratio in ratios
        ]
    )
