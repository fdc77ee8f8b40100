"""Record once what attention looks at, and make a book of it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jali.integration.modes import apply_sparse_attention
from jali.maskbook import Fingerprint, Header, MaskBook, write_book
from jali.maskbook.calibration.recorder import Recorder, Unplanned
from jali.maskbook.calibration.request import (
    CalibrationRequest,
    branches_of,
    budgets_of,
    digest,
    prompts_of,
)
from jali.maskbook.calibration.running_mean import RunningMean, locked
from jali.maskbook.calibration.scorer import Sampled, Scorer
from jali.maskbook.container import PICKLES
from jali.maskbook.fingerprint import fingerprint
from jali.maskbook.header import read_grid, write_grid
from jali.maskbook.mode import device_of, transformers_of
from jali.maskbook.noise import noise_levels
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Order, Raster
from jali.version import __version__

log = logging.getLogger("jali")

BUDGETS = (0.7, 0.5, 0.3)


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a calibration stands: a step of a prompt, or of writing the book."""

    prompt: int
    prompts: int
    step: int
    steps: int
    writing: bool = False


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    output: str | os.PathLike[str],
    *,
    model: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    budgets: Sequence[float] = BUDGETS,
    branches: str = "mean",
    importance: bool = True,
    sharpness: float = 1.0,
    scorer: Scorer | None = None,
    blocks: Blocks | None = None,
    order: Order | None = None,
    resume: bool = False,
    generate: Callable[[str, int], Any] | None = None,
    progress: Callable[[Progress], None] | None = None,
    **arguments: Any,
) -> MaskBook:
    """Run prompts densely, average what every layer attends to in every step, and write a book.

    With `model`, a name of the registry, each prompt is a `generate_video` with `arguments`
    (height, width, num_frames, guidance, …); without one the pipeline is called with them; or
    `generate(prompt, seed)` does what is to be recorded. Prompt i has the seed `seed + i`.

    `branches` "mean" averages over guidance branches, "separate" keeps them apart. `importance`
    False leaves the 8-bit importance out: the file is far smaller, but no other budget can be
    derived, and nothing resampled or merged. `scorer` is what is recorded: the importance that
    entropy samples, another one of `jali.calibrate.scorer`, or a callable of that kind.

    The running mean lies in `OUTPUT.partial` until the book is complete: killed at any moment, a
    call with `resume=True` loses at most the prompt in progress and ends with the same book, bit
    for bit. While a prompt runs, two means are on disk, four bytes a block each.
    """
    output = Path(output)
    request = CalibrationRequest(
        prompts=prompts_of(prompts), seed=seed, budgets=budgets_of(budgets, importance),
        branches=branches_of(branches), importance=importance, sharpness=float(sharpness),
        scorer=scorer or Sampled(), blocks=blocks or Blocks(256, 128), order=order or Raster(),
        model=model, steps=steps, arguments=arguments,
    )  # fmt: skip
    _check_output(output)
    transformers = transformers_of(pipe)
    marks = {name: fingerprint(module) for name, module in transformers.items()}
    for module in transformers.values():
        _refuse_ranks(module)
    settings = request.settings(marks)
    folder = output.with_name(output.name + ".partial")
    if (
        resume
        and not folder.exists()
        and (done := _finished(output, request, settings)) is not None
    ):
        log.info("jali: %s is complete already", output)
        return done
    with locked(folder):
        found = _unfinished(folder, settings, resume)
        made = found
        try:
            run = generate or _generator(pipe, request)
            made = _record(pipe, run, request, settings, folder, found, progress)
            header = _header(made, request, marks)
            book = write_book(
                output,
                header,
                lambda step, layer: torch.from_numpy(made.slab(step, layer)),
                device_of(next(iter(transformers.values()))),
                _writing(progress, len(request.prompts)),
                scratch=folder,
            )
        except BaseException:
            if RunningMean.load(folder) is None:  # not one prompt to go on from
                shutil.rmtree(folder, ignore_errors=True)
            raise
        made.remove()
    return book


# Recording


def _record(
    pipe: Any,
    generate: Callable[[str, int], Any],
    request: CalibrationRequest,
    settings: dict[str, Any],
    folder: Path,
    found: RunningMean | None,
    progress: Callable[[Progress], None] | None,
) -> RunningMean:
    """Run the prompts that are left."""
    done = 0 if found is None else found.done
    if found is not None:
        log.info("jali: going on after %d of %d prompts", done, len(request.prompts))
    if found is not None and done == len(request.prompts):
        return found
    current = done

    def start(recorder: Recorder) -> RunningMean:
        return _open(recorder, folder, settings, found)

    def on_step(step: int, steps: int) -> None:
        if progress is not None:
            progress(Progress(current, len(request.prompts), step, steps))

    recorder = Recorder(
        request.scorer, request.blocks, request.order, request.branches, start, on_step
    )
    handle = apply_sparse_attention(pipe, Unplanned())
    # Every call has to come by, also where the user chose who does the dense ones.
    handle.run.dense_choice = None
    handle.run.watch = recorder
    try:
        for current in range(done, len(request.prompts)):
            if recorder.mean is not None:
                recorder.mean.begin()
            with torch.no_grad():
                generate(request.prompts[current], request.seed + current)
            recorder.finish()
            assert recorder.mean is not None
            _check_complete(recorder, handle.run.left_out)
            recorder.mean.commit(_facts(recorder, pipe))
    finally:
        recorder.close()
        handle.remove()
    assert recorder.mean is not None
    return recorder.mean


def _open(
    recorder: Recorder, folder: Path, settings: dict[str, Any], found: RunningMean | None
) -> RunningMean:
    """The running mean, now that the first call has shown how large it is."""
    assert recorder.sizes is not None
    assert recorder.grid is not None
    steps, layers, heads = recorder.sizes
    tokens, blocks = recorder.grid.tokens, recorder.blocks
    shape = [
        steps, layers, len(recorder.branches), heads,
        -(-tokens // blocks.q), -(-tokens // blocks.k),
    ]  # fmt: skip
    if found is None:
        found = RunningMean(folder, 0, {"settings": settings, "shape": shape})
    elif list(found.shape) != shape:
        raise ValueError(
            f"{folder} was begun with importance of {list(found.shape)}, this run gives {shape}; "
            f"call it as before, or delete the folder to start over"
        )
    elif read_grid(found.facts["grid"]) != recorder.grid:
        raise ValueError(
            f"{folder} was begun with the grid {read_grid(found.facts['grid'])}, this run has "
            f"{recorder.grid}; call it as before, or delete the folder to start over"
        )
    found.begin()
    return found


def _check_complete(recorder: Recorder, left_out: list[str]) -> None:
    assert recorder.mean is not None
    missing = recorder.mean.missing()
    if missing:
        step, layer = missing[0]
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise ValueError(
            f"{len(missing)} of {recorder.mean.shape[0] * recorder.mean.shape[1]} places recorded "
            f"nothing, the first at step {step}, layer {layer}{why}; a book needs every layer in "
            f"every step"
        )


def _facts(recorder: Recorder, pipe: Any) -> dict[str, Any]:
    """What the first prompt has shown."""
    assert recorder.sizes is not None
    assert recorder.grid is not None
    steps = recorder.sizes[0]
    levels = noise_levels(getattr(pipe, "scheduler", None), steps)
    # A run without a scheduler still has an order: from noise to none.
    kind, noise = levels or ("timestep", tuple(1000 * (1 - i / steps) for i in range(steps)))
    return {
        "grid": write_grid(recorder.grid),
        "noise": list(noise),
        "noise_kind": kind,
        "transformers": [recorder.transformers[step] for step in range(steps)],
    }


def _generator(pipe: Any, request: CalibrationRequest) -> Callable[[str, int], Any]:
    if request.model is not None:
        from jali.integration.models.pipeline import generate_video

        model = request.model

        def by_name(prompt: str, seed: int) -> Any:
            return generate_video(
                pipe, prompt, model, steps=request.steps, seed=seed, **request.arguments
            )

        return by_name

    def direct(prompt: str, seed: int) -> Any:
        given = {} if request.steps is None else {"num_inference_steps": request.steps}
        return pipe(
            **{
                "prompt": prompt,
                "output_type": "latent",  # pictures are not needed
                "generator": torch.Generator().manual_seed(seed),
                **given,
                **request.arguments,
            }
        )

    return direct


# The book


def _header(
    made: RunningMean, request: CalibrationRequest, marks: dict[str, Fingerprint]
) -> Header:
    facts = made.facts
    _, layers, _, heads, _, _ = made.shape
    used = {name: mark for name, mark in marks.items() if name in facts["transformers"]}
    grid: TokenGrid = read_grid(facts["grid"])
    plain = {
        name: value
        for name, value in request.arguments.items()
        if value is None or isinstance(value, bool | int | float)
    }
    return Header(
        fingerprints=used,
        grid=grid,
        order=request.order,
        blocks=request.blocks,
        layers=layers,
        heads=heads,
        noise=tuple(facts["noise"]),
        noise_kind=facts["noise_kind"],
        transformers=tuple(facts["transformers"]),
        branches=request.branches,
        budgets=request.budgets,
        prompts=request.digests,
        importance=request.importance,
        sharpness=request.sharpness,
        scorer=request.scorer.name,
        model=request.model,
        settings={**plain, "seed": request.seed, "calibration": digest(facts["settings"])},
        jali=__version__,
    )


def _finished(
    output: Path, request: CalibrationRequest, settings: dict[str, Any]
) -> MaskBook | None:
    """The book that this calibration would make, where it lies there already."""
    if not output.exists():
        return None
    with contextlib.suppress(ValueError, OSError):
        book = MaskBook.open(output)
        h = book.header
        same = h.settings.get("calibration") == digest(settings) and not h.history
        rest = (h.budgets, h.importance, h.sharpness)
        if same and rest == (request.budgets, request.importance, request.sharpness):
            return book
    return None


def _unfinished(folder: Path, settings: dict[str, Any], resume: bool) -> RunningMean | None:
    for half in folder.glob(".*.tmp"):  # of a writer that was killed
        half.unlink()
    found = RunningMean.load(folder)
    if found is None:
        return None
    if not resume:
        raise ValueError(
            f"{folder} holds an unfinished calibration of {found.done} prompts: go on with "
            f"resume=True (--resume), or delete it"
        )
    before = found.facts["settings"]
    for name in sorted({*before, *settings}):
        if before.get(name) != settings.get(name):
            raise ValueError(
                f"{folder} was begun with {name} = {str(before.get(name))[:120]}, and this call "
                f"has {str(settings.get(name))[:120]}; call it as before, or delete the folder to "
                f"start over"
            )
    return found


def _writing(
    progress: Callable[[Progress], None] | None, prompts: int
) -> Callable[[int, int], None] | None:
    if progress is None:
        return None
    return lambda step, steps: progress(Progress(prompts, prompts, step, steps, writing=True))


# Refusals, before minutes of work


def _check_output(output: Path) -> None:
    """Can the book be written there?"""
    if output.suffix.lower() in PICKLES:
        raise ValueError(
            f"a book is a .safetensors file, never a pickle: use "
            f"{output.with_suffix('.safetensors')}"
        )
    if output.is_dir():
        raise ValueError(f"{output} is a folder; name a file in it")
    output.parent.mkdir(parents=True, exist_ok=True)
    if not os.access(output.parent, os.W_OK):
        raise PermissionError(f"{output.parent} cannot be written to")


def _refuse_ranks(module: Any) -> None:
    config = getattr(module, "_parallel_config", None)
    for kind in ("context_parallel_config", "tensor_parallel_config"):
        if getattr(config, kind, None) is not None:
            raise ValueError(
                "calibrating needs every head in one process; load the pipeline without context or "
                "tensor parallelism (its book serves those runs too)"
            )
