"""The runs of an experiment: their settings, prompts, pipeline and book."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.experiments.experiment import CACHED, DENSE, Experiment
from jali.files import file_digest
from jali.name import recipe_file

if TYPE_CHECKING:
    from jali.experiments.stage import StageContext
    from jali.generation import Settings

BOOK = "masks.safetensors"
PIXELS = (
    "model", "path", "height", "width", "num_frames", "steps", "guidance", "seed", "backend",
    "cpu_offload", "compile", "context_parallel", "tensor_parallel", "device", "dtype",
    "threads",
)  # fmt: skip
ATTENTION = ("method", "preset", "budget", "warmup_frac", "dense_first_layer")


def settings_of(experiment: Experiment, variant: str, folder: Path) -> Settings:
    """How the clips of one variant are made."""
    if variant == DENSE:
        return experiment.dense_settings
    if variant == CACHED:
        book = str(book_of(experiment, folder))
        return replace(experiment.settings, method=None, preset=None, masks=book)
    return replace(experiment.settings, masks=None)


def book_of(experiment: Experiment, folder: Path) -> Path:
    """The book that `cached` replays: given, or made by the calibrate stage."""
    given = experiment.settings.masks
    return folder / BOOK if given is None else Path(given)


def prompts_of(experiment: Experiment) -> tuple[str, ...]:
    """What is generated and judged."""
    if experiment.prompts is not None:
        return experiment.prompts
    known = _shipped(experiment)
    if len(known) < experiment.num_prompts:
        raise ValueError(
            f"{experiment.num_prompts} prompts are asked for, and {len(known)} are shipped for "
            f"{experiment.settings.model}; give a file of your own"
        )
    return known[: experiment.num_prompts]


def calibration_prompts(experiment: Experiment) -> tuple[str, ...]:
    """The last of the shipped ones: quality is judged on prompts that a book has not seen."""
    judged = set(prompts_of(experiment))
    unseen = [prompt for prompt in _shipped(experiment) if prompt not in judged]
    if len(unseen) < experiment.calibration_prompts:
        raise ValueError(
            f"{experiment.calibration_prompts} prompts are needed to calibrate, and {len(unseen)} "
            f"shipped ones are not among those that are judged; use fewer prompts, or give masks"
        )
    return tuple(unseen[-experiment.calibration_prompts :])


def _shipped(experiment: Experiment) -> tuple[str, ...]:
    from jali.generation.prompts import default_prompts

    return default_prompts(experiment.settings.model)


def pixel_inputs(experiment: Experiment) -> dict[str, Any]:
    """What decides every pixel but the method, as plain values."""
    flat = experiment.to_dict()
    return {name: flat[name] for name in PIXELS if name in flat}


def variant_inputs(experiment: Experiment, folder: Path) -> dict[str, Any]:
    """What decides the clips of every variant: what is asked of attention, and the book's bytes."""
    flat, book = experiment.to_dict(), book_of(experiment, folder)
    recipe = experiment.settings.recipe
    own = {} if recipe is None else {"recipe": file_digest(recipe_file(recipe))}
    return pixel_inputs(experiment) | {name: flat[name] for name in ATTENTION} | own | {
        "variants": list(experiment.variants),
        "book": file_digest(book) if experiment.has_book and book.is_file() else None,
    }  # fmt: skip


def load_pipeline(context: StageContext) -> Any:
    """The model, loaded once for all stages of a run."""
    if "pipe" not in context.shared:
        from jali.generation.produce import check_sizes, load
        from jali.generation.ranks import share_pipeline

        settings = context.experiment.dense_settings.resolve()
        pipe = load(settings)
        share_pipeline(pipe, settings)
        check_sizes(pipe, settings)
        context.shared["pipe"] = pipe
    return context.shared["pipe"]


@contextlib.contextmanager
def pin_threads(experiment: Experiment) -> Iterator[None]:
    """The number of threads decides the order of sums on a CPU, and with it the last digits."""
    import torch

    before = torch.get_num_threads()
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
