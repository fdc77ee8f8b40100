"""Prompts to a run folder: clip by clip, so that a half-finished one goes on where it stopped."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.generation.folder import clip_name, find_run, hold_folder, remove_leftovers
from jali.generation.machine import machine, versions
from jali.generation.manifest import ClipRecord, RunFolder, replaced
from jali.generation.ranks import Rank, join_ranks, share_pipeline
from jali.generation.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from jali.integration.modes import Handle

log = logging.getLogger("jali")


@dataclass(frozen=True, slots=True)
class Tick:
    """Where a run stands: `step` of `steps` are done in clip number `clip` of `clips`."""

    clip: int
    clips: int
    step: int
    steps: int
    prompt: str


def produce(
    pipe_or_model: Any,
    prompts: Sequence[str],
    settings: Settings,
    folder: str | Path,
    progress: Callable[[Tick], None] | None = None,
) -> RunFolder:
    """Make the clips of these prompts, or those that a run folder still lacks.

    `pipe_or_model` is a pipeline of `settings.model`, or that model's name, which is then loaded
    as the settings say. Everything is checked before weights are read; a folder with other
    settings, other prompts or other files is refused. After every clip the manifest is whole, so
    whatever interrupts a run costs one clip at most. More prompts than before add clips.
    """
    pipe = None if isinstance(pipe_or_model, str) else pipe_or_model
    if pipe is None and pipe_or_model != settings.model:
        raise ValueError(f"the settings are for {settings.model}, not for {pipe_or_model}")
    settings = settings.resolve(pipe)
    prompts = _checked(prompts)
    folder = Path(folder)
    with (
        join_ranks(settings) as rank,
        hold_folder(folder) if rank.writes else contextlib.nullcontext(),
    ):
        found = find_run(folder, settings, prompts)
        rank.together()  # all have seen the same folder before one of them writes
        if found is None or len(found.clips) < len(prompts):
            return _produce(pipe, prompts, settings, folder, found, rank, progress)
        if len(found.clips) == len(prompts) and not found.complete and rank.writes:
            found = replace(found, complete=True)  # more were asked for before
            found.write()
        return found


def _checked(prompts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(prompts, str):
        raise TypeError("prompts is a list of texts; put one text in a list")
    found = tuple(prompts)
    if not found:
        raise ValueError("a run needs at least one prompt")
    for prompt in found:
        if not isinstance(prompt, str):
            raise TypeError(f"a prompt is a text, got {prompt!r}")
    return found


def _produce(
    pipe: Any,
    prompts: tuple[str, ...],
    settings: Settings,
    folder: Path,
    found: RunFolder | None,
    rank: Rank,
    progress: Callable[[Tick], None] | None,
) -> RunFolder:
    from jali import __version__

    if pipe is None:
        pipe = load(settings)
        share_pipeline(pipe, settings)
    check_sizes(pipe, settings)
    here, with_ = machine(str(settings.device)), versions()
    run = found or RunFolder(folder, settings)
    _compare(run, here, with_)
    run = replace(run, complete=False, machine=here, versions=with_, jali=__version__)
    with attention(pipe, settings) as handle:
        for number in range(len(run.clips), len(prompts)):
            clip = _clip(pipe, handle, number, prompts, settings, folder, rank, progress)
            run = run.with_clip(clip)
            run = replace(run, complete=number + 1 == len(prompts))
            if rank.writes:
                run.write()
    return run


def load(settings: Settings) -> Any:
    """The pipeline that resolved settings name, quiet."""
    from jali.integration.models.pipeline import load_pipeline

    pipe = load_pipeline(
        settings.model,
        path=settings.path,
        device=settings.device,
        dtype=settings.dtype,
        cpu_offload=settings.cpu_offload,
        lora=settings.lora,
        height=settings.height,
        width=settings.width,
    )
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check_sizes(pipe: Any, settings: Settings) -> None:
    from jali.integration.models.registry import model_card
    from jali.integration.models.size import check_size, strides_of

    card = model_card(settings.model)
    height, width, frames = settings.height, settings.width, settings.num_frames
    assert height is not None
    assert width is not None
    assert frames is not None
    check_size(strides_of(pipe, card), height, width, frames, card)


@contextlib.contextmanager
def attention(pipe: Any, settings: Settings) -> Iterator[Handle]:
    """The pipeline with the attention of resolved settings."""
    from jali.generation.call_record import PlanRecorder
    from jali.integration.modes import sparse_processor_mode

    if settings.masks is not None:
        from jali.generation.calibrated import cached_mode

        with cached_mode(pipe, settings) as handle:
            handle.run.watch = PlanRecorder(handle.method)
            yield handle
        return
    preset = settings.find_preset()
    size: Any = (settings.num_frames, settings.height, settings.width)
    with sparse_processor_mode(
        pipe, method=settings.make_method(), backend=settings.backend
    ) as handle:
        # A file may say what grid its preset is for; the first call tells whether this is it.
        check = None if preset is None else lambda grid: preset.check(grid, size)
        handle.run.watch = PlanRecorder(handle.method, check)
        yield handle


def _clip(
    pipe: Any,
    handle: Handle,
    number: int,
    prompts: tuple[str, ...],
    settings: Settings,
    folder: Path,
    rank: Rank,
    progress: Callable[[Tick], None] | None,
) -> ClipRecord:
    prompt = prompts[number]

    def tell(step: int) -> None:
        if progress is not None:
            progress(Tick(number, len(prompts), step, int(settings.steps or 0), prompt))

    tell(0)
    start = time.perf_counter()
    frames = frames_of(pipe, settings, prompt, settings.seed + number, tell)
    seconds = time.perf_counter() - start
    tell(int(settings.steps or 0))
    return _written(handle, number, prompt, settings, folder, rank, frames, seconds)


def frames_of(
    pipe: Any,
    settings: Settings,
    prompt: str,
    seed: int,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """The frames of one prompt by resolved settings, on whatever attention the pipeline has."""
    from jali.integration.models.pipeline import generate_video

    def step_ended(_pipe: Any, step: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if on_step is not None:
            on_step(step + 1)
        return kwargs

    tells = "callback_on_step_end" in inspect.signature(type(pipe).__call__).parameters
    return generate_video(
        pipe,
        prompt,
        settings.model,
        height=settings.height,
        width=settings.width,
        num_frames=settings.num_frames,
        steps=settings.steps,
        guidance=settings.guidance,
        seed=seed,
        negative_prompt=settings.negative_prompt,
        callback_on_step_end=step_ended if tells else None,
        **settings.arguments,
    )


def _written(
    handle: Handle,
    number: int,
    prompt: str,
    settings: Settings,
    folder: Path,
    rank: Rank,
    frames: Tensor,
    seconds: float,
) -> ClipRecord:
    """Everything of a clip on disk; the manifest, which names it, comes after."""
    from jali.clips.clip import to_uint8, write_lossless, write_mp4
    from jali.generation.call_record import PlanRecorder, record_text
    from jali.integration.models.registry import model_card

    card = model_card(settings.model)
    name = clip_name(number, prompt)
    stats = handle.stats()
    sparse = [row for row in stats.rows if row.reason is None]
    entry = ClipRecord(
        name=name,
        prompt=prompt,
        seed=settings.seed + number,
        fps=card.fps or 1,
        frames=frames.shape[0],
        height=frames.shape[1],
        width=frames.shape[2],
        video=f"{name}.mp4",
        lossless=f"{name}.mkv",
        sites=f"{name}.sites.json",
        seconds=round(seconds, 4),
        seconds_transformer=None if stats.seconds is None else round(stats.seconds, 4),
        cost=round(stats.cost, 6),
        sparse_cost=None if stats.sparse_cost is None else round(stats.sparse_cost, 6),
        budget=settings.budget,
        calls=len(stats.rows),
        sparse_calls=len(sparse),
        dense_reasons=stats.dense,
        summary=stats.line(),
        image=f"{name}.png" if card.image else None,
    )
    if not rank.writes:
        return entry
    remove_leftovers(folder, name)
    whole = to_uint8(frames)
    watch = handle.run.watch
    plans = watch.plans() if isinstance(watch, PlanRecorder) else []
    write_lossless(folder / entry.lossless, whole, entry.fps)
    write_mp4(folder / entry.video, whole, entry.fps)
    if entry.image is not None:
        _write_png(folder / entry.image, whole)
    with replaced(folder / entry.sites) as temporary:
        temporary.write_text(record_text(handle.run, stats, plans), encoding="utf-8")
    return entry


def _write_png(path: Path, frames: Tensor) -> None:
    from PIL import Image

    with replaced(path) as temporary:
        Image.fromarray(frames[0].numpy()).save(temporary, format="png")


def _compare(run: RunFolder, machine: dict[str, Any], versions: dict[str, str | None]) -> None:
    """A run that goes on elsewhere is still one run, but its times are not of one machine."""
    for before, now in ((run.machine, machine), (run.versions, versions)):
        for name, value in now.items():
            if before is not None and before.get(name) != value:
                log.warning(
                    "jali: %s goes on with another %s than before: %s, not %s",
                    run.folder, name, value, before.get(name),
                )  # fmt: skip
