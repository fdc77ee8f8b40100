"""Adaptive block-sparse attention: antidiagonal estimates, kept up to a share of their mass."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.methods.method import Method, Query, check_probes
from jali.planning.budget import blocks_for
from jali.planning.plan import BlockPlan
from jali.planning.scoring import antidiagonal_scores
from jali.planning.selection import count_to_reach, keep_top
from jali.tokens.layout import BlockLayout, Blocks
from jali.value import check_share


@dataclass(frozen=True)
class AdaBsa(Method):
    """Keep the fewest key blocks that hold `cdf_threshold` of a query block's estimated mass, but
    no more than the share 1 − sparsity.

    Forced blocks count inside the share, and their mass counts inside the threshold.

    Args:
        sparsity: share of the key blocks that is skipped at least.
        cdf_threshold: the mass to keep; 1 leaves the share alone to decide.
        keep_sink, keep_recent: always read the first, and the last, key block.
        block_size: tokens in a block, a multiple of 8.
        compat: the original's decisions, its slack and exceptions included.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> attend(q, k, v, method=AdaBsa(sparsity=0.5, cdf_threshold=0.95), grid=(21, 30, 52))
    """

    sparsity: float = 0.0
    cdf_threshold: float = 1.0
    keep_sink: bool = True
    keep_recent: bool = True
    block_size: int = 128
    compat: bool = False
    tail: bool = False
    probes: int = field(default=0, kw_only=True)

    name: ClassVar[str] = "ada_bsa"
    STRIDE: ClassVar[int] = 8

    def __post_init__(self) -> None:
        check_probes(self.probes)
        check_share("sparsity", self.sparsity)
        check_share("cdf_threshold", self.cdf_threshold)
        Blocks(self.block_size, self.block_size)
        if self.block_size % self.STRIDE:
            raise ValueError(f"block_size must be a multiple of 8, got {self.block_size}")

    @property
    def can_be_causal(self) -> bool:  # type: ignore[override]
        return not (self.tail or self.probes)

    @property
    def uneven_heads(self) -> bool:  # type: ignore[override]
        return self.cdf_threshold < 1

    def planning_share(self, layout: BlockLayout) -> float:  # noqa: ARG002
        return 0.5 / self.STRIDE

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        return Blocks(self.block_size, self.block_size)

    def plan(self, query: Query) -> BlockPlan:
        layout = query.layout
        if self.compat:
            return self._plan_compat(query)
        scores = antidiagonal_scores(
            query.q, query.k, layout, query.scale, query.padding, self.STRIDE, query.causal
        )
        forced = _forced(layout, self.keep_sink, self.keep_recent)
        keep: Tensor | int = blocks_for(1 - self.sparsity, layout.N)
        if query.causal:
            # What lies ahead is no part of a row: neither of its share nor of what is forced.
            forced = forced & layout.causal
            visible = layout.causal.sum(-1, keepdim=True)[None, None]
            keep = (visible.double() * (1 - self.sparsity - 1e-9)).ceil().long()
        if self.cdf_threshold < 1:
            reached = count_to_reach(scores, self.cdf_threshold, forced)
            keep = reached.clamp_max(keep) if isinstance(keep, int) else reached.minimum(keep)
        rows = layout.text_rows if layout.has_text_rows else None
        return keep_top(scores, keep, layout, forced, rows, query.causal)

    def _plan_compat(self, query: Query) -> BlockPlan:
        if query.causal:
            raise ValueError(
                "compat=True is undefined for causal ada_bsa: how far the original looks ahead "
                "depends on its device's tiling; use compat=False"
            )
        layout = query.layout
        if query.padding is not None or layout.q_grid != layout.k_grid:
            raise ValueError(
                "compat=True is undefined for ada_bsa with padded keys or with other keys than "
                "the queries' own: the original sizes everything by q; use compat=False"
            )
        n = layout.N
        # The original fills the last query group with zeros, and a row sums to its groups, not 1.
        q = F.pad(query.q, (0, 0, 0, -layout.q.tokens % self.STRIDE))
        groups = torch.full((n, 1), self.block_size // self.STRIDE, device=q.device)
        groups[-1] = q.shape[2] // self.STRIDE - (n - 1) * (self.block_size // self.STRIDE)
        x = groups * antidiagonal_scores(
            q, query.k, layout, query.scale, stride=self.STRIDE, drop_tail=True
        )
        x[..., n - 1] = 0
        if self.keep_sink:
            x[..., 0] = 0
        y = x.sort(-1, descending=True).values
        guard = torch.zeros_like(y[..., :1])
        count = torch.full_like(guard, n)
        if self.cdf_threshold < 1:
            reached = y.cumsum(-1) >= self.cdf_threshold * y.sum(-1, keepdim=True)
            first = reached.float().argmax(-1, keepdim=True)
            guard, count = y.gather(-1, first), first.to(guard)
        room = n * (1 - self.sparsity)
        if n >= 10:
            guard = torch.where(count > room, y[..., int(room) - 1, None], guard)
        kept = x > guard - 1e-5
        kept[..., 0] = True
        kept[..., n - 1] = True
        return BlockPlan(layout, (1,), map=kept.to(torch.uint8))

    @property
    def mean_budget(self) -> float | None:
        """The largest share; None where nothing but the threshold bounds it."""
        return None if self.cdf_threshold < 1 and self.sparsity == 0 else 1 - self.sparsity

    def with_budget(self, mean: float) -> AdaBsa:
        return replace(self, sparsity=1 - mean)


@functools.lru_cache(maxsize=64)
def _forced(layout: BlockLayout, sink: bool, recent: bool) -> Tensor:
    """What every query block reads, with the first and the last key block where they are kept."""
    forced = layout.forced.clone()
    forced[:, 0] |= sink
    forced[:, -1] |= recent
    return forced
