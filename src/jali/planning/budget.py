"""How much work a method may spend, and how heads share it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jali import kernels
from jali.value import check_share


@dataclass(frozen=True, slots=True)
class Budget:
    """Asked share of the key blocks: the mean over heads, and the range of a single head.

    Blocks are counted whole, a short last one too; what a plan really costs is `BlockPlan.cost`.
    A mean of 0 asks for a query block's own and forced blocks only. No floor given means 0.05, or
    the mean where that is smaller.
    """

    mean: float = 0.5
    floor: float | None = None
    ceiling: float = 1.0

    def __post_init__(self) -> None:
        check_share("mean", self.mean)
        check_share("floor", self.least)
        check_share("ceiling", self.ceiling)
        if not self.least <= self.mean <= self.ceiling:
            raise ValueError(f"need floor <= mean <= ceiling, got {self}")

    @property
    def least(self) -> float:
        """The share below which no head falls."""
        return min(0.05, self.mean) if self.floor is None else self.floor


def blocks_for(share: float, blocks: int) -> int:
    """The fewest whole blocks that make up `share`; exact where floats are not (0.3 of 10 is 3)."""
    return max(0, math.ceil(share * blocks - 1e-9 * blocks))


def entropy_of(scores: Tensor, rows: Tensor | None = None) -> Tensor:
    """Mean normalised row entropy, in 0..1. scores [B, H, M, N] with rows summing to 1 -> [B, H].

    `rows` (bool [M]) names the rows that take part, at least one of them. What is NaN counts for
    nothing, as in the kernel: one broken query must not decide for all heads.
    """
    N = scores.shape[-1]
    if N == 1:
        return scores.new_ones(scores.shape[:2])
    entropy_bhm = torch.special.entr(scores).nan_to_num(0.0).sum(-1) / math.log(N)
    if rows is None:
        return entropy_bhm.mean(-1)
    weight = rows.to(entropy_bhm)
    return (entropy_bhm * weight).sum(-1) / weight.sum()


def blocks_by_entropy(
    scores: Tensor, budget: Budget, sharpness: float = 1.0, rows: Tensor | None = None
) -> Tensor:
    """Key blocks for each head, more where attention is spread. [B, H, M, N] -> int [B, H]."""
    by_kernel = scores.dtype == torch.float32 and scores.shape[1] <= 128
    if by_kernel and kernels.available(scores.device):
        return kernels.load("selection").entropy_budgets(
            scores, budget.mean, budget.least, budget.ceiling, sharpness, rows
        )
    return share_blocks(entropy_of(scores, rows), budget, scores.shape[-1], sharpness)


def shares_by_weight(weight: Tensor, mean: float, floor: float, ceiling: float) -> Tensor:
    """Shares proportional to `weight` [B, H] > 0, clipped to floor..ceiling, whose mean is `mean`.

    The mean share is a piecewise linear, rising function of the factor λ with a kink wherever a
    head meets floor or ceiling. So λ is found exactly, between two kinks, without a loop.
    """
    weight = weight.double()
    kinks = torch.cat([floor / weight, ceiling / weight], dim=-1).sort(-1).values  # [B, 2H]
    share_at = (kinks[..., None] * weight[..., None, :]).clamp(floor, ceiling).mean(-1)  # [B, 2H]
    right = (share_at < mean).sum(-1, keepdim=True).clamp(1, kinks.shape[-1] - 1)
    low, high = share_at.gather(-1, right - 1), share_at.gather(-1, right)
    part = ((mean - low) / (high - low).clamp_min(1e-300)).clamp(0, 1)
    left_kink, right_kink = kinks.gather(-1, right - 1), kinks.gather(-1, right)
    factor = left_kink + part * (right_kink - left_kink)
    return (factor * weight).clamp(floor, ceiling)


def share_blocks(entropy: Tensor, budget: Budget, blocks: int, sharpness: float = 1.0) -> Tensor:
    """Key blocks for each head. entropy [B, H] in 0..1 -> int64 [B, H], each in 1..blocks.

    The sum over heads is exactly round(mean · blocks · heads), at least one block a head: what
    rounding leaves over goes to the largest fractions, lower head first.
    """
    heads = entropy.shape[-1]
    total = min(max(math.floor(budget.mean * blocks * heads + 0.5), heads), blocks * heads)
    mean = total / (blocks * heads)
    floor = min(max(budget.least, 1 / blocks), mean)
    ceiling = max(budget.ceiling, mean)
    entropy = entropy.double().clamp(0, 1) + 1e-6
    # Only ratios of weights matter. Relative to the largest one a steep power stays finite.
    weight = (entropy / entropy.amax(-1, keepdim=True)).pow(sharpness).clamp_min(1e-100)
    exact = shares_by_weight(weight, mean, floor, ceiling) * blocks
    whole = (exact + 1e-6).floor().clamp(1, blocks)
    left_over = total - whole.sum(-1, keepdim=True)
    order = torch.where(whole < blocks, exact - whole, -torch.inf).argsort(
        dim=-1, descending=True, stable=True
    )
    rank = torch.empty_like(order).scatter_(
        -1, order, torch.arange(heads, device=order.device).expand_as(order)
    )
    return (whole + (rank < left_over)).long()
