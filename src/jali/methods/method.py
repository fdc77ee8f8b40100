"""What every method is: a frozen value that turns q and k into a plan."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple, Self, TypeVar

import torch
from torch import Tensor

from jali.kernels.lists import MEAN
from jali.planning.budget import Budget, blocks_for
from jali.planning.curve import LINEAR_FROM
from jali.planning.plan import BlockPlan
from jali.planning.selection import keep_top
from jali.planning.site import Site
from jali.planning.tables import Table, Tables
from jali.tokens.grid import TokenGrid
from jali.tokens.head_order import HeadOrders
from jali.tokens.layout import BlockLayout, Blocks, block_layout
from jali.tokens.order import Order, Raster
from jali.tokens.padding import KeyPadding
from jali.value import check_count

T = TypeVar("T", bound=Table)

FEWEST_PROBES = 16


class Query(NamedTuple):
    """Everything a plan may depend on, in the layout's order.

    q [B, H, Sq, D], k [B, Hkv, Sk, D]; v like k for methods that declare `needs_values`.
    """

    q: Tensor
    k: Tensor
    layout: BlockLayout
    site: Site
    scale: float
    padding: KeyPadding | None = None
    causal: bool = False
    v: Tensor | None = None
    tables: Tables | None = None  # what a run keeps for methods that look rarely
    orders: HeadOrders | None = None  # of heads, where q, k and v are in those
    level_times: Mapping[int, float] = MappingProxyType({})  # the backend's own
    dealt: Tensor | None = None  # int64, all heads of the layer in the order ranks hold them

    @property
    def real_k(self) -> Tensor:
        """k with 0 wherever a key is padding, which may hold anything, NaN included."""
        return self.k if self.padding is None else self.padding.zeroed(self.k)

    @property
    def real_v(self) -> Tensor:
        """The same of v, which a method that declares `needs_values` has."""
        assert self.v is not None
        return self.v if self.padding is None else self.padding.zeroed(self.v)

    def kept(self, kind: type[T], period: int, make: Callable[[], T]) -> T:
        """The table that an earlier call of this period left in the run; else a new one, left for
        the calls to come. Without `tables` every call makes its own."""
        if self.tables is None:
            return make()
        found = self.tables.find(self.site, period, self.layout, self.q, kind)
        if found is None:
            found = make()
            self.tables.keep(self.site, period, self.layout, found)
        return found


def kept_dense(steps: int | float = 0, layers: tuple[int, ...] = ()) -> Mapping[str, Any]:
    """First steps and layers that stay dense, as arguments of `Schedule`."""
    return MappingProxyType({"dense_steps": steps, "dense_layers": layers})


class Method(abc.ABC):
    """A method *is* its configuration: a frozen dataclass whose fields are its options.

    Deterministic in its inputs; never waits for the device. It reads v only where it says so.
    Most methods score blocks and keep the best ones: derive those from `Scored`.
    """

    name: ClassVar[str]
    can_be_causal: ClassVar[bool] = False
    needs_values: ClassVar[bool] = False
    keeps_tables: ClassVar[bool] = False  # what it looked at once may serve several calls
    falls: ClassVar[bool] = True  # budgets that fall along a run suit it better than dense steps
    linear_from: ClassVar[float] = LINEAR_FROM  # totals that fall linearly; lower ones faster
    orders_heads: ClassVar[bool] = False  # every head has an order of its own, made from q and k
    uneven_heads: ClassVar[bool] = False  # heads may do unequal parts of the work
    # What stays dense where its authors run it, as arguments of `Schedule`; this is ESA's.
    own_schedule: ClassVar[Mapping[str, Any]] = kept_dense(0.2, (0,))

    @property
    def ratios(self) -> tuple[int, ...]:
        """The ratios its plans may contain."""
        return (1,)

    @property
    def tail(self) -> bool:
        """Whether blocks that it would skip are read as one mean each."""
        return False

    @property
    def probes(self) -> int:
        """How many rows are computed densely too, to correct all others; 0 corrects nothing."""
        return 0

    @property
    def executed_ratios(self) -> tuple[int, ...]:
        """`ratios`, with that of the tail."""
        return (*self.ratios, MEAN) if self.tail and MEAN not in self.ratios else self.ratios

    @property
    def token_order(self) -> Order:
        """The order in which it cuts tokens into blocks."""
        return Raster()

    def active(self, site: Site, tokens: int) -> bool:  # noqa: ARG002
        """Whether this call is sparse at all."""
        return True

    def why_dense(self, site: Site, tokens: int) -> str | None:
        """Why it is not, in words; None where it is."""
        return None if self.active(site, tokens) else f"method {self.name}"

    def at(self, site: Site) -> Method:  # noqa: ARG002
        """The method for this site; wrappers hand over to what they wrap."""
        return self

    @property
    def base(self) -> Method:
        """The method itself, without the schedules around it."""
        return self

    def for_rank(self, rank: int, ranks: int) -> Method:  # noqa: ARG002
        """The method for one of several ranks that share the heads of a layer."""
        return self

    def among_ranks(
        self, rank: int, ranks: int, total: Callable[[Tensor], Tensor]  # noqa: ARG002
    ) -> Method:  # fmt: skip
        """The same, for a method whose ranks agree on something: `total` sums over them."""
        return self.for_rank(rank, ranks)

    def period(self, site: Site) -> int:
        """Which stretch of the run a step lies in: the steps of one share what is kept."""
        return site.step

    def blocks(self, preferred: Blocks) -> Blocks:
        """Its blocks, given those the backend likes best."""
        return preferred

    def order_of(self, q_grid: TokenGrid, k_grid: TokenGrid | None) -> Order:  # noqa: ARG002
        """The order of such queries and keys, where not every call has the same."""
        return self.token_order

    def layout(
        self,
        q_grid: TokenGrid,
        k_grid: TokenGrid | None,
        offset: int | None,
        blocks: Blocks,
        device: torch.device,
    ) -> BlockLayout:
        """How it orders and cuts the tokens of a call."""
        order = self.order_of(q_grid, k_grid)
        return block_layout(q_grid, k_grid, order, blocks, offset, device)

    def head_orders(self, query: Query) -> HeadOrders:
        """The orders of heads, for a method that declares `orders_heads`; its `token_order` is
        `PerHead()` then. `query` is in the layout's order, and in that of heads when it plans."""
        raise NotImplementedError(f"{type(self).__name__} has orders_heads and no head_orders")

    def planning_share(self, layout: BlockLayout) -> float:  # noqa: ARG002
        """The arithmetic of making a plan, as a share of dense attention's."""
        return 0.0

    @abc.abstractmethod
    def plan(self, query: Query) -> BlockPlan:
        """Which key blocks each query block reads, and how finely."""

    @property
    def mean_budget(self) -> float | None:
        """The asked share of the work; None where it depends on the scores or on the step."""
        if hasattr(self, "asked"):
            warnings.warn("Method.asked is now mean_budget", DeprecationWarning, stacklevel=2)
            return float(self.asked)
        return None

    @abc.abstractmethod
    def with_budget(self, mean: float) -> Method:
        """The same method, asked for this share of the work."""

    @property
    def total(self) -> float | None:
        """The asked share of *all* attention work of a run, where it was asked that way."""
        return None


def check_probes(count: Any) -> None:
    """How many rows are computed densely too: none, or as many as say something of the others."""
    check_count("probes", count, least=0)
    if 0 < count < FEWEST_PROBES:
        raise ValueError(
            f"probes must be 0 or at least {FEWEST_PROBES}, got {count}: so few rows say too "
            "little of all others"
        )


@dataclass(frozen=True)
class Scored(Method):
    """A method that scores key blocks and reads the best of each query block.

    A subclass has a `name`, options as fields, and `score(query)`. Budget, blocks and what is
    always read (a query block's own blocks, and text) come with it: see docs/extending.md for one
    in twenty lines.
    """

    budget: Budget = field(default_factory=Budget)
    q_block: int | None = field(default=None, kw_only=True)
    k_block: int | None = field(default=None, kw_only=True)
    tail: bool = field(default=False, kw_only=True)
    probes: int = field(default=0, kw_only=True)

    def __post_init__(self) -> None:
        check_probes(self.probes)
        if not isinstance(self.budget, Budget):
            raise TypeError(f"budget must be a Budget, as in Budget(0.3), got {self.budget!r}")
        for name in ("q_block", "k_block"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))

    @property
    def can_be_causal(self) -> bool:  # type: ignore[override]
        return isinstance(self.token_order, Raster) and not (self.tail or self.probes)

    @abc.abstractmethod
    def score(self, query: Query) -> Tensor:
        """How much each key block matters to each query block. fp32 [B|1, H|1, M, N]."""

    def keep(self, scores: Tensor, layout: BlockLayout) -> Tensor | int:  # noqa: ARG002
        """How many blocks a query block reads: one count, or one for every head [B, H]."""
        return blocks_for(self.budget.mean, layout.N)

    def blocks(self, preferred: Blocks) -> Blocks:
        if self.q_block is None and self.k_block is None:
            return preferred
        return Blocks(self.q_block or preferred.q, self.k_block or preferred.k)

    def plan(self, query: Query) -> BlockPlan:
        layout = query.layout
        scores = self.score(query)
        full_rows = layout.text_rows if layout.has_text_rows else None
        return keep_top(
            scores, self.keep(scores, layout), layout, layout.forced, full_rows, query.causal
        )

    @property
    def mean_budget(self) -> float:
        return self.budget.mean

    def with_budget(self, mean: float) -> Self:
        floor, ceiling = self.budget.floor, max(self.budget.ceiling, mean)
        floor = None if floor is None else min(floor, mean)
        return replace(self, budget=Budget(mean, floor, ceiling))
