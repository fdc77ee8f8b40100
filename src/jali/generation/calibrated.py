"""Runs that replay a calibrated MaskBook."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from jali.error import ArgumentError
from jali.maskbook import MaskBook
from jali.maskbook.cached import Cached
from jali.maskbook.mode import book_method, cached_processor_mode
from jali.methods import Method, Schedule
from jali.planning.curve import Curve

if TYPE_CHECKING:
    from jali.generation.settings import Settings
    from jali.integration.modes import Handle
    from jali.integration.recipe import Recipe


def cached_method(settings: Settings) -> Method:
    """The book of the settings inside the usual schedule, as `cached_processor_mode` makes it."""
    book = MaskBook.open(str(settings.masks))
    if settings.steps not in (None, book.steps) and not book.fits_any_steps:
        raise ArgumentError(
            "steps",
            f": the book {settings.masks} is for {book.steps} steps, and {settings.steps} are "
            f"asked for; make one that fits: jali book resample {settings.masks} --steps "
            f"{settings.steps}",
        )
    recipe = settings.find_recipe()
    if recipe is not None:
        curve = curve_for_book(recipe, book, settings)
        return book_method(book, None, None, curve, None, None, probes=recipe.method.probes)
    names = ("warmup_frac", "dense_first_layer")
    return book_method(
        book, settings.budget, settings.total, settings.curve_shape,
        *settings.pick(*names).values(), **settings.options,
    )  # fmt: skip


def curve_for_book(recipe: Recipe, book: MaskBook, settings: Settings) -> Curve:
    """The curve along which a book is replayed; refused where it is a book of another method."""
    holds = "entropy" if book.header.errors is None else "rd"
    if recipe.curve is None or recipe.method.name != holds:
        raise ArgumentError(
            "masks",
            f": {settings.masks} is a book of {holds}, and the recipe {settings.recipe} is of "
            f"{recipe.method.name}; jali calibrate --recipe makes one where it is entropy or rd",
        )
    return recipe.curve


def steps_of(method: Method) -> int | None:
    """The steps that the method's book is for; None where it serves any number."""
    assert isinstance(method, Schedule)
    assert isinstance(method.inner, Cached)
    book = method.inner.book
    return None if book.fits_any_steps else book.steps


def describe_method(method: Method) -> dict[str, Any]:
    """The method in full; the book by its digest, so that another book in its file is noticed."""
    assert isinstance(method, Schedule)
    cached = method.inner
    assert isinstance(cached, Cached)
    names = [f.name for f in dataclasses.fields(method) if f.name != "inner"]
    schedule = {name: getattr(method, name) for name in names}
    if method.curve is not None:
        known = dataclasses.fields(Curve)  # whichever budgets a book makes of it
        schedule["curve"] = {f.name: getattr(method.curve, f.name) for f in known}
    budget = cached.budget.mean if method.curve is None else None
    options = {"book": cached.book.digest, "budget": budget}
    if cached.probes:  # what was written before there were any stays as it is
        options["probes"] = cached.probes
    return {"method": cached.name, "options": options, "schedule": schedule}


def replay_book(pipe: Any, settings: Settings) -> AbstractContextManager[Handle]:
    """A block in which a pipeline replays the book of resolved settings."""
    recipe = settings.find_recipe()
    if recipe is not None:
        book = MaskBook.open(str(settings.masks))
        curve = curve_for_book(recipe, book, settings)
        return cached_processor_mode(
            pipe, book, curve=curve, backend=settings.backend, probes=recipe.method.probes
        )
    names = ("budget", "backend", "warmup_frac", "dense_first_layer", "total")
    return cached_processor_mode(
        pipe, str(settings.masks), curve=settings.curve_shape, **settings.pick(*names),
        **settings.options,
    )  # fmt: skip
