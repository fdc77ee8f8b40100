"""RainFusion 2.0: block means decide, blocks are 3-D windows, the first frame is always read."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch

from jali.methods.method import Method, Query, check_probes
from jali.planning.budget import blocks_for
from jali.planning.plan import BlockPlan
from jali.planning.scoring import at_least_fp32, block_means, mean_scores
from jali.planning.selection import keep_top
from jali.tokens.grid import Box, TokenGrid
from jali.tokens.layout import BlockLayout, Blocks
from jali.tokens.order import FrameWindows, Order, Raster, Tiled
from jali.value import check_share


@dataclass(frozen=True)
class RfV2(Method):
    """Keep the 1 − sparsity best key blocks of each query block by the product of block means.

    Protected blocks and a query block's own blocks count inside the kept share; protected query
    rows read everything.

    Args:
        sparsity: share of the key blocks that is skipped.
        block_size: tokens in a block, of queries and of keys.
        first_frame: whether the first frame is protected; None is that of videos, but not of
            single images (with `compat` those too).
        window: tokens in t, h and w that are put next to each other.
        compat: the original's decisions: its frame-wise 8×8 windows, scores in the input's
            precision with ties kept, forced blocks on top, no own block.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> attend(q, k, v, method=RfV2(sparsity=0.8), grid=(21, 30, 52))
    """

    sparsity: float = 0.8
    block_size: int = 128
    first_frame: bool | None = None
    window: tuple[int, int, int] = (2, 8, 8)
    compat: bool = False
    tail: bool = False
    probes: int = field(default=0, kw_only=True)

    name: ClassVar[str] = "rf_v2"

    def __post_init__(self) -> None:
        check_probes(self.probes)
        check_share("sparsity", self.sparsity)
        Blocks(self.block_size, self.block_size)
        object.__setattr__(self, "window", Tiled(self.window).window)

    @functools.cached_property
    def token_order(self) -> Order:
        if self.compat:
            return FrameWindows()
        return Tiled(self.window, first_frame_last=self.first_frame is not False)

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        return self._blocks

    @functools.cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.block_size, self.block_size)

    def order_of(self, q_grid: TokenGrid, k_grid: TokenGrid | None) -> Order:
        if self.compat:
            self._check_compat(q_grid, k_grid, self.block_size)
            if any(isinstance(s, Box) and min(s.height, s.width) < 8 for s in q_grid.segments):
                return Raster()  # the original cannot run these; there are no windows to make
        return self.token_order

    def planning_share(self, layout: BlockLayout) -> float:
        """Of products between block means."""
        return 0.5 / (layout.blocks.q * layout.blocks.k)

    def plan(self, query: Query) -> BlockPlan:
        if self.compat:
            return self._plan_compat(query)
        layout = query.layout
        scores = mean_scores(query.q, query.k, layout, query.scale, query.padding)
        forced, rows = layout.forced, layout.text_rows
        if self.first_frame is not False:
            forced, rows = layout.forced_first, layout.text_or_first_rows
        if self.first_frame:
            forced, rows = forced | layout.single_keys, rows | layout.single_rows
        return keep_top(scores, blocks_for(1 - self.sparsity, layout.N), layout, forced, rows)

    def _plan_compat(self, query: Query) -> BlockPlan:
        layout, dtype = query.layout, query.q.dtype
        if query.padding is not None or query.q.shape[1] != query.k.shape[1]:
            raise ValueError(
                f"compat=True is undefined for padded keys and for {query.q.shape[1]} query heads "
                f"on {query.k.shape[1]} key heads: the original knows neither; use compat=False"
            )
        # Rounded to the input's precision at every stage, as there: ties are part of the result.
        q_mean = block_means(query.q, layout.blocks.q).to(dtype)
        k_mean = block_means(query.k, layout.blocks.k).to(dtype)
        # (The product itself accumulates in fp32 everywhere, and some CPUs have no other.)
        products = (at_least_fp32(q_mean) @ at_least_fp32(k_mean).transpose(-1, -2)).to(dtype)
        scores = (products * query.scale).softmax(-1)
        keep = max(1, math.ceil(layout.N * (1 - self.sparsity)))
        threshold = scores.topk(keep, dim=-1).values[..., -1:]
        rows, keys = layout.text_rows, layout.text_keys
        if self.first_frame is not False:
            rows = rows | layout.first_rows | layout.single_rows
            keys = keys | layout.first_keys | layout.single_keys
        kept = (scores >= threshold) | rows[:, None] | keys
        return BlockPlan(layout, (1,), map=kept.to(torch.uint8))

    @staticmethod
    def _check_compat(grid: TokenGrid, k_grid: TokenGrid | None, block: int) -> None:
        if k_grid is not None and k_grid != grid:
            raise ValueError(
                f"compat=True is undefined for keys {k_grid} of queries {grid}: the original "
                f"only knows one sequence; use compat=False"
            )
        video = sum(s.tokens for s in grid.segments if isinstance(s, Box))
        if video != grid.tokens and video % block:
            raise ValueError(
                f"compat=True is undefined for text beside {video} video tokens, which are no "
                f"multiple of {block}: the original reads past its keys there; use compat=False"
            )

    @property
    def mean_budget(self) -> float:
        return 1 - self.sparsity

    def with_budget(self, mean: float) -> RfV2:
        return replace(self, sparsity=1 - mean)
