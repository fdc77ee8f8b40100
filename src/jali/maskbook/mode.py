"""A pipeline that replays a book."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from jali.integration.choice import check_asked, usual_schedule, with_schedule
from jali.integration.config import BUDGET
from jali.integration.fingerprint import check_same_model
from jali.integration.modes import Handle, sparse_processor_mode, transformers_of
from jali.maskbook import MaskBook
from jali.maskbook.cached import Cached
from jali.maskbook.curve import BookCurve
from jali.maskbook.noise import noise_levels
from jali.maskbook.resample import schedule_like
from jali.methods import Schedule
from jali.planning.budget import Budget
from jali.planning.curve import Curve, usual_shape
from jali.planning.site import Site

log = logging.getLogger("jali")

# Sigmas of one schedule in two precisions; another flow shift is off by far more.
CLOSE = 0.02


@contextlib.contextmanager
def cached_processor_mode(
    pipe: Any,
    book: MaskBook | str | os.PathLike[str],
    budget: float | None = None,
    backend: str = "auto",
    warmup_frac: float | int | None = None,
    dense_first_layer: bool | None = None,
    steps: int | None = None,
    when: str = "always",
    finite: str = "raise",
    other_weights: bool = False,
    total: float | None = None,
    curve: str | tuple[float, ...] | Curve | None = None,
    probes: int = 0,
) -> Iterator[Handle]:
    """A block in which a pipeline replays a book: no scoring, no look at q and k.

    Args:
        pipe: a diffusers pipeline, or a transformer.
        book: a MaskBook, or its file.
        budget: the asked share of the work in 0..1, 0.5 if nothing is asked; one that the book
            does not hold is derived from its importance here, before anything runs.
        backend, steps, when, finite: as in `sparse_processor_mode`.
        warmup_frac: the first steps that stay dense, as a share (0.2, or none with a total whose
            curve falls), or as a count where it is an int.
        dense_first_layer: whether layer 0 stays dense; it does but with such a total.
        other_weights: accept a fine-tuned model of the book's architecture.
        total, curve: instead of a budget, as in `sparse_processor_mode`. A book without importance
            comes as near to the total as its budgets allow, and never above; the summary says so.
            A `Curve`, as a recipe has one, says both.
        probes: rows that are computed densely too, and correct all others.

    Yields:
        The handle of `sparse_processor_mode`.

    Raises:
        ValueError: the book is of another model, grid, layout or schedule; both values are named.
            A total that its budgets cannot make, naming them.
        BookError: the file is no book, or damaged.

    Example:
        >>> with cached_processor_mode(pipe, "wan.safetensors", budget=0.5):  # doctest: +SKIP
        ...     video = pipe("a cat", num_inference_steps=50)
    """
    check_asked("budget", budget, *_told(total, curve))
    opened = book if isinstance(book, MaskBook) else MaskBook.open(book)
    owner, transformers = transformers_of(pipe)
    check_model(opened, dict(transformers), other_weights)
    levels = None if owner is None else _noise_check(opened, weakref.ref(owner))
    method = book_method(
        opened, budget, total, curve, warmup_frac, dense_first_layer, levels, probes
    )
    try:
        with sparse_processor_mode(
            pipe,
            method=method,
            backend=backend,
            steps=opened.steps if owner is None and steps is None else steps,
            when=when,
            finite=finite,
        ) as handle:
            get_ready(opened, method, device_of(transformers[0][1]))
            if method.total is not None and opened.budgets and not opened.header.importance:
                handle.run.notes = (_what_it_gives(opened, method),)
            yield handle
    finally:
        opened.close()


def check_model(
    book: MaskBook, transformers: dict[str, nn.Module], other_weights: bool = False
) -> None:
    """Refuse a book of another model, naming both."""
    remedy = "Calibrate for these, or pass other_weights=True to replay it all the same"
    h = book.header
    check_same_model(
        "book", h.fingerprints, transformers, h.model, None if other_weights else remedy
    )


def book_method(
    book: MaskBook,
    budget: float | None,
    total: float | None,
    curve: str | tuple[float, ...] | Curve | None,
    warmup: float | int | None,
    first_layer: bool | None,
    check: Callable[[Site], None] | None = None,
    probes: int = 0,
) -> Schedule:
    """What replays a book at a budget or a total, inside the usual schedule."""
    whole = curve if isinstance(curve, Curve) else None
    total, curve = _told(total, curve)
    check_asked("budget", budget, total, curve)
    share = budget
    if share is None:  # of a curve the budgets follow; any that the book has will do
        share = BUDGET if total is None or not book.budgets else book.budgets[0]
    schedule = with_schedule(
        Cached(book, Budget(float(share)), check=check, probes=probes),
        *usual_schedule(warmup, first_layer, total, curve),
    )
    assert isinstance(schedule, Schedule)
    if total is None:
        return schedule
    shape = usual_shape(total, schedule.base.linear_from) if curve is None else curve
    made = whole or Curve(total, shape)
    if not book.derives:
        made = BookCurve(made.total, made.shape, made.floor, made.layers, book=book)
    schedule = replace(schedule, curve=made)
    if not book.fits_any_steps:
        schedule.check_total(book.steps)
    return schedule


def _told(
    total: float | None, curve: str | tuple[float, ...] | Curve | None
) -> tuple[float | None, str | tuple[float, ...] | None]:
    """The total and the shape, also where a whole curve has both."""
    if not isinstance(curve, Curve):
        return total, curve
    if total is not None:
        raise ValueError(f"total={total!r} and a Curve are two totals: leave one of them out")
    return curve.total, curve.shape


def get_ready(book: MaskBook, method: Schedule, device: torch.device) -> None:
    """Prepare a book for a run of its own steps, before anything of it runs."""
    if not book.fits_any_steps:  # else a table is read where it is first needed
        book.get_ready(_asked(book, method), device)


def _asked(book: MaskBook, method: Schedule) -> list[tuple[int, int, float]]:
    """(step, layer, budget) of every sparse call of a run, by step and layer."""
    found = []
    for step, layer in np.ndindex(book.steps, book.layers):
        site = Site(step, book.steps, layer, book.layers)
        if method.active(site, book.grid.tokens):
            own = method.at(site)
            assert isinstance(own, Cached)
            found.append((step, layer, float(own.budget.mean)))
    return found


def _what_it_gives(book: MaskBook, method: Schedule) -> str:
    asked = _asked(book, method)
    sparse = sum(float(book.step_costs(b, step)[layer].mean()) for step, layer, b in asked)
    calls = book.steps * book.layers
    ready = ", ".join(f"{budget:g}" for budget in book.budgets)
    return (
        f"of a total of {method.total:g} the book, which holds the budgets {ready}, gives "
        f"{(sparse + calls - len(asked)) / calls:.3f}"
    )


def _noise_check(book: MaskBook, pipe: weakref.ReferenceType[Any]) -> Callable[[Site], None]:
    """Compare the scheduler's noise levels with the book's, once for every list of timesteps."""
    h = book.header
    compared: list[Any] = []

    def check(site: Site) -> None:
        scheduler = getattr(pipe(), "scheduler", None)
        timesteps = getattr(scheduler, "timesteps", None)
        if compared and compared[0] is timesteps:
            return
        kind, levels = noise_levels(scheduler, site.steps) or ("", ())
        seen = site.steps == h.steps and not h.noise_assumed
        own = h.noise if site.steps == h.steps else schedule_like(h.noise, site.steps)
        off = np.abs(np.subtract(levels, own)) if kind == h.noise_kind else np.zeros(1)
        apart = ~(off <= CLOSE * (np.abs(own).max() or 1.0))  # NaN is apart too
        if apart.any():
            step = int(apart.argmax())
            fits = "calibrate with this one"
            if h.errors is None:
                levels_here = f"[the {site.steps} levels of this run]"
                fits = f"make a book that fits with book.resample(steps={levels_here})"
            text = (
                f"step {step} of the book is at noise level {own[step]:.4g} ({kind}), here at "
                f"{levels[step]:.4g}: the schedule is another one (its flow shift?); {fits}"
            )
            if seen:
                raise ValueError(text)
            log.warning("jali: %s", text)
        compared[:] = [timesteps]

    return check


def device_of(module: nn.Module) -> torch.device:
    """Where the module computes: its hooks move weights there when it is offloaded."""
    hook = getattr(module, "_hf_hook", None)
    device = getattr(hook, "execution_device", None)
    if device is not None:
        return torch.device(device if not isinstance(device, int) else f"cuda:{device}")
    return next(module.parameters()).device
