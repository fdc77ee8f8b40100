"""The method of a run, from what was asked: a name or a preset, a budget, a schedule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from jali.integration.config import BUDGET, TOTAL, WARMUP
from jali.integration.models.preset import preset_for
from jali.methods import METHODS, Dense, Method, Schedule, make_method
from jali.planning.budget import Budget
from jali.planning.curve import Curve, check_shape, usual_shape
from jali.value import check_share, check_steps

# Options that say how much is read, as a budget or a total does.
AMOUNTS = ("budget", "price", "sparsity", "sparsity_ratio")


def chosen_method(
    asked: Any,
    budget: float | None,
    warmup: float | int | None,
    first_layer: bool | None,
    model: str | None,
    options: dict[str, Any],
    total: float | None = None,
    curve: str | tuple[float, ...] | None = None,
) -> Method:
    """The method of a run inside its schedule, as `apply_sparse_attention` would make it."""
    check_asked("mean_budget", budget, total, curve)
    if warmup is not None:
        check_steps("warmup_frac", warmup)
    by_name = isinstance(asked, str) and asked in METHODS
    if by_name:
        method = make_method(asked, **options)
        _check_amounts(options, budget, total)
        said = {*AMOUNTS, "mask_ratios"} & set(options)
        own = getattr(method, "budget", BUDGET) is None  # a threshold or a pattern of its own
        if budget is None and total is None and not (said or own or isinstance(method, Dense)):
            # Who names dense steps or layers wants those, and a budget for the rest.
            falls = method.falls and warmup is None and first_layer is None
            total, budget = (TOTAL, None) if falls else (None, BUDGET)
        warmup, first_layer = usual_schedule(warmup, first_layer, total, curve)
    else:
        asked = preset_for(asked, model) if isinstance(asked, str) else asked
        found = asked if isinstance(asked, Method) else getattr(asked, "method", None)
        if not isinstance(found, Method):
            raise TypeError(f"a method is a name, a Method or a preset, got {asked!r}")
        method = found
        if options:
            raise TypeError(f"{method} is complete; {sorted(options)} cannot be added to it")
    if budget is not None:
        method = method.with_budget(budget)
    if isinstance(method, Dense):
        if total is not None:
            raise ValueError(f"the method dense costs 1 of the work, not a total of {total:g}")
        return method
    method = with_schedule(method, warmup, first_layer)
    return method if total is None else with_total(method, total, curve)


def check_asked(
    name: str,
    budget: float | None,
    total: float | None,
    curve: str | tuple[float, ...] | None,
) -> None:
    """A budget by its name, or a total with its curve; not both."""
    if budget is not None:
        check_share(name, budget)
    if budget is not None and total is not None:
        raise ValueError(f"{name} and total ask for the same in two ways: give one of them")
    if curve is not None:
        check_shape("curve", curve)
    if curve is not None and total is None:
        raise ValueError(f"curve={curve!r} spreads a total along the run: give total= too")


def _check_amounts(options: dict[str, Any], budget: float | None, total: float | None) -> None:
    """No option may say what a budget or a total says beside it."""
    asked = {"mean_budget": budget, "total": total}
    other = next((f"{name}={value:g}" for name, value in asked.items() if value is not None), None)
    for name in AMOUNTS:
        value = options.get(name)
        bounds = isinstance(value, Budget) and value != Budget(value.mean)  # a floor is no amount
        if other is not None and value is not None and not bounds:
            raise ValueError(
                f"the option {name}={value!r} and {other} say in two ways how much is read: leave "
                f"one of them out"
            )


def usual_schedule(
    warmup: float | int | None,
    first_layer: bool | None,
    total: float | None,
    curve: str | tuple[float, ...] | None,
) -> tuple[float | int, bool]:
    """Dense first steps, and whether layer 0 is dense, where it is not said. A curve that falls
    brings its own."""
    graded = total is not None and curve != "flat"
    steps = 0 if graded else WARMUP
    return steps if warmup is None else warmup, not graded if first_layer is None else first_layer


def with_total(method: Method, total: float, curve: str | tuple[float, ...] | None) -> Method:
    """The method with budgets that make a whole run cost `total`; its own curve unless one is
    given, and one that falls where it has none."""
    own = method if isinstance(method, Schedule) else Schedule(method)
    known = own.curve or Curve(total, usual_shape(total, own.base.linear_from))
    made = replace(known, total=total, shape=known.shape if curve is None else curve)
    return replace(own, budgets=(), curve=made)


def with_schedule(method: Method, warmup: float | int | None, first_layer: bool | None) -> Method:
    """What is given explicitly wins over the method's own schedule."""
    if warmup is None and first_layer is None:
        return method
    own = method if isinstance(method, Schedule) else Schedule(method)
    if warmup is not None:
        # 1 as an int counts steps; 0 and 0.0 mean the same.
        own = replace(own, dense_steps=warmup)
    if first_layer is not None:
        others = tuple(layer for layer in own.dense_layers if layer != 0)
        own = replace(own, dense_layers=(0, *others) if first_layer else others)
    return own
