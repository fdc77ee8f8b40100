"""Shares of a row's attention: what is left of it when the heaviest blocks are taken first."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def log_mass_left(log_mass: Tensor, after: bool = False) -> Tensor:
    """The log of the share of its row's mass that is left when a block's turn comes, or `after` it,
    heaviest first. [B, H, M, N] -> like it.

    Equal blocks come in their order. Logs, and sums that begin with the smallest, tell blocks apart
    whose share no float holds.
    """
    heaviest = log_mass.sort(dim=-1, descending=True, stable=True)
    left = heaviest.values.flip(-1).logcumsumexp(-1).flip(-1)
    left = left - left[..., :1].clamp_min(torch.finfo(left.dtype).min)
    if after:
        left = F.pad(left[..., 1:], (0, 1), value=-torch.inf)
    return left.scatter(-1, heaviest.indices, left)


def log_rest(share: float) -> float:
    """The log of what a share leaves."""
    return math.log(1 - share) if share < 1 else -math.inf
