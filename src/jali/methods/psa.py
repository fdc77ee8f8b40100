"""Pyramid sparse attention: the less a key block matters, the coarser it is read."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from jali.methods.method import Method, Query, check_probes
from jali.methods.sampling import jittered_positions
from jali.planning.plan import RATIOS, SKIP, BlockPlan, check_ratios
from jali.planning.scoring import key_similarity, peak_scores
from jali.planning.selection import keep_pyramid, protect
from jali.tokens.layout import BlockLayout, Blocks
from jali.tokens.order import Gilbert, Order
from jali.value import check_choice, check_share

Range = tuple[float, float]
Ranges = tuple[tuple[int, Range], ...]

DEFAULT_RANGES: Ranges = ((1, (0.0, 0.1)), (2, (0.1, 0.15)), (8, (0.15, 0.35)), (0, (0.35, 1.0)))


@dataclass(frozen=True)
class Psa(Method):
    """Rank key blocks by sampled importance, then read each at the level whose range it falls in.

    Args:
        mask_ratios: maps a ratio (1, 2, 4, 8; 0 skips) to its range [low, high): of ranked blocks
            in mode "topk", of cumulative importance in mode "thresholdbound".
        mode: "topk" or "thresholdbound".
        axis: with "step" the ranges are of denoising steps instead of blocks, and at a step every
            block has the one level whose range holds it.
        importance: "softmax", or PSA's "surrogate" that is not normalised.
        similarity: thresholds on the cosine of neighbouring keys; a key block below those of 2×,
            4×, 8× is not read that coarsely.
        floor: share of the blocks read at ratio 1 at least, in mode "thresholdbound".
        q_block, k_block: tokens in a block.
        order: of the tokens, before they are cut into blocks.
        seed: of the sampled tokens.
        aligned: round the number of blocks of a level to whole tiles of PSA's kernels (32 keys), as
            PSA does: up, or down at the end of a row. Key blocks are then a multiple of 32.
        tail: read what would be skipped as one mean a block.
        probes: rows that are computed densely too, and correct all others.

    Example:
        >>> levels = {1: (0, 0.1), 2: (0.1, 0.15), 8: (0.15, 0.35), 0: (0.35, 1)}
        >>> attend(q, k, v, method=Psa(levels), grid=(21, 30, 52))
    """

    mask_ratios: Ranges | Mapping[int, Range] = DEFAULT_RANGES
    mode: str = "topk"
    axis: str = "block"
    importance: str = "softmax"
    similarity: tuple[float, float, float] | None = None
    floor: float = 0.06
    q_block: int = 128
    k_block: int = 64
    order: Order = field(default_factory=Gilbert)
    seed: int = 0
    aligned: bool = False
    tail: bool = False
    probes: int = field(default=0, kw_only=True)

    name: ClassVar[str] = "psa"
    falls: ClassVar[bool] = False  # it reads most blocks coarsely however much it may read
    PER_SAMPLE: ClassVar[int] = 4  # one token in four is sampled, of queries and of keys
    TILE: ClassVar[int] = 32  # keys that PSA's kernels read at once

    def __post_init__(self) -> None:
        check_probes(self.probes)
        check_choice("mode", self.mode, ("topk", "thresholdbound"))
        check_choice("axis", self.axis, ("block", "step"))
        check_choice("importance", self.importance, ("softmax", "surrogate"))
        check_share("floor", self.floor)
        self._check_aligned()
        object.__setattr__(self, "mask_ratios", _ranges(self.mask_ratios))
        check_ratios(self.ratios, self._blocks.k)
        if self.similarity is not None:
            if len(self.similarity) != 3 or any(x != x for x in self.similarity):
                raise ValueError(f"similarity is three thresholds (2×, 4×, 8×), {self.similarity=}")
            object.__setattr__(self, "similarity", tuple(self.similarity))

    def _check_aligned(self) -> None:
        if not isinstance(self.aligned, bool):
            raise TypeError(f"aligned must be a bool, got {self.aligned!r}")
        if self.aligned and self.axis == "step":
            raise ValueError(
                "aligned=True rounds levels of blocks; with axis='step' there are none"
            )
        if self.aligned and self.k_block % self.TILE:
            raise ValueError(
                f"aligned=True needs key blocks of whole tiles of {self.TILE} keys, got "
                f"k_block={self.k_block}"
            )

    @functools.cached_property
    def ranges(self) -> dict[int, Range]:
        return dict(self.mask_ratios)

    @functools.cached_property
    def ratios(self) -> tuple[int, ...]:
        used = {ratio for ratio, (low, high) in self.ranges.items() if ratio and high > low}
        if self.similarity is not None:  # a cap may turn 8 into 4 or 2
            used |= {ratio for ratio in RATIOS if ratio < max(used, default=1)}
        return tuple(sorted(used | {1}))  # own and text blocks are always read in full

    @property
    def token_order(self) -> Order:
        return self.order

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        return self._blocks

    @functools.cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.q_block, self.k_block)

    @functools.cached_property
    def _per_block(self) -> tuple[int, int]:
        """Samples in a block of queries and in one of keys."""
        return max(1, self.q_block // self.PER_SAMPLE), max(1, self.k_block // self.PER_SAMPLE)

    @functools.cached_property
    def _bounds(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """The ratios that read, and where the range of each ends; the first is 1, for its floor."""
        bounds = {ratio: high for ratio, (_, high) in self.ranges.items() if ratio}
        bounds = bounds if 1 in bounds else {1: 0.0, **bounds}
        return tuple(bounds), tuple(bounds.values())

    @functools.cached_property
    def _multiples(self) -> tuple[int, ...] | None:
        """How many blocks of a ratio fill a tile, for the ratios of `_bounds`."""
        if not self.aligned:
            return None
        return tuple(-(-ratio // (self.k_block // self.TILE)) for ratio in self._bounds[0])

    @property
    def uneven_heads(self) -> bool:  # type: ignore[override]
        return self.mode == "thresholdbound" or self.similarity is not None

    def planning_share(self, layout: BlockLayout) -> float:
        """Of products between sampled queries and sampled keys."""
        if self.axis == "step":
            return 0.0
        sampled = zip(self._per_block, (layout.blocks.q, layout.blocks.k), strict=True)
        return 0.5 * math.prod(min(1.0, count / block) for count, block in sampled)

    def plan(self, query: Query) -> BlockPlan:
        layout = query.layout
        cap = self._cap(query)
        if self.axis == "step":
            levels = protect(self._levels_by_step(query), layout, cap)
            return BlockPlan(layout, self.ratios, map=levels)
        positions, normalised = self._positions(query), self.importance == "softmax"
        scores = peak_scores(
            query.q, query.k, layout, query.scale, *positions, query.padding, normalised
        )
        named, bounds = self._bounds
        floor = self.floor if self.mode == "thresholdbound" else None
        return keep_pyramid(scores, layout, named, bounds, floor, cap, self.ratios, self._multiples)

    @property
    def mean_budget(self) -> float | None:
        if (self.mode, self.axis, self.similarity) != ("topk", "block", None):
            return None
        return nominal_cost(self.ranges)

    def _levels_by_step(self, query: Query) -> Tensor:
        at = query.site.step / query.site.steps
        level = next((r for r, (low, high) in self.ranges.items() if low <= at < high), SKIP)
        shape = (1, 1, query.layout.M, query.layout.N)
        return torch.full(shape, level, dtype=torch.uint8, device=query.q.device)

    def _cap(self, query: Query) -> Tensor | None:
        """The coarsest ratio a key block may be read at: 1 where it mixes segments, and no coarser
        than neighbouring keys are alike. uint8 [B, H, N]; None where nothing is capped."""
        layout, heads = query.layout, query.q.shape[1]
        if self.similarity is None and not layout.has_mixed_keys:
            return None
        cap = torch.full((layout.N,), max(RATIOS), dtype=torch.uint8, device=query.q.device)
        if self.similarity is not None:
            cap = torch.ones_like(cap)
            for ratio, threshold in zip((2, 4, 8), self.similarity, strict=True):
                if layout.blocks.k % ratio == 0:
                    alike = key_similarity(query.k, layout, ratio, query.padding) > threshold
                    cap = torch.where(alike, ratio, cap)
            cap = cap.repeat_interleave(heads // cap.shape[1], dim=1)
        cap = torch.where(layout.mixed_keys, 1, cap).to(torch.uint8)
        return cap.expand(query.q.shape[0], heads, layout.N)

    def _positions(self, query: Query) -> tuple[Tensor, Tensor]:
        """The sampled queries and keys of every block."""
        layout, site, seed = query.layout, query.site, self.seed
        q, k = layout.q.tokens, layout.k.tokens
        q_count, k_count = self._per_block
        return (
            jittered_positions(q, self.q_block, q_count, seed, site, layout.device),
            jittered_positions(k, self.k_block, k_count, seed, site, layout.device),
        )

    def with_budget(self, mean: float) -> Psa:
        """Scale the ranges so that the cost is `mean`, by the quantile rule: only its cost is
        known before the scores are."""
        check_share("budget", mean)
        return replace(self, mode="topk", axis="block", mask_ratios=_scaled(self.ranges, mean))


def nominal_cost(ranges: Mapping[int, Range]) -> float:
    """Share of dense work when ranges are shares of blocks."""
    return sum((high - low) / ratio for ratio, (low, high) in ranges.items() if ratio)


def _scaled(ranges: Mapping[int, Range], cost: float) -> dict[int, Range]:
    """Stretch all bounds by one factor; what passes the end falls off, coarsest first."""

    reading = {ratio: limits for ratio, limits in ranges.items() if ratio}

    def stretched(factor: float) -> dict[int, Range]:
        found = {r: (min(1.0, a * factor), min(1.0, b * factor)) for r, (a, b) in reading.items()}
        end = max(high for _, high in found.values())
        return {**found, 0: (end, 1.0)} if end < 1 else found

    if not reading or cost <= 0:
        return {1: (0.0, 0.0), 0: (0.0, 1.0)}
    low, high = 0.0, 1 / max(min(b for _, b in reading.values() if b > 0), 1e-6)
    if nominal_cost(stretched(high)) <= cost:
        return stretched(high)
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if nominal_cost(stretched(middle)) < cost else (low, middle)
    return stretched(high)


def _ranges(given: Ranges | Mapping[int, Range]) -> Ranges:
    """Check the ranges and put them in order: 1, 2, 4, 8, then skip."""
    items = dict(given.items() if isinstance(given, Mapping) else given)
    unknown = [key for key in items if key not in (*RATIOS, SKIP)]
    if unknown:
        raise ValueError(f"mask_ratios has keys 1, 2, 4, 8 and 0 (skip), got {unknown}")
    if not items:
        raise ValueError("mask_ratios is empty: name at least one level")
    ordered = sorted(items, key=lambda ratio: (ratio == SKIP, ratio))
    at = 0.0
    checked = []
    for ratio in ordered:
        pair = items[ratio]
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"mask_ratios[{ratio}] is a pair [low, high], got {pair!r}")
        low, high = float(pair[0]), float(pair[1])
        if not 0 <= low <= high <= 1:
            raise ValueError(f"mask_ratios[{ratio}] needs 0 <= low <= high <= 1, got {pair!r}")
        if abs(low - at) > 1e-6:
            raise ValueError(
                f"mask_ratios[{ratio}] starts at {low}, but the level before it ends at {at}: "
                f"ranges must follow one another in the order 1, 2, 4, 8, 0"
            )
        checked.append((ratio, (low, high)))
        at = high
    if SKIP in items and abs(at - 1) > 1e-6:
        raise ValueError(f"mask_ratios[0] must end at 1.0, got {at}")
    return tuple(checked)
