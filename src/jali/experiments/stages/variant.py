"""An experiment in the words of the library: settings of its runs, prompts, pipeline, book."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.experiments.experiment import CACHED, Experiment
from jali.experiments.storage import file_digest

if TYPE_CHECKING:
    from jali.experiments.stage import Context
    from jali.generation import Settings

DENSE = "dense"
BOOK = "masks.safetensors"


def settings_of(experiment: Experiment, variant: str, folder: Path) -> Settings:
    """How the clips of one variant are made."""
    from jali.generation import Settings

    e = experiment
    base = Settings(
        model=e.model, path=e.path, backend=e.backend, steps=e.steps, guidance=e.guidance,
        seed=e.seed, height=e.height, width=e.width, num_frames=e.num_frames, device=e.device,
        dtype=e.dtype, cpu_offload=e.cpu_offload, context_parallel=e.context_parallel,
        tensor_parallel=e.tensor_parallel,
    )  # fmt: skip
    if variant == DENSE:
        return replace(base, method=DENSE)
    asked = replace(
        base, budget=e.budget, warmup_frac=e.warmup_frac, dense_first_layer=e.dense_first_layer
    )
    if variant == CACHED:
        return replace(asked, masks=str(book_of(e, folder)))
    if e.preset is not None:
        return replace(asked, preset=e.preset)
    return replace(asked, method=e.method)


def book_of(experiment: Experiment, folder: Path) -> Path:
    """The book that `cached` replays: given, or made by the calibrate stage."""
    return Path(experiment.masks) if experiment.masks is not None else folder / BOOK


def book_digest(experiment: Experiment, folder: Path) -> str | None:
    """Of the book an experiment depends on; None where it has none, or not yet."""
    path = book_of(experiment, folder)
    return file_digest(path) if experiment.has_book and path.is_file() else None


def prompts_of(experiment: Experiment) -> tuple[str, ...]:
    """What is generated and judged."""
    if experiment.prompts is not None:
        return experiment.prompts
    known = _shipped(experiment)
    if len(known) < experiment.num_prompts:
        raise ValueError(
            f"{experiment.num_prompts} prompts are asked for, and {len(known)} are shipped for "
            f"{experiment.model}; give a file of your own"
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

    return default_prompts(experiment.model)


def decides(experiment: Experiment) -> dict[str, Any]:
    """What decides every pixel but the method, as plain values."""
    names = (
        "model", "path", "height", "width", "num_frames", "steps", "guidance", "seed", "backend",
        "cpu_offload", "context_parallel", "tensor_parallel", "device", "dtype", "threads",
    )  # fmt: skip
    return {name: getattr(experiment, name) for name in names}


def attention_of(experiment: Experiment) -> dict[str, Any]:
    """The rest: what is asked of attention."""
    names = ("method", "preset", "budget", "warmup_frac", "dense_first_layer")
    return {name: getattr(experiment, name) for name in names} | {
        "variants": list(experiment.variants)
    }


def pipeline(context: Context) -> Any:
    """The model, loaded once for all stages of a run."""
    if "pipe" not in context.shared:
        from jali.generation.produce import check_sizes, load
        from jali.generation.ranks import share_pipeline

        settings = settings_of(context.experiment, DENSE, context.folder).resolve()
        pipe = load(settings)
        share_pipeline(pipe, settings)
        check_sizes(pipe, settings)
        context.shared["pipe"] = pipe
    return context.shared["pipe"]


@contextlib.contextmanager
def pinned(experiment: Experiment) -> Iterator[None]:
    """The number of threads decides the order of sums on a CPU, and with it the last digits."""
    import torch

    before = torch.get_num_threads()
    if experiment.threads is not None:
        torch.set_num_threads(experiment.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)
