"""Rate–distortion: each block as finely as its error is worth, by one price of work for all."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from jali.kernels.lists import MEAN
from jali.methods.method import Method, Query, check_probes
from jali.methods.sampling import jittered_positions
from jali.planning.distortion import ErrorTable, error_table, samples_share
from jali.planning.mixture import mixed_share, mixed_table
from jali.planning.plan import LEVELS, RATIOS, SKIP, BlockPlan, check_ratios
from jali.planning.site import Site
from jali.planning.statistics import statistics_share, statistics_table
from jali.planning.tables import period_of
from jali.planning.tradeoff import Costs, Sum, choose_plan, with_left
from jali.tokens.layout import BlockLayout, Blocks
from jali.tokens.order import Order, Raster
from jali.value import check_choice, check_count, check_share, check_steps

WORDS = {"mean": MEAN, "skip": SKIP}
TIME = "time"
# How a table is made, and the share of dense attention's arithmetic that this takes.
ESTIMATES = {
    "samples": (error_table, samples_share),
    "statistics": (statistics_table, statistics_share),
    "mixed": (mixed_table, mixed_share),
}


@dataclass(frozen=True)
class RateDistortion(Method):
    """Estimate how much the output would change if a block were read less finely, for every block
    pair and level; take the levels that err least for the budget.

    A few sampled rows of each query block see all keys and values: what they would lose is the
    table of errors. All heads and rows of a sample share the budget freely, by one price: a block
    is read finer as long as that lowers its error by more than the price of the work.

    Args:
        budget: share of dense attention's work.
        price: instead of a budget, the squared error that a whole block of work must be worth: the
            quality is constant, the cost follows the content.
        samples: rows that are looked at in every query block.
        estimate: what these rows see: all keys ("samples"); means and variances of groups of eight
            ("statistics"), for a sixth of the arithmetic; or both, a quarter of them all keys
            ("mixed").
        costs: of levels, as shares of reading a block in full, where a backend does not run them at
            the rate of their work: {2: 0.6, 4: 0.35, 8: 0.2, "mean": 0.03}, or "time" for what was
            measured of the backend that runs. The budget is in these units then. Levels that are
            not named, or were not measured, cost their work.
        levels: those that may be chosen besides reading in full: 2, 4, 8 (means of so many keys),
            "mean" (the block as one key) and "skip". Finer ones need a little less work for the
            same quality, and take a little more time.
        keep: how long a table serves, as a share of the run (float) or in steps (int); the
            levels are chosen anew for each step's budget. 0 makes one in every step.
        q_block, k_block: tokens in a block.
        order: of the tokens, before they are cut into blocks.
        seed: of the sampled rows.
        tail: skip nothing: what errs least is read as one mean a block, whatever `levels` say.
        probes: rows that are computed densely too, and correct all others; 0 corrects nothing.

    Example:
        >>> attend(q, k, v, method=RateDistortion(0.3, samples=8), grid=(21, 30, 52))
    """

    budget: float = 0.5
    price: float | None = None
    samples: int = 4
    levels: tuple[int | str, ...] = ("mean", "skip")
    keep: float | int = 0.25
    estimate: str = "samples"
    costs: Mapping[int | str, float] | tuple[tuple[int | str, float], ...] | Literal["time"] = ()
    q_block: int = field(default=128, kw_only=True)
    k_block: int = field(default=128, kw_only=True)
    order: Order = field(default_factory=Raster, kw_only=True)
    seed: int = field(default=0, kw_only=True)
    tail: bool = field(default=False, kw_only=True)
    probes: int = field(default=64, kw_only=True)

    name: ClassVar[str] = "rd"
    needs_values: ClassVar[bool] = True
    keeps_tables: ClassVar[bool] = True
    uneven_heads: ClassVar[bool] = True
    linear_from: ClassVar[float] = math.inf  # early steps are worth more, whatever the total

    def __post_init__(self) -> None:
        check_probes(self.probes)
        check_share("budget", self.budget)
        if self.price is not None and not _is_positive(self.price):
            raise ValueError(f"price must be a finite number above 0, got {self.price!r}")
        check_count("samples", self.samples)
        check_steps("keep", self.keep)
        check_choice("estimate", self.estimate, ESTIMATES)
        for name in ("q_block", "k_block"):
            check_count(name, getattr(self, name))
        object.__setattr__(self, "levels", _checked(self.levels))
        if self.costs != TIME:
            object.__setattr__(self, "costs", _checked_costs(self.costs))
        check_ratios(self.ratios, self.k_block)

    @functools.cached_property
    def codes(self) -> tuple[int, ...]:
        """The levels above 1 as plans write them, finest first."""
        found = {_code(level) for level in self.levels}
        if self.tail:
            found = (found | {MEAN}) - {SKIP}
        return tuple(level for level in LEVELS if level in found)

    @functools.cached_property
    def ratios(self) -> tuple[int, ...]:
        return (1, *(level for level in self.codes if level != SKIP))

    @functools.cached_property
    def _costs(self) -> Costs:
        """Where they are given."""
        assert isinstance(self.costs, tuple)
        return tuple((_code(level), cost) for level, cost in self.costs)

    def costs_of(self, query: Query) -> Costs:
        """What levels cost in this call."""
        if self.costs != TIME:
            return self._costs
        times = query.level_times
        return tuple((level, times[level]) for level in self.codes if level in times)

    @property
    def token_order(self) -> Order:
        return self.order

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        return self._blocks

    @functools.cached_property
    def _blocks(self) -> Blocks:
        return Blocks(self.q_block, self.k_block)

    def plan(self, query: Query) -> BlockPlan:
        table = self.table(query)
        return choose_plan(
            table, query.layout, self.ratios, self.budget, self.price, query.padding,
            self.sum_over_ranks, self.costs_of(query),
        )  # fmt: skip

    @property
    def sum_over_ranks(self) -> Sum | None:
        """Adds up the work of ranks that share the heads of a layer; None where none do."""
        return None

    def table(self, query: Query) -> ErrorTable:
        """The errors behind the plan: kept ones where there are, else of these numbers."""
        q, layout, site, tables = query.q, query.layout, query.site, query.tables
        period = self.period(site)
        if tables is not None:
            kept = tables.find(site, period, layout, q, ErrorTable, self.codes)
            if kept is not None:
                return kept
        if query.v is None:
            raise ValueError("rd reads values: its Query needs v")
        at = jittered_positions(
            layout.q.tokens, self.q_block, self.samples, self.seed, site, layout.device
        )
        make, _ = ESTIMATES[self.estimate]
        table = make(q, query.k, query.v, layout, query.scale, at, self.codes, query.padding)
        if tables is not None:
            if self.price is None:
                table = with_left(
                    table, layout, query.padding, self.sum_over_ranks, self.costs_of(query)
                )
            tables.keep(site, period, layout, table)
        return table

    def period(self, site: Site) -> int:
        return period_of(site, self.keep)

    def planning_share(self, layout: BlockLayout) -> float:
        """Of making a table."""
        _, share = ESTIMATES[self.estimate]
        return share(layout, self.samples, self.codes)

    @property
    def mean_budget(self) -> float | None:
        return self.budget if self.price is None else None

    def with_budget(self, mean: float) -> RateDistortion:
        return replace(self, budget=mean, price=None)


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value < math.inf


def _code(level: int | str) -> int:
    return level if isinstance(level, int) else WORDS[level]


def _checked_costs(costs: Any) -> tuple[tuple[int | str, float], ...]:
    """As pairs, finest first."""
    known: tuple[int | str, ...] = (*RATIOS[1:], "mean")
    words = f"costs are shares of the levels {', '.join(map(str, known))}, as in {{2: 0.6}}, or "
    words += repr(TIME)
    try:
        given = dict(costs)
    except (TypeError, ValueError):
        raise ValueError(f"{words}, got {costs!r}") from None
    for level, cost in given.items():
        if isinstance(level, bool) or level not in known:
            raise ValueError(f"{words}, got one of {level!r}")
        check_share(f"the cost of level {level}", cost)
    return tuple((level, float(given[level])) for level in known if level in given)


def _checked(levels: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Finest first, each once."""
    known: tuple[int | str, ...] = (*RATIOS[1:], *WORDS)
    if not isinstance(levels, tuple | list) or not levels:
        raise ValueError(f"levels are some of {', '.join(map(str, known))}, got {levels!r}")
    for level in levels:
        if level not in known:
            raise ValueError(f"levels are some of {', '.join(map(str, known))}, got {level!r}")
    return tuple(level for level in known if level in levels)
