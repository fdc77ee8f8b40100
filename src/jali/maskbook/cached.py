"""Replay of a calibrated book: look up, attend. Nothing is scored."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar

from torch import Tensor

from jali.maskbook import MaskBook
from jali.methods.method import Method, Query, check_probes
from jali.methods.rd import RateDistortion
from jali.planning.budget import Budget
from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.tokens.layout import BlockLayout, Blocks
from jali.tokens.order import Order


@dataclass(frozen=True)
class Cached(Method):
    """The plans of a book, by step, layer and branch; the same for every prompt.

    Attributes:
        book: what is replayed.
        budget: the asked mean share; one that the book does not hold is derived from its
            importance before the first call.
        rank, ranks: which part of the heads is here, where ranks share them.
        check: asked at every call; raises for a run that the book does not fit.
        sum_over_ranks: sums a tensor over those ranks: the heads of a book of rd share a budget.
        probes: rows that are computed densely too, and correct all others; 0 corrects nothing.

    Raises:
        TypeError: `book` is no MaskBook, or `budget` no Budget.
        ValueError: more than a mean is asked, or a budget that the book cannot derive. Calls of
            another grid, number of steps, layers or heads are refused too, naming both values.

    Example:
        >>> method = Cached(MaskBook.open("wan.safetensors"), Budget(0.5))  # doctest: +SKIP
        >>> with sparse_processor_mode(pipe, method=method):  # doctest: +SKIP
        ...     video = pipe("a cat", num_inference_steps=50)
    """

    book: MaskBook
    budget: Budget = field(default_factory=Budget)
    rank: int = 0
    ranks: int = 1
    check: Callable[[Site], None] | None = field(default=None, compare=False, repr=False)
    sum_over_ranks: Callable[[Tensor], Tensor] | None = field(
        default=None, compare=False, repr=False
    )
    probes: int = 0

    name: ClassVar[str] = "cached"
    keeps_tables: ClassVar[bool] = True
    uneven_heads: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_probes(self.probes)
        if not isinstance(self.book, MaskBook):
            raise TypeError(
                f"Cached replays a MaskBook, got {self.book!r}; use MaskBook.open(path)"
            )
        if not isinstance(self.budget, Budget):
            raise TypeError(f"budget must be a Budget, got {self.budget!r}")
        if self.budget != Budget(self.budget.mean):  # a floor or a ceiling
            raise ValueError(f"a book is asked for a mean share alone, got {self.budget}")
        if self.budget.mean not in self.book.budgets and not self.book.derives:
            self.book.derive(self.budget.mean)  # says why it cannot

    @property
    def linear_from(self) -> float:  # type: ignore[override]
        """As the method that the book recorded."""
        recorded = Method if self.book.header.errors is None else RateDistortion
        return recorded.linear_from

    @property
    def ratios(self) -> tuple[int, ...]:
        return self.book.ratios

    @property
    def token_order(self) -> Order:
        return self.book.header.order

    def blocks(self, preferred: Blocks) -> Blocks:  # noqa: ARG002
        """The book's own; a backend that has others coarsens the plan."""
        return self.book.header.blocks

    @property
    def mean_budget(self) -> float:
        return self.budget.mean

    def with_budget(self, mean: float) -> Cached:
        return replace(self, budget=Budget(mean))

    def for_rank(self, rank: int, ranks: int) -> Cached:
        return replace(self, rank=rank, ranks=ranks)

    def among_ranks(self, rank: int, ranks: int, total: Callable[[Tensor], Tensor]) -> Cached:
        return replace(self, rank=rank, ranks=ranks, sum_over_ranks=total)

    def plan(self, query: Query) -> BlockPlan:
        if query.causal:
            raise ValueError("a book holds no causal plans")
        self._check_fit(query.layout, query.site)
        if self.check is not None:
            self.check(query.site)
        part: slice | Tensor = self._heads(query.q.shape[1])
        if query.dealt is not None:
            part = query.dealt[part]
        return self.book.replayed(query, float(self.budget.mean), part, self.sum_over_ranks)

    def period(self, site: Site) -> int:
        return self.book.period(site)

    def _heads(self, heads: int) -> slice:
        """Where this rank's heads lie among all."""
        known = self.book.header.heads
        if heads * self.ranks != known:
            here = f"{heads} heads" + (f" on each of {self.ranks} ranks" if self.ranks > 1 else "")
            raise ValueError(f"the book has {known} heads, this call has {here}")
        return slice(self.rank * heads, (self.rank + 1) * heads)

    def _check_fit(self, layout: BlockLayout, site: Site) -> None:
        """Refuse another geometry or schedule, naming both values."""
        h = self.book.header
        if layout.q_grid != h.grid or layout.k_grid != h.grid:
            raise ValueError(
                f"the book is for the grid {h.grid}, this call has {layout.q_grid}; make one that "
                f"fits with {_hint('grid', layout.q_grid)}"
            )
        if site.steps != h.steps and not self.book.fits_any_steps:
            raise ValueError(
                f"the book is for {h.steps} steps, this run has {site.steps}; make one that fits "
                f"with {_hint('steps', site.steps)}"
            )
        if site.layers != h.layers:
            raise ValueError(
                f"the book is of {h.layers} layers, this transformer has {site.layers}"
            )
        if site.steps == h.steps and site.transformer != h.transformers[site.step]:
            raise ValueError(
                f"step {site.step} belongs to {h.transformers[site.step]} in the book and to "
                f"{site.transformer} here: the boundary between the experts is another one; "
                f"calibrate with this one"
            )


def _hint(name: str, value: object) -> str:
    option = f"--{name} {value}".replace("×", "x")
    return f"book.resample({name}=…) or: jali book resample BOOK {option} --output NEW"
