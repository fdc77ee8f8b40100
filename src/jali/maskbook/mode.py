"""A pipeline that replays a book."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn

from jali.integration.choice import with_schedule
from jali.integration.config import BUDGET, WARMUP
from jali.integration.modes import Handle, sparse_processor_mode, transformers_of
from jali.maskbook import MaskBook
from jali.maskbook.cached import Cached
from jali.maskbook.fingerprint import Fingerprint
from jali.maskbook.noise import noise_levels
from jali.methods import Method
from jali.planning.budget import Budget
from jali.planning.site import Site
from jali.value import check_share

log = logging.getLogger("jali")

# Sigmas of one schedule in two precisions; another flow shift is off by far more.
CLOSE = 0.02


@contextlib.contextmanager
def cached_processor_mode(
    pipe: Any,
    book: MaskBook | str | os.PathLike[str],
    budget: float = BUDGET,
    backend: str = "auto",
    warmup_frac: float | int = WARMUP,
    dense_first_layer: bool = True,
    steps: int | None = None,
    when: str = "always",
    finite: str = "raise",
    other_weights: bool = False,
) -> Iterator[Handle]:
    """A block in which a pipeline replays the plans of a book: no scoring, no selection.

    Args:
        pipe: a diffusers pipeline, or a transformer.
        book: a MaskBook, or its file.
        budget: the asked share of the work in 0..1; one that the book does not hold is derived
            from its importance here, before anything runs.
        backend, steps, when, finite: as in `sparse_processor_mode`.
        warmup_frac: the first steps that stay dense, as a share, or as a count where it is an int.
        dense_first_layer: whether layer 0 stays dense.
        other_weights: accept a fine-tuned model of the book's architecture.

    Yields:
        The handle of `sparse_processor_mode`.

    Raises:
        ValueError: the book is of another model, grid, layout or schedule; both values are named.
        BookError: the file is no book, or damaged.

    Example:
        >>> with cached_processor_mode(pipe, "wan.safetensors", budget=0.5):  # doctest: +SKIP
        ...     video = pipe("a cat", num_inference_steps=50)
    """
    check_share("budget", budget)
    opened = book if isinstance(book, MaskBook) else MaskBook.open(book)
    owner, transformers = transformers_of(pipe)
    check_model(opened, dict(transformers), other_weights)
    levels = None if owner is None else _noise_check(opened, weakref.ref(owner))
    method = with_schedule(
        Cached(opened, Budget(float(budget)), check=levels), warmup_frac, dense_first_layer
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
            fetch_first_step(opened, float(budget), method, device_of(transformers[0][1]))
            yield handle
    finally:
        opened.close()


def check_model(
    book: MaskBook, transformers: dict[str, nn.Module], other_weights: bool = False
) -> None:
    """Refuse a book of another model, naming both."""
    known = book.header.fingerprints
    missing = sorted(set(known) - set(transformers))
    if missing:
        raise ValueError(
            f"the book is of {', '.join(known)}, this pipeline has {', '.join(transformers)}"
        )
    for name, recorded in known.items():
        here = Fingerprint.of(transformers[name])
        if problem := recorded.other_model(here):
            of = f" ({book.header.model})" if book.header.model else ""
            raise ValueError(f"this is another model than the book's{of}: {problem}")
        if not other_weights and (problem := recorded.other_weights(here)):
            raise ValueError(
                f"the weights of {name} are not those the book was made with: {problem}. Calibrate "
                f"for these, or pass other_weights=True to replay it all the same"
            )


def fetch_first_step(book: MaskBook, budget: float, method: Method, device: torch.device) -> None:
    """Derive the budget where it was not asked for, and send for the first step's bits."""
    book.derive(budget, device)
    for step, layer in np.ndindex(book.steps, book.layers):
        if method.active(Site(step, book.steps, layer, book.layers), book.grid.tokens):
            book.replay(device).prefetch(budget, step)
            return


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
        off = np.abs(np.subtract(levels, h.noise)) if kind == h.noise_kind else np.zeros(1)
        apart = ~(off <= CLOSE * (np.abs(h.noise).max() or 1.0))  # NaN is apart too
        if apart.any():
            step = int(apart.argmax())
            text = (
                f"step {step} of the book is at noise level {h.noise[step]:.4g} ({kind}), here at "
                f"{levels[step]:.4g}: the schedule is another one (its flow shift?); make a book "
                f"that fits with book.resample(steps=[the {site.steps} levels of this run])"
            )
            if not h.noise_assumed:
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
