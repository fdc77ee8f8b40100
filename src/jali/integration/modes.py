"""One call makes a pipeline sparse; leaving it brings everything back."""

from __future__ import annotations

import contextlib
import logging
import os
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from jali.backends import check_name
from jali.integration.attachment import Attachment, attach, self_attentions, unwrapped, user_backend
from jali.integration.choice import chosen_method
from jali.integration.clock import Clock
from jali.integration.models.preset import check_preset, preset_for
from jali.integration.models.size import video_scale_of
from jali.integration.recipe import Recipe, check_alone
from jali.integration.run import Run
from jali.integration.stats import Stats
from jali.integration.steering import Steered, Steering
from jali.methods import METHODS, Method, Schedule
from jali.name import USUAL, is_recipe_file
from jali.presets import Preset
from jali.value import check_choice, check_count

log = logging.getLogger("jali")

WHEN = ("always", "auto")
FINITE = ("raise", "warn", "off")
UNKNOWN_MASKS = ("raise", "dense")


class Handle:
    """Sparse attention on a pipeline, until `remove()`."""

    def __init__(self, run: Run, attachments: list[Attachment]) -> None:
        self.run = run
        self._attachments = attachments

    @property
    def method(self) -> Method:
        return self.run.method

    @property
    def active(self) -> bool:
        """Whether it is still on."""
        return bool(self._attachments)

    def stats(self) -> Stats:
        """The latest generation: asked budget, achieved cost, a row for every attention call."""
        return self.run.stats()

    def summary(self) -> str:
        """The latest generation in one line."""
        return self.run.summary()

    def remove(self) -> None:
        """Bring back processors, hooks and backends. Once more does nothing."""
        while self._attachments:
            self._attachments.pop().detach()

    def __repr__(self) -> str:
        state = "on" if self.active else "removed"
        return f"<sparse attention {state}: {self.run.method}>"


def apply_sparse_attention(
    target: Any,
    method: str | Method | Any = None,
    *,
    mean_budget: float | None = None,
    backend: str = "auto",
    warmup_frac: float | int | None = None,
    dense_first_layer: bool | None = None,
    steps: int | None = None,
    when: str = "always",
    finite: str = "raise",
    unknown_masks: str = "raise",
    model: str | None = None,
    total: float | None = None,
    curve: str | tuple[float, ...] | None = None,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    steering: Steering | None = None,
    **options: Any,
) -> Handle:
    """Make the self-attention of a pipeline, or of a bare transformer, sparse until `.remove()`.

    Args:
        target: a diffusers pipeline, or its transformer.
        method: a method's name (`options` are its own), a `Method`, a preset's name or a `Preset`;
            a recipe's file, where it ends in .yaml. None is `rd`.
        mean_budget: asked share of the work of sparse calls. Without it and without a `total`, a
            method by name has a total of 0.5, unless it has a threshold or pattern of its own; psa,
            and whoever names dense steps or a layer, a budget of 0.5.
        backend: "auto", or a name, which never falls back.
        warmup_frac: dense first steps, a share (float) or a count (int); 0.2 for a method by name
            and with a budget. A `Method` or preset brings its own schedule, unless this is given.
        dense_first_layer: whether layer 0 stays dense; True for a method by name with a budget.
        steps: how many there will be, for a bare transformer with a share of dense steps.
        when: "always", or "auto": calls that would not get faster stay dense.
        finite: "raise", "warn" or "off", when the output is not finite.
        unknown_masks: a mask that hides other things than keys cannot be kept by a plan: "raise"
            before the first step is done, or "dense" for such calls.
        total: instead of a budget, the share of *all* attention work of a run, dense steps and
            layers included. Budgets then fall along the run.
        curve: how they do: "exponential" (the default for rd, and for others below a total of 0.55)
            or "linear" (for those from there on), from dense in the first step; "flat" is one
            budget after the dense first steps and layer; or a tuple of relative budgets along the
            run.
        recipe: instead of a method with its budget or total, a `Recipe` or its file, as `tune`
            makes them, or "nano", which comes with one. Another model is refused; another size or
            number of steps is warned of.
        model: the model of a preset that differs between models, where the pipeline is none of
            the registry's.
        steering: a `jali.integration.steering.Steering`, by which a few rows of each head are
            computed densely, too, and budgets follow their error; off where it is None.

    Returns:
        A `Handle`: `.stats()`, `.summary()`, `.remove()`.

    Raises:
        ValueError, TypeError: a value, model or processor that cannot be made sparse, by name,
            before anything is changed.

    Example:
        >>> handle = apply_sparse_attention(pipe, "psa", mean_budget=0.3)
        >>> pipe("a cat"); print(handle.summary()); handle.remove()
    """
    check_name(backend)
    check_choice("when", when, WHEN)
    check_choice("finite", finite, FINITE)
    check_choice("unknown_masks", unknown_masks, UNKNOWN_MASKS)
    if steps is not None:
        check_count("steps", steps)
    pipe, transformers = transformers_of(target)
    layers = [self_attentions(module) for _, module in transformers]  # refused before any change
    if recipe is None and is_recipe_file(method):
        method, recipe = None, method
    if recipe is not None:
        check_alone(
            method=method, mean_budget=mean_budget, total=total, curve=curve,
            warmup_frac=warmup_frac, dense_first_layer=dense_first_layer, **options,
        )  # fmt: skip
        recipe = recipe if isinstance(recipe, Recipe) else Recipe.read(recipe)
        recipe.check_model(dict(transformers))
        method = recipe.scheduled
    method = USUAL if method is None else method
    if isinstance(method, str) and method not in METHODS:
        method = preset_for(method, model, pipe, transformers)
    chosen = chosen_method(
        method, mean_budget, warmup_frac, dense_first_layer, model, options, total, curve
    )
    if steering is not None:
        if not isinstance(steering, Steering):
            raise TypeError(f"steering is a Steering, as in Steering(), got {steering!r}")
        steering.check(chosen)
    preset = method if isinstance(method, Preset) else None
    if preset is not None:
        check_preset(preset, pipe, transformers)
    if pipe is None and steps is None and _needs_steps(chosen):
        raise ValueError(
            "a bare transformer does not say how many steps there will be: give steps=, or "
            "warmup_frac=0 (or a count, as in warmup_frac=5)"
        )
    clock = Clock(None if pipe is None else weakref.ref(pipe), steps)
    run = Run(chosen, backend, when, finite, clock, preset=preset, unknown_masks=unknown_masks)
    run.steered = None if steering is None else Steered(steering)
    if recipe is not None:
        run.recipe = recipe
        run.recipe_box = recipe.run.box(video_scale_of(pipe, transformers[0][1]))
    handle = Handle(run, [])
    try:
        for (name, module), found in zip(transformers, layers, strict=True):
            run.dense_backend = run.dense_backend or user_backend(found)
            handle._attachments.append(attach(module, name, found, run))
    except BaseException:
        handle.remove()
        raise
    return handle


@contextlib.contextmanager
def sparse_processor_mode(
    pipe: Any,
    mean_budget: float | None = None,
    method: str | Method | None = None,
    backend: str = "auto",
    preset: Any = None,
    warmup_frac: float | int | None = None,
    dense_first_layer: bool | None = None,
    steps: int | None = None,
    when: str = "always",
    finite: str = "raise",
    unknown_masks: str = "raise",
    model: str | None = None,
    total: float | None = None,
    curve: str | tuple[float, ...] | None = None,
    recipe: Recipe | str | os.PathLike[str] | None = None,
    steering: Steering | None = None,
    **options: Any,
) -> Iterator[Handle]:
    """A block in which a pipeline is sparse.

    Left in any way, it restores processors, hooks and backends, and logs one line: asked budget,
    achieved cost, predicted and measured speed-up, and why anything stayed dense.

    Args:
        pipe: a diffusers pipeline, or a transformer.
        mean_budget: asked share of the work of sparse calls; or
        total: of all attention work of the run, spread along it by a `curve`.
        method: a method's name or a `Method`, None is `rd`; or else
        preset: a preset's name or a `Preset`.
        recipe: or a `Recipe` or its file, which has all of these.
        options: these and all other arguments are those of `apply_sparse_attention`, which also
            says what is raised.

    Example:
        >>> with sparse_processor_mode(pipe, mean_budget=0.3) as run:
        ...     video = pipe("a cat").frames
        >>> print(run.summary())
    """
    if preset is not None and method is not None:
        raise ValueError("give method= or preset=, not both: a preset names its method")
    if preset is not None and recipe is not None:
        check_alone(preset=preset)
    handle = apply_sparse_attention(
        pipe, method if preset is None else preset, mean_budget=mean_budget, backend=backend,
        warmup_frac=warmup_frac, dense_first_layer=dense_first_layer, steps=steps, when=when,
        finite=finite, unknown_masks=unknown_masks, model=model, total=total, curve=curve,
        recipe=recipe, steering=steering, **options,
    )  # fmt: skip
    try:
        yield handle
        handle.run.finish()  # a bare transformer announces no end
    finally:
        handle.remove()


def make_step_callback(state: Any = None) -> Callable[..., dict[str, Any]]:  # noqa: ARG001
    """A `callback_on_step_end` that does nothing: the step comes from the pipeline by itself.

    For code written against ESA, where a callback had to count.
    """

    def callback(pipe: Any, step: int, timestep: Any, kwargs: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG001
        return kwargs

    return callback


_make_step_callback = make_step_callback  # as ESA spells it


def transformers_of(target: Any) -> tuple[Any, list[tuple[str, nn.Module]]]:
    """(pipeline or None, its transformers by name): both experts where there are two."""
    if isinstance(target, nn.Module):
        return None, [("transformer", unwrapped(target))]
    names = ("transformer", "transformer_2")
    found = [(name, unwrapped(getattr(target, name, None))) for name in names]
    found = [(name, module) for name, module in found if isinstance(module, nn.Module)]
    if not found:
        unet = ", which has a unet and no transformer" if hasattr(target, "unet") else ""
        raise TypeError(
            f"expected a diffusers pipeline with a transformer, or a transformer, got "
            f"{type(target).__name__}{unet}"
        )
    return target, found


def _needs_steps(method: Method) -> bool:
    """Whether a schedule depends on how many steps there are."""
    if not isinstance(method, Schedule):
        return False
    shares = (method.dense_steps, method.dense_last_steps)
    return (
        any(isinstance(share, float) and share > 0 for share in shares)
        or bool(method.dense_last_steps)
        or bool(method.budgets)
        or method.curve is not None
        or _needs_steps(method.inner)
    )
