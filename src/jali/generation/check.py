"""What can be told of settings before torch is loaded: names, files, sizes, contradictions."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import TYPE_CHECKING

from jali.device import check_device, may_have_gpu
from jali.error import ArgumentError
from jali.integration.models.checkpoint import HUB_ID, check_offload
from jali.integration.models.compilation import check_compile
from jali.integration.models.lora import lora_source
from jali.integration.models.registry import model_card
from jali.integration.models.size import check_size, usual_strides
from jali.name import (
    DTYPES,
    NO_RECIPE,
    ON_ANY_DEVICE,
    backend_names,
    method_names,
    preset_names,
    recipe_file,
)
from jali.value import suggest

if TYPE_CHECKING:
    from jali.generation.settings import Settings

# What every generation hands to its pipeline by itself.
TAKEN = (
    "self", "pipe", "prompt", "model_name", "seed", "generator", "height", "width", "num_frames",
    "steps", "guidance", "negative_prompt", "output_type", "callback_on_step_end", "arguments",
)  # fmt: skip


def check_settings(settings: Settings) -> None:
    """Refuse what no machine could do, and what this one cannot, with an `ArgumentError`."""
    card = model_card(settings.model)
    check_attention(settings)
    _check_place(settings)
    for name in ("path", "lora"):
        _check_weights(name, getattr(settings, name))
    if settings.path is None:  # another checkpoint may have strides of its own
        check_size(
            usual_strides(card),
            settings.height or card.height,
            settings.width or card.width,
            settings.num_frames or card.frames,
            card,
        )
    if settings.negative_prompt and card.guidance.kind == "embedded" and not settings.arguments:
        raise ArgumentError(
            "negative_prompt", f"has no effect on {card.name}, whose guidance is built in"
        )


def check_attention(settings: Settings) -> None:
    """The method by its names, its files, and what does not go together."""
    method, preset, backend = settings.method, settings.preset, settings.backend
    card = model_card(settings.model)
    known = (*method_names(), "cached", *preset_names())
    if method is not None and method.replace("-", "_") not in known:
        raise ArgumentError(
            "method", f": unknown method or preset {method!r}{suggest(method, known)}"
        )
    if backend not in backend_names():
        raise ArgumentError(
            "backend", f": unknown backend {backend!r}{suggest(backend, backend_names())}"
        )
    if settings.attention is None:
        _check_recipe(settings)
        _check_total(settings)
    if settings.masks is not None:
        _check_masks(settings)
    elif method == "cached":
        raise ArgumentError("method", "cached reads a calibrated MaskBook: give `masks`")
    if settings.config is not None and not Path(settings.config).expanduser().exists():
        raise ArgumentError("config", f": there is no preset file {settings.config}")
    if preset is not None or settings.config is not None:
        if settings.options:
            raise ArgumentError(
                "options",
                f": a preset is complete: {', '.join(settings.options)} cannot be added to it; "
                f"name a method instead, or write a preset file of your own",
            )
        known = preset_names(card.name)
        if settings.config is None and str(preset).replace("-", "_") not in known:
            raise ArgumentError(
                "preset", f": {card.name} has no preset {preset!r}{suggest(str(preset), known)}"
            )


def check_arguments(settings: Settings) -> None:
    """Refuse arguments that the pipeline's own call has not; needs diffusers, but no weights."""
    import diffusers

    from jali.integration.models.pipeline import generate_video

    card = model_card(settings.model)
    pipeline = inspect.signature(getattr(diffusers, card.pipeline).__call__).parameters
    own = inspect.signature(generate_video).parameters
    known = [name for name in (*pipeline, *own) if name not in TAKEN]
    for name in settings.arguments:
        if name in TAKEN:
            raise ArgumentError("arguments", f"{name} is set by jali; it cannot be given twice")
        if name not in known:
            raise ArgumentError(
                "arguments",
                f": the pipeline of {card.name} has no argument {name!r}{suggest(name, known)}",
            )


def _check_total(settings: Settings) -> None:
    total = settings.total
    if settings.curve is not None and settings.curve_shape and total is None:
        raise ArgumentError("curve", "spreads a total along the run: give `total` too")
    if total is not None and settings.budget is not None:
        raise ArgumentError("total", "and `budget` ask for the same in two ways; leave one out")
    if total is not None and settings.method == "dense":
        raise ArgumentError("total", f"is {total:g}, but the method dense does all of the work")


# What a recipe has already.
IN_RECIPE = ("method", "preset", "config", "options", "budget", "total", "curve",
             "warmup_frac", "dense_first_layer")  # fmt: skip


def _check_recipe(settings: Settings) -> None:
    if settings.recipe in (None, NO_RECIPE):
        return
    for name in IN_RECIPE:
        if getattr(settings, name) not in (None, {}):
            raise ArgumentError(
                name, "and `recipe` ask for the same in two ways: the recipe says it; leave one out"
            )
    if not recipe_file(str(settings.recipe)).is_file():
        raise ArgumentError(
            "recipe",
            f": there is no recipe {settings.recipe}; make one with jali tune --output "
            f"{settings.recipe}",
        )


def _check_masks(settings: Settings) -> None:
    for name in ("preset", "config"):
        if getattr(settings, name) is not None:
            raise ArgumentError(name, "and `masks` are two methods at once; leave one of them out")
    if settings.method not in (None, "cached"):
        raise ArgumentError(
            "method",
            f"and `masks`: masks are read by the method cached, not by {settings.method}; "
            f"leave one out",
        )
    others = ", ".join(name for name in settings.options if name != "probes")
    if others:
        raise ArgumentError("options", f": the method cached has the option probes, got {others}")
    if not Path(str(settings.masks)).expanduser().exists():
        raise ArgumentError(
            "masks",
            f": no book at {settings.masks}; make one with jali calibrate --output "
            f"{settings.masks}",
        )


def _check_place(settings: Settings) -> None:
    device, dtype, backend = settings.device, settings.dtype, settings.backend
    if device is not None:
        check_device(device)
        if device.partition(":")[2].strip("0"):
            raise ArgumentError(
                "device",
                f"is a kind of device here, got {device!r}; choose the GPU by "
                f"CUDA_VISIBLE_DEVICES={device.partition(':')[2]}",
            )
    if dtype is not None and dtype not in DTYPES:
        raise ArgumentError("dtype", f"must be one of {', '.join(DTYPES)}, got {dtype!r}")
    gpu = may_have_gpu() if device is None else device.startswith("cuda")
    kind = "cuda" if gpu else "cpu"
    check_offload(settings.cpu_offload, kind)
    parallel = settings.tensor_parallel
    check_compile(bool(settings.compile), settings.cpu_offload, kind, parallel)
    if backend not in ON_ANY_DEVICE and not gpu:
        raise ArgumentError(
            "backend", f": {backend!r} cannot run here: needs a CUDA device, and this runs on a CPU"
        )


def _check_weights(name: str, given: str | None) -> None:
    if given is None:
        return
    if name == "lora":
        try:
            lora_source(given)
        except FileNotFoundError as error:
            raise ArgumentError(name, f": {error}") from None
    elif not Path(given).expanduser().exists() and not HUB_ID.fullmatch(given):
        raise ArgumentError(name, f": no folder {given}; it is a local folder or a hub id")
