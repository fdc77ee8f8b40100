"""Control while running: the true error of a few rows steers the budgets of the steps to come.

A curve was found on some prompts; one unlike them may need more in the same place. In every sparse
call a few rows of each head are also computed densely, which says how far the output really is from
dense. Where a step was further off than such a step usually is, the next ones get more, and the
other way round, within bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from jali.methods import Method
from jali.planning.scoring import at_least_fp32
from jali.planning.site import Site
from jali.tokens.padding import KeyPadding
from jali.value import check_amount, check_count

LEAST = 0.01  # no budget becomes smaller


@dataclass(frozen=True)
class Steering:
    """How budgets follow the error of sampled rows. Off where nobody asks for it.

        run = apply_sparse_attention(pipe, recipe=recipe, steering=Steering())  # only measures
        pipe("a cat"); usual = run.run.errors()
        run = apply_sparse_attention(pipe, recipe=recipe, steering=Steering(usual))

    Args:
        errors: what is usual: the relative error of the attention's output along the run, for any
            number of steps, 0 where nothing is sparse; none only measures.
        gain: how much of a deviation is answered in a step: 1 multiplies budgets by as much as the
            error is too large.
        lowest, highest: bounds of the factor on all budgets.
        rows: of each head and call that are computed densely, too.
    """

    errors: tuple[float, ...] = ()
    gain: float = 0.5
    lowest: float = 0.7
    highest: float = 1.5
    rows: int = 32

    def __post_init__(self) -> None:
        object.__setattr__(self, "errors", tuple(map(float, self.errors)))
        for error in self.errors:
            check_amount("every one of errors", error)
        check_amount("gain", self.gain)
        check_count("rows", self.rows)
        if not 0 < self.lowest <= 1 <= self.highest < math.inf:
            raise ValueError(
                f"need 0 < lowest <= 1 <= highest, got {self.lowest!r} and {self.highest!r}"
            )

    def usual(self, step: int, steps: int) -> float:
        """The error that such a step has; 0 where none is known."""
        if not self.errors:
            return 0.0
        return self.errors[step * len(self.errors) // steps]

    def check(self, method: Method) -> None:
        """Refuse a method that has no budgets."""
        if self.errors and method.base.mean_budget is None and method.mean_budget is None:
            raise ValueError(f"steering moves budgets, and {method.base.name} has none")


class Steered:
    """The steering of one generation. Waits for the device once a step, for the step before it."""

    def __init__(self, asked: Steering) -> None:
        self.asked = asked
        self.restart()

    def restart(self) -> None:
        self.factor = 1.0
        self.factors: dict[int, float] = {}
        self._sums: dict[int, Tensor] = {}  # by step: of squared errors, and of squared outputs
        self._steps = 1
        self._methods: dict[int, tuple[Method, Method]] = {}

    def at(self, method: Method, site: Site) -> Method:
        """The method of a call with the budget that it has by now. The same for every layer."""
        if site.step not in self.factors:
            self._steer(site)
        if self.factor == 1 or method.mean_budget is None:
            return method
        known = self._methods.get(id(method))
        if known is None or known[0] is not method:
            share = min(1.0, max(LEAST, self.factor * method.mean_budget))
            known = self._methods[id(method)] = method, method.with_budget(share)
        return known[1]

    def _steer(self, site: Site) -> None:
        """Answer what the latest step showed."""
        before = max((step for step in self._sums if step < site.step), default=None)
        usual = 0.0 if before is None else self.asked.usual(before, site.steps)
        if before is not None and usual:
            found = self._error(before)
            if found > 0 and math.isfinite(found):
                asked = self.asked
                moved = self.factor * (found / usual) ** asked.gain
                self.factor = min(asked.highest, max(asked.lowest, moved))
        self._methods.clear()
        self.factors[site.step] = self.factor

    def see(
        self, site: Site, q: Tensor, k: Tensor, v: Tensor, scale: float | None,
        padding: KeyPadding | None, out: Tensor,
    ) -> None:  # fmt: skip
        """Compare some rows of a sparse call with dense ones. q, k, v, out [B, H, S, D]."""
        self._steps = site.steps
        rows = torch.linspace(
            0, q.shape[2] - 1, min(self.asked.rows, q.shape[2]), device=q.device
        ).long()
        share = q.shape[1] // k.shape[1]
        k, v = (at_least_fp32(x).repeat_interleave(share, dim=1) for x in (k, v))
        some = at_least_fp32(q.index_select(2, rows)) * (scale or q.shape[-1] ** -0.5)
        logits = some @ k.mT
        if padding is not None:
            logits.masked_fill_(~padding.valid(k.shape[2])[:, None, None], -torch.inf)
            v = padding.zeroed(v)
        exact = logits.softmax(-1) @ v
        wrong = at_least_fp32(out.index_select(2, rows)) - exact
        sums = torch.stack([wrong.square().sum(), exact.square().sum()])
        known = self._sums.get(site.step)
        self._sums[site.step] = sums if known is None else known + sums

    def words(self) -> str | None:
        """For a summary: how far budgets were moved."""
        if not self.asked.errors or not self.factors:
            return None
        low, high = min(self.factors.values()), max(self.factors.values())
        return f"budgets were multiplied by {low:.3g} to {high:.3g}, by the error of probe rows"

    def errors(self) -> tuple[float, ...]:
        """The relative error of every step, 0 where nothing was sparse. Waits for the device."""
        return tuple(self._error(step) for step in range(self._steps))

    def _error(self, step: int) -> float:
        if step not in self._sums:
            return 0.0
        wrong, all_of_it = self._sums[step].tolist()
        return float((wrong / all_of_it) ** 0.5) if all_of_it else 0.0
