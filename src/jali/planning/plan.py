"""The plan: which key blocks each query block reads, and how finely."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jali import kernels
from jali.kernels.lists import MEAN, BlockList, Lists, StackedLists
from jali.planning import cost
from jali.tokens.head_order import HeadOrders, put_back
from jali.tokens.layout import BlockLayout, Blocks
from jali.tokens.padding import KeyPadding

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SKIP = 0
RATIOS = (1, 2, 4, 8)
LEVELS = (*RATIOS, MEAN, SKIP)  # finest first


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """Levels per block pair: 0 skip, 1 read, 2/4/8 read the mean of that many keys.

    Held as a map (uint8 [B|1, H|1, M, N]) or as lists per ratio; either is derived from the other
    when it is asked for. `ratios` are the ratios that may occur: a static fact, known before any
    number is. A causal plan also hides keys after the query inside the blocks it reads. `padding`
    (in the layout's order) says which keys are real: the others cost nothing. `orders` are those of
    heads that each have their own: the blocks are then of these.
    """

    layout: BlockLayout
    ratios: tuple[int, ...]
    map: Tensor | None = None
    given: Lists | None = None
    causal: bool = False
    padding: KeyPadding | None = None
    orders: HeadOrders | None = None

    def __post_init__(self) -> None:
        check_ratios(self.ratios, self.layout.blocks.k)
        if (self.map is None) == (self.given is None):
            raise ValueError("a BlockPlan is given as a level map or as lists, one of the two")
        if self.map is None:
            return
        shape = (self.layout.M, self.layout.N)
        if self.map.dim() != 4 or self.map.dtype != torch.uint8 or self.map.shape[2:] != shape:
            raise ValueError(
                f"a level map is uint8 [B or 1, H or 1, {shape[0]}, {shape[1]}], "
                f"got {self.map.dtype} {tuple(self.map.shape)}"
            )

    @classmethod
    def from_levels(cls, levels: Tensor, layout: BlockLayout, causal: bool = False) -> BlockPlan:
        """A plan made by hand, fully checked (this waits for the device).

        levels: integers [B or 1, H or 1, M, N], 0 to skip a block pair, 1 to read it, 2, 4 or 8 to
        read means of that many keys. `layout` is what cuts the sequences into M × N blocks; a
        `causal` plan also hides keys after the query inside the blocks it reads.

        Raises ValueError for other levels or shapes, for key blocks that a ratio does not divide,
        and where a query block reads nothing.

        >>> layout = block_layout(TokenGrid.video(4, 16, 16), blocks=Blocks(128, 64))
        >>> levels = torch.full((1, 1, layout.M, layout.N), 8)
        >>> levels[..., layout.own] = 1
        >>> BlockPlan.from_levels(levels, layout)
        BlockPlan(1×1 heads, 8×16 blocks of 128×64, ratios 1/8)
        """
        found = sorted(levels.unique().tolist())  # before the cast: uint8 would wrap 257 to 1
        unknown = [x for x in found if x not in (SKIP, *RATIOS, MEAN)]
        if unknown:
            raise ValueError(f"levels are 0, 1, 2, 4, 8 or MEAN ({MEAN}), got {unknown}")
        ratios = tuple(int(x) for x in found if x != SKIP) or (1,)
        plan = cls(layout, ratios, map=levels.to(layout.device, torch.uint8), causal=causal)
        if bool((plan.levels == SKIP).all(-1).any()):
            raise ValueError("every query block must read at least one key block; some read none")
        return plan

    @property
    def blocks(self) -> Blocks:
        return self.layout.blocks

    @property
    def shape(self) -> tuple[int, ...]:
        """[B|1, H|1, M, N], known without waiting for the device."""
        if self.map is not None:
            return tuple(self.map.shape)
        assert self.given is not None
        counts = torch.broadcast_shapes(*(part.counts.shape for part in self.given.values()))
        return *counts, self.layout.N

    def __repr__(self) -> str:
        B, H, M, N = self.shape
        ratios = "/".join("mean" if r == MEAN else str(r) for r in self.ratios)
        causal = ", causal" if self.causal else ""
        return f"BlockPlan({B}×{H} heads, {M}×{N} blocks of {self.blocks}, ratios {ratios}{causal})"

    @functools.cached_property
    def levels(self) -> Tensor:
        """uint8 [B|1, H|1, M, N]."""
        if self.map is not None:
            return self.map
        assert self.given is not None
        levels = torch.zeros(self.shape, dtype=torch.uint8, device=self.layout.device)
        for ratio, part in self.given.items():
            slot = torch.arange(part.indices.shape[-1], device=levels.device)
            listed = slot < part.counts[..., None]
            # Unlisted entries go to a spare column, so that their zeros cannot mark block 0.
            column = torch.where(listed, part.indices.long(), self.layout.N)
            column = column.expand(*self.shape[:3], -1)
            found = F.pad(torch.zeros_like(levels, dtype=torch.bool), (0, 1))
            found.scatter_(-1, column, True)
            levels = torch.where(found[..., :-1], ratio, levels)
        return levels.to(torch.uint8)

    @property
    def lists(self) -> Lists:
        """A list per ratio."""
        return self._listed if self.given is None else self.given

    @functools.cached_property
    def _listed(self) -> Lists:
        return list_blocks(self.levels, self.ratios)

    @functools.cached_property
    def cost(self) -> float:
        """Share of dense attention's work: see `jali.planning.cost`. Waits for the device."""
        dense = self.pairs_of_dense.double().mean().clamp_min(1)
        return float(self.pairs_read.double().mean() / dense)

    @functools.cached_property
    def costs(self) -> Tensor:
        """The cost of every head, on the device. fp32 [B|1, H|1]."""
        return self.pairs_read / self.pairs_of_dense.clamp_min(1)

    @functools.cached_property
    def pairs_read(self) -> Tensor:
        """How many pairs of a query and a key (or a mean of keys) every head computes, on the
        device. int64 [B|1, H|1]."""
        return cost.pairs_read(self)

    @functools.cached_property
    def pairs_of_dense(self) -> Tensor:
        """How many dense attention computes for one head, on the device. int64 [B|1, 1]."""
        return cost.pairs_of_dense(self.layout, self.padding)

    @property
    def tally(self) -> Tensor:
        """How many blocks are read at each ratio, per head, on the device. int64 [R, B|1, H|1]."""
        lists = vars(self).get("_listed") if self.given is None else self.given
        if type(lists) is StackedLists and lists.spec.ratios == self.ratios:
            return lists.counts.sum(-1)
        if lists is None:
            counts = [(self.levels == ratio).sum((-2, -1)) for ratio in self.ratios]
        else:
            counts = [lists[ratio].counts.sum(-1) for ratio in self.ratios]
        return (
            counts[0][None] if len(counts) == 1 else torch.stack(torch.broadcast_tensors(*counts))
        )

    @functools.cached_property
    def density(self) -> float:
        """Share of block pairs that are touched at any level. Waits for the device."""
        touched = float(self.tally.sum(0).double().mean())
        return touched / self.layout.pairs

    def coarsen(self, blocks: Blocks) -> BlockPlan:
        """The same plan on other blocks: each is read as finely as its finest part.

        Larger blocks read more than was asked, smaller ones that divide these exactly as much.
        """
        if blocks is self.blocks or blocks == self.blocks:
            return self
        layout = self.layout.with_blocks(blocks)
        # Through the largest blocks that divide both: cutting is exact, joining takes the minimum.
        q, k = math.gcd(blocks.q, self.blocks.q), math.gcd(blocks.k, self.blocks.k)
        skip = 255  # larger than every level, so the minimum is the finest
        levels = torch.where(self.levels == SKIP, skip, self.levels)
        for dim, old, part, new, size, tokens in (
            (2, self.blocks.q, q, blocks.q, layout.M, layout.q.tokens),
            (3, self.blocks.k, k, blocks.k, layout.N, layout.k.tokens),
        ):
            levels = levels.repeat_interleave(old // part, dim=dim)
            levels = levels.narrow(dim, 0, -(-tokens // part))
            missing = size * (new // part) - levels.shape[dim]
            pad = (0, missing) if dim == 3 else (0, 0, 0, missing)
            levels = F.pad(levels, pad, value=skip).unflatten(dim, (size, -1)).amin(dim + 1)
        levels = torch.where(levels == skip, SKIP, levels)
        levels = levels.to(torch.uint8)
        return BlockPlan(
            layout, self.ratios, levels, None, self.causal, self.padding, self.orders
        )  # fmt: skip

    def query_tokens(self, head: int, batch: int = 0) -> Tensor:
        """Which of the caller's queries lies in each slot of a head. int64 [Sq]."""
        orders = self.orders
        return self.layout.q.tokens_at(None if orders is None else orders.q[batch, head])

    def key_tokens(self, head: int, batch: int = 0) -> Tensor:
        """Which of the caller's keys lies in each slot that a query head reads. int64 [Sk]."""
        orders = self.orders
        if orders is None:
            return self.layout.k.tokens_at(None)
        share = orders.q.shape[1] // orders.k.shape[1]
        return self.layout.k.tokens_at(orders.k[batch, head // share])

    def arrange(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, H, S, D] each, from the caller's order to that of the plan."""
        layout, orders = self.layout, self.orders
        q, k, v = layout.q.arrange(q), layout.k.arrange(k), layout.k.arrange(v)
        return (q, k, v) if orders is None else orders.take(q, k, v)

    def restore(self, x: Tensor) -> Tensor:
        """Something of every query [B, H, Sq] or [B, H, Sq, D] in the caller's order again."""
        return self.layout.q.restore(x if self.orders is None else put_back(x, self.orders.q))

    def with_tail(self) -> BlockPlan:
        """The same plan, with one mean for every block that it skips."""
        if self.causal:
            raise ValueError("a tail cannot be causal: the mean of a block holds keys to come")
        levels = torch.where(self.levels == SKIP, MEAN, self.levels).to(torch.uint8)
        ratios = (*(r for r in self.ratios if r != MEAN), MEAN)
        return replace(self, ratios=ratios, map=levels, given=None)

    def show(self, batch: int = 0, head: int | None = None, width: int = 64) -> str:
        """The plan as text: rows are query blocks, columns key blocks, darker is finer."""
        work = self.work(batch, head)
        rows, columns = min(width // 2, self.layout.M), min(width, self.layout.N)
        small = F.adaptive_avg_pool2d(work[None], (rows, columns))[0]
        shades = " ░▒▓█"
        lines = [
            "".join(shades[round(float(x) ** 0.5 * (len(shades) - 1))] for x in row)
            for row in small
        ]
        which = "mean over heads" if head is None else f"head {head}"
        title = (
            f"{self.layout.M} query × {self.layout.N} key blocks of {self.blocks}, {which}: "
            f"cost {self._cost_of(batch, head):.3f}"
        )
        return "\n".join([title, *lines])

    def figure(self, batch: int = 0, head: int | None = None) -> Figure:
        """The plan as a matplotlib figure (needs the extra `report`)."""
        try:
            from matplotlib.figure import Figure
        except ImportError as error:
            raise ImportError("plan.figure() needs matplotlib: pip install jali[report]") from error
        figure = Figure(figsize=(6, 6 * self.layout.M / max(self.layout.N, 1) + 1))
        axes: Any = figure.add_subplot()
        work = self.work(batch, head)
        axes.imshow(work.numpy(), vmin=0, vmax=1, cmap="magma_r", aspect="auto")
        axes.set(
            xlabel=f"key blocks of {self.blocks.k}",
            ylabel=f"query blocks of {self.blocks.q}",
            title=f"cost {self._cost_of(batch, head):.3f}",
        )
        return figure

    def _cost_of(self, batch: int, head: int | None) -> float:
        """Of one head, or the mean over heads."""
        costs = self.costs[batch % len(self.costs)]
        return float(costs.mean() if head is None else costs[head % len(costs)])

    def work(self, batch: int = 0, head: int | None = None) -> Tensor:
        """How finely block pairs are read, 1 in full: of one head, or the mean over heads. fp32
        [M, N] on the host."""
        levels = self.levels[batch].float()
        levels = torch.where(levels == MEAN, self.blocks.k, levels)
        work = torch.where(levels > 0, 1 / levels.clamp_min(1), 0.0)
        if head is None:
            return work.mean(0).cpu()
        return work[head if len(work) > 1 else 0].cpu()  # one plan may serve all heads


@functools.lru_cache(maxsize=64)
def check_ratios(ratios: tuple[int, ...], k_block: int) -> None:
    bad = [r for r in ratios if r not in (*RATIOS, MEAN)]
    if bad or not ratios or tuple(sorted(set(ratios))) != ratios:
        raise ValueError(f"ratios are an ascending choice of 1, 2, 4, 8 and MEAN; got {ratios}")
    pooled = max((r for r in ratios if r != MEAN), default=1)
    if k_block % pooled:
        raise ValueError(
            f"key blocks of {k_block} cannot be pooled {pooled}×: "
            f"the key block must be a multiple of {pooled}"
        )


def list_blocks(levels: Tensor, ratios: tuple[int, ...]) -> Lists:
    """The blocks that uint8 levels [B|1, H|1, M, N] read at each ratio, ascending."""
    if levels.is_cuda and kernels.available(levels.device):
        found: Lists = kernels.load("selection").level_lists(levels, ratios)
        return found
    lists = {}
    N = levels.shape[-1]
    column = torch.arange(N, dtype=torch.int32, device=levels.device)
    for ratio in ratios:
        kept = levels == ratio
        indices = torch.where(kept, column, N).sort(-1).values
        lists[ratio] = BlockList(
            counts=kept.sum(-1, dtype=torch.int32),
            indices=indices.where(indices < N, 0).to(torch.int32),
        )
    return lists


def full_plan(layout: BlockLayout, causal: bool = False) -> BlockPlan:
    """Read everything (that causality allows)."""
    levels = torch.ones(1, 1, layout.M, layout.N, dtype=torch.uint8, device=layout.device)
    if causal:
        levels = levels * layout.causal
    return BlockPlan(layout, (1,), map=levels, causal=causal)
