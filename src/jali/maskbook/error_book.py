"""A book of rd: what reading a block less finely does to the output, in a few parts of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali.maskbook.book import Floats, MaskBook
from jali.maskbook.container import Bytes, FilePath
from jali.maskbook.header import MEAN, Errors
from jali.planning.distortion import ErrorTable
from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.planning.tradeoff import choose_plan
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import BlockLayout, Blocks
from jali.value import check_share

if TYPE_CHECKING:
    from jali.methods.method import Query
    from jali.planning.tradeoff import Sum


class ErrorBook(MaskBook):
    """The errors of every block pair and level, for one model and grid, in parts of a run.

    `calibrate(..., method="rd")` makes one. It is replayed as any book is, at any budget and for
    any number of steps: the levels that err least for the budget are chosen from the table of the
    part of the run that a step lies in. Nothing is scored, and q, k and v are not looked at.
    """

    @property
    def errors(self) -> Errors:
        assert self.header.errors is not None
        return self.header.errors

    @property
    def derives(self) -> bool:
        return True

    @property
    def fits_any_steps(self) -> bool:
        return True

    @property
    def ratios(self) -> tuple[int, ...]:
        return self.errors.ratios

    def place_of(self, site: Site) -> int:
        """Where the tables of a step lie: of its part of the run and its transformer, and where
        the transformer had no step in that part, of the nearest in which it had."""
        bucket = self.errors.bucket(site.step, site.steps)
        own = [(at, i) for i, (at, name) in enumerate(self._places) if name == site.transformer]
        if not own:
            known = ", ".join(dict.fromkeys(name for _, name in self._places))
            raise ValueError(f"the book is of {known}, and this step is of {site.transformer}")
        return min(own, key=lambda place: (abs(place[0] - bucket), place[0]))[1]

    def table(
        self, site: Site, device: torch.device | str = "cpu",
        heads: slice | Tensor = slice(None),
    ) -> ErrorTable:  # fmt: skip
        """The errors that a call is planned by, of all or some heads. [1, H, M, N, L]."""
        if isinstance(heads, Tensor):  # known there alone
            whole = self.table(site, device)
            return whole._replace(codes=whole.codes[:, heads], top=whole.top[:, heads])
        place, branch = self.place_of(site), self.branch_index(site.branch)
        (codes,) = self._read("errors", place, site.layer)
        top = self._tables["tops"][place, site.layer, branch, heads]
        return self._table(codes[None, branch, heads], top[None], device)

    def slab(self, step: int, layer: int) -> Tensor:
        """The errors of a part of the run. fp32 [branches, H, M, N, L] on the host."""
        return self._branches(step, layer).errors()

    def _branches(self, place: int, layer: int) -> ErrorTable:
        """All of them, each as a sample."""
        (codes,) = self._read("errors", place, layer)
        return self._table(codes, self._tables["tops"][place, layer], "cpu")

    def _table(
        self, codes: NDArray[Any], top: NDArray[Any], device: torch.device | str
    ) -> ErrorTable:
        codes_there, top_there = (_to_device(x, device) for x in (codes, top))
        return ErrorTable(codes_there, top_there, self.errors.levels)

    def plan(
        self, budget: float, step: int, layer: int, branch: str = MEAN,
        device: torch.device | str = "cpu",
    ) -> BlockPlan:  # fmt: skip
        """The plan of one layer in one step of a run like the recorded one."""
        self._check_place(step, layer)
        site = Site(step, self.steps, layer, self.layers, branch, self.header.transformers[step])
        return self._plan(self.table(site, device), self.layout(device), budget)

    def replayed(
        self, query: Query, budget: float, heads: slice | Tensor,
        sum_over_ranks: Sum | None = None,
    ) -> BlockPlan:  # fmt: skip
        """The plan of a call that the book fits, for some of its heads; tables stay on the device
        as long as their part of the run goes on."""
        layout, tables = query.layout, query.tables
        own = self.branch_index(query.site.branch)
        site = replace(query.site, branch=self.header.branches[own])
        place, table = self.place_of(site), None
        if tables is not None:  # one serves all samples
            table = tables.find(site, place, layout, query.q[:1], ErrorTable, self.errors.levels)
        if table is None:
            table = self.table(site, query.q.device, heads)
            if tables is not None:
                tables.keep(site, place, layout, table)
        if query.padding is not None:  # samples with other keys have prices of their own
            B = query.q.shape[0]
            codes, top = table.codes.expand(B, -1, -1, -1, -1), table.top.expand(B, -1)
            table = table._replace(codes=codes, top=top)
        return choose_plan(
            table, layout, self.ratios, budget, None, query.padding, sum_over_ranks
        )  # fmt: skip

    def period(self, site: Site) -> int:
        """The part of the run that a step lies in."""
        return self.place_of(site)

    def _plan(self, table: ErrorTable, layout: BlockLayout, budget: float) -> BlockPlan:
        check_share("budget", budget)
        return choose_plan(table, layout, self.ratios, budget)

    def costs(self, budget: float) -> Floats:
        """The achieved cost of every head in a run like the recorded one.
        fp32 [steps, layers, branches, H]."""
        if budget not in self._costs:
            layout, h = self.layout(), self.header
            found = np.empty((*h.outer, *h.slab[:2]), dtype=np.float32)
            for place, layer in np.ndindex(h.outer):
                table = self._branches(place, layer)
                found[place, layer] = self._plan(table, layout, budget).costs.numpy()
            steps = enumerate(h.transformers)
            at = [self._places.index((self.errors.bucket(s, self.steps), n)) for s, n in steps]
            self._costs[budget] = found[at]
        return self._costs[budget]

    def step_costs(self, budget: float, step: int) -> Floats:
        return np.asarray(self.costs(budget)[step])

    # What other books have

    def derive(
        self,
        budget: float,
        device: torch.device | str = "cpu",  # noqa: ARG002
        steps: Iterable[int] | None = None,  # noqa: ARG002
    ) -> None:
        """Any budget is ready."""
        check_share("budget", budget)

    def bits(self, budget: float, step: int) -> Bytes:  # noqa: ARG002
        self.need_importance("it has no bits")
        raise AssertionError

    def resample(
        self,
        grid: TokenGrid | Sequence[int] | None = None,
        steps: int | Sequence[float] | None = None,
        *,
        blocks: Blocks | None = None,
        output: FilePath | None = None,  # noqa: ARG002
        device: torch.device | str = "cpu",  # noqa: ARG002
    ) -> MaskBook:
        """Refused: it serves any number of steps as it is, and errors cannot be re-binned."""
        if steps is not None and grid is None and blocks is None:
            raise ValueError(f"{self._name} is a book of rd, which serves any number of steps")
        raise ValueError(
            f"{self._name} is a book of rd: what blocks lose does not add up to what other blocks "
            f"lose, so it cannot be resampled; calibrate at that size"
        )

    def need_importance(self, then: str) -> None:
        raise ValueError(
            f"{self._name} is a book of rd, which holds errors and no importance, so {then}"
        )

    def __repr__(self) -> str:
        h = self.header
        return (
            f"<ErrorBook {h.model or ''} {h.grid}, {len(self._places)} parts of a run × {h.layers} "
            f"layers × {h.heads} heads, blocks {h.blocks}, levels "
            f"{', '.join(map(str, self.errors.levels))}>"
        )

    @property
    def _places(self) -> tuple[tuple[int, str], ...]:
        return self.header.places

    def _check_numbers(self, name: str, parts: list[NDArray[Any]], place: str) -> None:
        """Every byte is an error; how large they are is checked when a book is opened."""


def _to_device(array: NDArray[Any], device: torch.device | str) -> Tensor:
    """Without waiting for the device: what lies in pinned memory is copied in its time."""
    host = torch.from_numpy(np.array(array))
    if torch.device(device).type != "cuda":
        return host.to(device)
    return host.pin_memory().to(device, non_blocking=True)
