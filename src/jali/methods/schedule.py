"""When a method is active: a wrapper for any of them."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import ClassVar

from jali.methods.method import Method, Query
from jali.planning.curve import Curve
from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Order
from jali.value import check_count, check_share, check_steps


@dataclass(frozen=True)
class Schedule(Method):
    """`inner`, except in the first and last steps, the named layers, and short sequences.

    Args:
        inner: the method of the sparse calls.
        dense_steps, dense_last_steps: steps that stay dense, as a count (int) or as a share of all
            steps (float, rounded up).
        dense_layers: layers that stay dense; they may count from the end (−1).
        min_tokens: shorter sequences stay dense.
        budgets: budgets along the run, read by position, so the same tuple serves any number of
            steps; none is the method's own everywhere.
        curve: instead of those, budgets that make the whole run cost a total.

    Example:
        >>> Schedule(Entropy(Budget(0.4)), dense_steps=0.2, dense_layers=(0,))
        >>> Schedule(Entropy(), curve=Curve(0.4, "exponential"))
    """

    inner: Method
    dense_steps: int | float = 0
    dense_last_steps: int | float = 0
    dense_layers: tuple[int, ...] = ()
    min_tokens: int = 0
    budgets: tuple[float, ...] = ()
    curve: Curve | None = None

    name: ClassVar[str] = "schedule"

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Method):
            raise TypeError(f"Schedule wraps a method, got {self.inner!r}")
        for name in ("dense_steps", "dense_last_steps"):
            check_steps(name, getattr(self, name))
        check_count("min_tokens", self.min_tokens, least=0)
        for name in ("dense_layers", "budgets"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for layer in self.dense_layers:
            if isinstance(layer, bool) or not isinstance(layer, int):
                raise TypeError(f"dense_layers are ints (-1 is the last layer), got {layer!r}")
        for budget in self.budgets:
            check_share("every one of budgets", budget)
        if self.curve is not None and not isinstance(self.curve, Curve):
            raise TypeError(f"curve must be a Curve, as in Curve(0.4), got {self.curve!r}")
        if self.curve is not None and self.budgets:
            raise ValueError("give a Schedule budgets or a curve, not both")
        _ = self._by_budget  # a method that cannot have one of them says so now

    def active(self, site: Site, tokens: int) -> bool:
        return self.why_dense(site, tokens) is None

    def why_dense(self, site: Site, tokens: int) -> str | None:
        if tokens < self.min_tokens:
            return f"fewer than {self.min_tokens} tokens"
        if (why := self._why_always(site)) is not None:
            return why
        if self.curve is not None and self._curved(site)[site.step][site.layer] is None:
            return f"budget 1 in step {site.step}"
        return self.inner.why_dense(site, tokens)

    def _why_always(self, site: Site) -> str | None:
        """Why a call is dense whatever its budget."""
        if site.step < _count(self.dense_steps, site.steps):
            return "first steps"
        if site.step >= site.steps - _count(self.dense_last_steps, site.steps):
            return "last steps"
        if site.layer in self.dense_layers or site.layer - site.layers in self.dense_layers:
            return f"layer {site.layer}"
        return None

    def is_dense_throughout(self, steps: int) -> bool:
        """Whether not one of so many steps is sparse."""
        first, last = (_count(some, steps) for some in (self.dense_steps, self.dense_last_steps))
        inner = isinstance(self.inner, Schedule) and self.inner.is_dense_throughout(steps)
        return first + last >= steps or inner

    def at(self, site: Site) -> Method:
        inner = self.inner.at(site)
        if self.curve is not None:
            found = self._curved(site)[site.step][site.layer]
            return inner if found is None else found
        if not self.budgets:
            return inner
        at = site.step * len(self.budgets) // site.steps
        return self._by_budget[at] if inner is self.inner else inner.with_budget(self.budgets[at])

    @functools.cached_property
    def _by_budget(self) -> tuple[Method, ...]:
        """The method for each of the budgets: a model asks for the same ones in every layer."""
        return tuple(self.inner.with_budget(budget) for budget in self.budgets)

    def _curved(self, site: Site) -> tuple[tuple[Method | None, ...], ...]:
        """The method of every step and layer of a run like this one; None where it is dense."""
        key = site.steps, site.layers
        if key not in self._by_curve:
            assert self.curve is not None

            def dense(step: int, layer: int) -> bool:
                return self._why_always(Site(step, site.steps, layer, site.layers)) is not None

            table = self.curve.budgets(*key, dense)
            methods = {
                b: None if b >= 1 else self.inner.with_budget(b) for b in set(sum(table, ()))
            }
            self._by_curve[key] = tuple(tuple(methods[b] for b in row) for row in table)
        return self._by_curve[key]

    def check_total(self, steps: int) -> None:
        """Refuse a total that so many steps cannot have, as far as that is known without a model:
        dense layers are left out."""
        if self.curve is not None:
            bare = replace(self, dense_layers=(), curve=replace(self.curve, layers=()))
            bare._curved(Site(steps=steps))

    @functools.cached_property
    def _by_curve(self) -> dict[tuple[int, int], tuple[tuple[Method | None, ...], ...]]:
        return {}

    @property
    def base(self) -> Method:
        return self.inner.base

    @property
    def can_be_causal(self) -> bool:  # type: ignore[override]
        return self.inner.can_be_causal

    @property
    def ratios(self) -> tuple[int, ...]:
        return self.inner.ratios

    @property
    def tail(self) -> bool:
        return self.inner.tail

    @property
    def probes(self) -> int:
        return self.inner.probes

    @property
    def token_order(self) -> Order:
        return self.inner.token_order

    def blocks(self, preferred: Blocks) -> Blocks:
        return self.inner.blocks(preferred)

    def order_of(self, q_grid: TokenGrid, k_grid: TokenGrid | None) -> Order:
        return self.inner.order_of(q_grid, k_grid)

    def plan(self, query: Query) -> BlockPlan:
        return self.at(query.site).plan(query)

    def period(self, site: Site) -> int:
        return self.inner.period(site)

    @property
    def mean_budget(self) -> float | None:
        """Of the sparse calls; of a curve, as they are in a run of 50 steps and 30 layers."""
        if self.curve is not None:
            rows = self._curved(Site(steps=50, layers=len(self.curve.layers) or 30))
            found = [m.mean_budget for row in rows for m in row if m is not None]
            known = [budget for budget in found if budget is not None]
            return sum(known) / len(known) if known and len(known) == len(found) else None
        return sum(self.budgets) / len(self.budgets) if self.budgets else self.inner.mean_budget

    def with_budget(self, mean: float) -> Schedule:
        return replace(self, inner=self.inner.with_budget(mean), budgets=(), curve=None)

    @property
    def total(self) -> float | None:
        return None if self.curve is None else self.curve.total


def why_never_sparse(method: Method, steps: int) -> str | None:
    """What to know before a run of so many steps in which a schedule leaves none sparse; None where
    it leaves some."""
    if not isinstance(method, Schedule) or not method.is_dense_throughout(steps):
        return None
    kept = [
        f"the {which} {some:.0%}" if isinstance(some, float) else f"the {which} {some}"
        for which, some in (("first", method.dense_steps), ("last", method.dense_last_steps))
        if some
    ]
    return (
        f"nothing will be sparse: of {steps} steps the schedule keeps {' and '.join(kept)} dense; "
        f"take more steps, or fewer dense ones (warmup_frac=0.2, --warmup-frac 0.2)"
    )


def _count(steps: int | float, of: int) -> int:
    """A share is rounded up, but not by the last bit of a float."""
    return math.ceil(steps * of - 1e-9) if isinstance(steps, float) else steps
