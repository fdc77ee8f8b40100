"""Record once what attention looks at, and make a book of it."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jali import files
from jali.integration.modes import apply_sparse_attention, transformers_of
from jali.maskbook import Fingerprint, Header, MaskBook, write_book
from jali.maskbook.calibration.recorder import Recorder
from jali.maskbook.calibration.request import (
    CalibrationRequest,
    method_of_errors,
    settings_digest,
)
from jali.maskbook.calibration.running_mean import RunningMean
from jali.maskbook.calibration.scorer import Sampled, Scorer, TableErrors
from jali.maskbook.calibration.size import check_limit, expected_bytes, parts_of_run
from jali.maskbook.header import read_grid, write_grid
from jali.maskbook.mode import device_of
from jali.maskbook.noise import noise_levels
from jali.maskbook.write import check_output, file_size
from jali.methods import FastestDense, Method
from jali.tokens.layout import Blocks
from jali.tokens.order import Order, Raster
from jali.version import __version__

log = logging.getLogger("jali")

BUDGETS = (0.7, 0.5, 0.3)

Generate = Callable[[str, int], Any]


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a calibration stands: a step of a prompt, or of writing the book.

    `bytes` is the size of the file, exactly; with two transformers one part of the run may need
    less.
    """

    prompt: int
    prompts: int
    step: int
    steps: int
    writing: bool = False
    bytes: int | None = None  # of the book, at most, as soon as that is known


def calibrate(
    pipe: Any,
    prompts: Sequence[str],
    output: str | os.PathLike[str],
    *,
    model: str | None = None,
    steps: int | None = None,
    seed: int = 0,
    budgets: Sequence[float] | None = None,
    branches: str = "mean",
    importance: bool | None = None,
    sharpness: float | None = None,
    scorer: Scorer | None = None,
    blocks: Blocks | None = None,
    order: Order | None = None,
    resume: bool = False,
    generate: Generate | None = None,
    progress: Callable[[Progress], None] | None = None,
    method: str | Method = "entropy",
    **arguments: Any,
) -> MaskBook:
    """Run prompts densely, average what every layer attends to in every step, and write a book.

    Or, with the method "rd", what reading a block less finely does to the output, in a few parts of
    the run: such a book serves any budget and any number of steps.

    The running mean lies in `OUTPUT.partial` until the book is complete: killed at any moment, a
    call with `resume=True` loses at most the prompt in progress and ends with the same book, bit
    for bit. While a prompt runs, two means are on disk, four bytes a block each.

    Args:
        pipe: a diffusers pipeline, or a transformer.
        prompts: what is run; prompt i has the seed `seed + i`.
        output: the book, a .safetensors file.
        model: a name of the registry: each prompt is a `generate_video` with `arguments` (height,
            width, num_frames, guidance, …). Without one the pipeline is called with them.
        steps: of denoising; None: as many as the model or the pipeline takes by itself.
        budgets: shares in 0..1 whose plans are made ready, 0.7, 0.5 and 0.3 if not given.
        branches: "mean" averages over guidance branches, "separate" keeps them apart.
        importance: False leaves the 8-bit importance out: the file is far smaller, but no other
            budget can be derived, and nothing resampled or merged.
        sharpness: of the heads' shares, as in `Entropy`.
        scorer: what is recorded: what entropy samples, or another callable [B, H, M, N] of a query.
        blocks, order: how tokens are cut into blocks; 256 × 128 in raster order if not given.
        resume: go on after the last whole prompt of an earlier call with the same arguments.
        generate: `generate(prompt, seed)` runs the pipeline instead.
        progress: called with a `Progress` for every step.
        method: "entropy" for importance; "rd" or a `RateDistortion` for errors: of its levels, by
            its samples, in parts of its `keep` (0.25 of the run), on its blocks (128 × 128). Then
            budgets, importance, sharpness and scorer have no meaning and are refused.

    Raises:
        ValueError, TypeError: an argument that cannot be, before anything runs; an unfinished
            calibration of other arguments, or without `resume`; prompts of several sizes; a book
            of rd that would have more than 64 GiB.
        LockedError: another process is calibrating to `output`.
        OSError: the disk is full, said before a prompt runs, or cannot be written to.

    Example:
        >>> book = calibrate(pipe, ["a cat"], "wan.safetensors", steps=50)  # doctest: +SKIP
    """
    rd = method_of_errors(
        method, blocks, order,
        budgets=budgets, importance=importance, sharpness=sharpness, scorer=scorer,
    )  # fmt: skip
    blocks = blocks or Blocks(256, 128)
    request = CalibrationRequest(
        prompts=prompts, seed=seed, budgets=BUDGETS if budgets is None else budgets,
        branches=branches, importance=importance is not False,
        sharpness=1.0 if sharpness is None else sharpness,
        scorer=(scorer or Sampled()) if rd is None else TableErrors(rd),
        blocks=blocks if rd is None else Blocks(rd.q_block, rd.k_block),
        order=order or Raster() if rd is None else rd.order,
        method=rd, model=model, steps=steps, arguments=arguments,
    )  # fmt: skip
    check_output(Path(output))
    return _run(pipe, request, Path(output), resume, generate, progress or (lambda _: None))


def _run(
    pipe: Any,
    request: CalibrationRequest,
    output: Path,
    resume: bool,
    generate: Generate | None,
    tell: Callable[[Progress], None],
) -> MaskBook:
    transformers = dict(transformers_of(pipe)[1])
    _refuse_ranks(transformers)
    if request.model is not None and request.errors is not None:
        size = {name: request.arguments.get(name) for name in ("height", "width", "num_frames")}
        check_limit(
            expected_bytes(
                request.model, request.errors, request.blocks, request.branches, request.steps,
                **size,
            )
        )  # fmt: skip
    fingerprints = {name: Fingerprint.of(module) for name, module in transformers.items()}
    settings = request.settings(fingerprints)
    folder = output.with_name(f"{output.name}.partial")
    if resume and not folder.exists() and (done := _finished(output, request, settings)):
        log.info("jali: %s is complete already", output)
        return done
    count = len(request.prompts)
    files.make_folder(folder)
    with files.lock(folder / "lock", f"another calibration is writing to {folder}"):
        found = _unfinished(folder, settings, resume)
        try:
            run = generate or _generator(pipe, request)
            mean = _record(pipe, run, request, settings, folder, found, tell, fingerprints)
            book = write_book(
                output,
                _header(mean, request, fingerprints),
                lambda step, layer: torch.from_numpy(mean.slab(step, layer)),
                device_of(next(iter(transformers.values()))),
                lambda step, steps: tell(Progress(count, count, step, steps, writing=True)),
                scratch=folder,
            )
        except BaseException:
            if RunningMean.load(folder) is None:  # not one prompt to go on from
                shutil.rmtree(folder, ignore_errors=True)
            raise
        mean.remove()
    return book


# Recording


def _record(
    pipe: Any,
    generate: Generate,
    request: CalibrationRequest,
    settings: dict[str, Any],
    folder: Path,
    found: RunningMean | None,
    tell: Callable[[Progress], None],
    fingerprints: Mapping[str, Fingerprint],
) -> RunningMean:
    """Run the prompts that are left."""
    done, count = 0, len(request.prompts)
    if found is not None:
        done = found.done
        log.info("jali: going on after %d of %d prompts", done, count)
        if done == count:
            return found
    current, size = done, 0

    def start(recorder: Recorder) -> RunningMean:
        nonlocal size
        shape = _shape(recorder, len(fingerprints))
        facts = {"settings": settings, "shape": shape, **_facts(recorder, pipe)}
        size = file_size(_header(RunningMean(folder, 0, facts), request, fingerprints))
        if request.errors is not None:
            check_limit(size)
        log.info("jali: the book will have %s bytes", f"{size:,}")
        return _begin(recorder, folder, settings, found, shape)

    recorder = Recorder(
        request.scorer, request.recording_method, request.header_fields["branches"], start,
        errors=request.errors,
        on_step=lambda step, steps: tell(Progress(current, count, step, steps, bytes=size)),
    )  # fmt: skip
    handle = apply_sparse_attention(pipe, FastestDense())
    # Every call has to come by, also where the user chose who does the dense ones.
    handle.run.dense_backend = None
    handle.run.watch = recorder
    try:
        for current in range(done, count):
            if recorder.mean is not None:
                recorder.mean.begin()
            with torch.no_grad():
                generate(request.prompts[current], request.seed + current)
            mean = recorder.finish()
            _check_complete(mean, recorder, handle.run.left_out)
            mean.commit(_facts(recorder, pipe))
    finally:
        recorder.close()
        handle.remove()
    return mean


def _shape(recorder: Recorder, transformers: int) -> list[int]:
    """Of the running mean, now that the first call has shown how large it is."""
    assert recorder.sizes is not None
    assert recorder.grid is not None
    steps, layers, heads = recorder.sizes
    tokens, blocks = recorder.grid.tokens, recorder.method.blocks(Blocks(256, 128))
    rows, columns = -(-tokens // blocks.q), -(-tokens // blocks.k)
    own = [layers, len(recorder.branches), heads, rows, columns]
    if recorder.errors is None:
        return [steps, *own]
    places = parts_of_run(recorder.errors, steps, transformers)
    return [places, *own, len(recorder.errors.levels)]


def _begin(
    recorder: Recorder,
    folder: Path,
    settings: dict[str, Any],
    found: RunningMean | None,
    shape: list[int],
) -> RunningMean:
    if found is None:
        found = RunningMean(folder, 0, {"settings": settings, "shape": shape})
    else:
        _check_as_before(folder, "importance of shape", list(found.shape), shape)
        _check_as_before(folder, "the grid", read_grid(found.facts["grid"]), recorder.grid)
    found.begin()
    return found


def _check_complete(mean: RunningMean, recorder: Recorder, left_out: Sequence[str]) -> None:
    missing = mean.missing()
    where = "step"
    if recorder.errors is not None:  # of two transformers, one may take over between two parts
        missing = [place for place in missing if place[0] < len(recorder.places)]
        where = "part"
    if missing:
        place, layer = missing[0]
        why = f" ({'; '.join(left_out)})" if left_out else ""
        raise ValueError(
            f"{len(missing)} of {mean.shape[0] * mean.shape[1]} places recorded nothing, the first "
            f"at {where} {place}, layer {layer}{why}; a book needs every layer in every step"
        )


def _facts(recorder: Recorder, pipe: Any) -> dict[str, Any]:
    """What the first prompt has shown; of steps that are still to come, what takes most room."""
    assert recorder.sizes is not None
    assert recorder.grid is not None
    steps = recorder.sizes[0]
    levels = noise_levels(getattr(pipe, "scheduler", None), steps)
    # A run without a scheduler still has an order: from noise to none.
    kind, noise = levels or ("timestep", tuple(1000 * (1 - i / steps) for i in range(steps)))
    last = transformers_of(pipe)[1][-1][0]
    return {
        "grid": write_grid(recorder.grid),
        "noise": list(noise),
        "noise_kind": kind,
        "transformers": [recorder.transformers.get(step, last) for step in range(steps)],
    }


def _generator(pipe: Any, request: CalibrationRequest) -> Generate:
    model, steps, arguments = request.model, request.steps, request.arguments
    if model is not None:
        from jali.integration.models.pipeline import generate_video

        return lambda prompt, seed: generate_video(
            pipe, prompt, model, steps=steps, seed=seed, **arguments
        )

    def call(prompt: str, seed: int) -> Any:
        given: dict[str, Any] = {} if steps is None else {"num_inference_steps": steps}
        given |= {"output_type": "latent", "generator": torch.Generator().manual_seed(seed)}
        return pipe(**{"prompt": prompt, **given, **arguments})  # pictures are not needed

    return call


# The book


def _header(
    mean: RunningMean, request: CalibrationRequest, fingerprints: Mapping[str, Fingerprint]
) -> Header:
    facts = mean.facts
    _, layers, _, heads = mean.shape[:4]
    numbers = {
        name: value
        for name, value in request.arguments.items()
        if value is None or isinstance(value, bool | int | float)
    }
    return Header(
        fingerprints={n: f for n, f in fingerprints.items() if n in facts["transformers"]},
        grid=read_grid(facts["grid"]),
        order=request.order,
        blocks=request.blocks,
        layers=layers,
        heads=heads,
        noise=tuple(facts["noise"]),
        noise_kind=facts["noise_kind"],
        transformers=tuple(facts["transformers"]),
        prompts=request.prompt_digests,
        scorer=request.scorer.name,
        model=request.model,
        settings={
            **numbers, "seed": request.seed, "calibration": settings_digest(facts["settings"]),
        },
        jali=__version__,
        **request.header_fields,
    )  # fmt: skip


def _finished(
    output: Path, request: CalibrationRequest, settings: Mapping[str, Any]
) -> MaskBook | None:
    """The book that this calibration would make, where it lies there already."""
    with contextlib.suppress(ValueError, OSError):
        book = MaskBook.open(output)
        h, wanted = book.header, request.header_fields
        same = h.settings.get("calibration") == settings_digest(settings) and not h.history
        if same and all(getattr(h, name) == value for name, value in wanted.items()):
            return book
    return None


def _unfinished(folder: Path, settings: dict[str, Any], resume: bool) -> RunningMean | None:
    for half in folder.glob(".*"):  # books of a writer that was killed
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
        _check_as_before(folder, f"{name} =", before.get(name), settings.get(name))
    return found


# Refusals, before minutes of work


def _check_as_before(folder: Path, what: str, before: Any, now: Any) -> None:
    if before != now:
        raise ValueError(
            f"{folder} was begun with {what} {str(before)[:120]}, and this call has "
            f"{str(now)[:120]}; call it as before, or delete the folder to start over"
        )


def _refuse_ranks(transformers: Mapping[str, Any]) -> None:
    for module in transformers.values():
        config = getattr(module, "_parallel_config", None)
        for kind in ("context_parallel_config", "tensor_parallel_config"):
            if getattr(config, kind, None) is not None:
                raise ValueError(
                    "calibrating needs every head in one process; load the pipeline without "
                    "context or tensor parallelism (its book serves those runs too)"
                )
