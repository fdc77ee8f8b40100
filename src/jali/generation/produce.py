"""Prompts to a run folder: clip by clip, so that a half-finished one goes on where it stopped."""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali import files
from jali.error import show
from jali.generation.folder import clip_name, find_run, hold_folder, remove_leftovers
from jali.generation.machine import machine, versions
from jali.generation.manifest import ClipRecord, RunFolder
from jali.generation.prompts import check_prompt
from jali.generation.ranks import Rank, join_ranks, share_pipeline
from jali.generation.settings import Settings

if TYPE_CHECKING:
    from torch import Tensor

    from jali.integration.modes import Handle
    from jali.integration.stats import Stats
    from jali.methods import Method

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
    warm: bool = False,
) -> RunFolder:
    """Make the clips of these prompts, or those that a run folder still lacks.

    `pipe_or_model` is a pipeline of `settings.model`, or that model's name, which is then loaded
    as the settings say. Everything is checked before weights are read; a folder with other
    settings, other prompts or other files raises `RunFolderError`. After every clip the manifest
    is whole, so whatever interrupts a run costs one clip at most. More prompts than before add
    clips.

    The first clip made is marked `cold`, since its seconds hold what is done once; `warm` says that
    this pipeline has made others like it before (`warm_up`).

    >>> produce("nano", ["a red ball"], Settings("nano", budget=0.3), "runs/ball")  # doctest: +SKIP
    """
    pipe = None if isinstance(pipe_or_model, str) else pipe_or_model
    if pipe is None and pipe_or_model != settings.model:
        raise ValueError(f"the settings are for {settings.model}, not for {pipe_or_model}")
    settings, prompts = settings.resolve(pipe), _check_prompts(prompts)
    folder = Path(folder)
    with join_ranks(settings) as rank, contextlib.ExitStack() as stack:
        if rank.writes:
            stack.enter_context(hold_folder(folder))
        found = find_run(folder, settings, prompts)
        rank.wait()  # all have seen the same folder before one of them writes
        run = found or RunFolder(folder, settings)
        if len(run.clips) < len(prompts):
            if pipe is None:
                pipe = load_shared(settings)
            return _Production(pipe, prompts, settings, rank, progress, warm).finish(run)
        if len(run.clips) == len(prompts) and not run.complete and rank.writes:
            run = replace(run, complete=True)  # more were asked for before
            run.write()
        return run


def produce_runs(
    runs: Mapping[Path, Settings],
    prompts: Sequence[str],
    progress: Callable[[str, Tick], None] | None = None,
    pipe: Any = None,
) -> list[RunFolder]:
    """`produce` for several folders, with resolved settings of one model.

    All of them share one pipeline: `pipe`, or one that is loaded where there is anything to do.
    Several are there to be compared, so all are warmed up before the first clip. `progress` gets
    the label of the run too.
    """
    prompts = _check_prompts(prompts)
    found = [find_run(folder, settings, prompts) for folder, settings in runs.items()]
    todo = any(run is None or len(run.clips) < len(prompts) for run in found)
    if pipe is None and todo and len(runs) > 1:
        first = next(iter(runs.values()))
        if max(first.context_parallel, first.tensor_parallel) > 1:
            raise ValueError("--with-dense does not go with several ranks; make two runs")
        pipe = load_shared(first)

    compared = len(runs) > 1
    if compared and todo:
        warm_up(pipe, runs.values(), prompts[0])

    def make(folder: Path, own: Settings) -> RunFolder:
        tell = None if progress is None else lambda tick: progress(own.label, tick)
        model = own.model if pipe is None else pipe
        return produce(model, prompts, own, folder, tell, warm=compared)

    return [make(folder, own) for folder, own in runs.items()]


def _check_prompts(prompts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(prompts, str):
        raise TypeError("prompts is a list of texts; put one text in a list")
    found = tuple(prompts)
    if not found:
        raise ValueError("a run needs at least one prompt")
    for prompt in found:
        if not isinstance(prompt, str):
            raise TypeError(f"a prompt is a text, got {show(prompt)}")
        check_prompt(prompt)
    return found


# The pipeline


def load_shared(settings: Settings) -> Any:
    """The pipeline of resolved settings, spread over the ranks they ask for."""
    pipe = load(settings)
    share_pipeline(pipe, settings)
    return pipe


def load(settings: Settings) -> Any:
    """The pipeline that resolved settings name, quiet."""
    from jali.integration.models.pipeline import load_pipeline

    names = ("path", "device", "dtype", "cpu_offload", "lora", "height", "width")
    own = settings.pick(*names)
    pipe = load_pipeline(settings.model, compile=bool(settings.compile), **own)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def check_sizes(pipe: Any, settings: Settings) -> None:
    from jali.integration.models.registry import model_card
    from jali.integration.models.size import check_size, strides_of

    card = model_card(settings.model)
    height, width, frames = settings.pick("height", "width", "num_frames").values()
    check_size(strides_of(pipe, card), height, width, frames, card)


@contextlib.contextmanager
def attention(pipe: Any, settings: Settings, method: Method | None = None) -> Iterator[Handle]:
    """The pipeline with the attention of resolved settings, or by another `method`."""
    from jali.generation.call_record import PlanRecorder
    from jali.integration.modes import sparse_processor_mode, transformers_of

    recipe = settings.find_recipe()
    if recipe is not None:
        recipe.check_model(dict(transformers_of(pipe)[1]))
    if settings.masks is not None:
        from jali.generation.calibrated import replay_book

        with replay_book(pipe, settings) as handle:
            handle.run.watch = PlanRecorder(handle.method)
            handle.run.forewarned = True
            yield handle
        return
    preset, method = settings.find_preset(), method or settings.make_method()
    size: Any = (settings.num_frames, settings.height, settings.width)
    with sparse_processor_mode(pipe, method=method, backend=settings.backend) as handle:
        # A file may say what grid its preset is for; the first call tells whether this is it.
        check = None if preset is None else lambda grid: preset.check(grid, size)
        handle.run.watch = PlanRecorder(handle.method, check)
        handle.run.forewarned = True  # by the settings, before the weights were read
        yield handle


def frames_of(
    pipe: Any,
    settings: Settings,
    prompt: str,
    seed: int,
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """The frames of one prompt by resolved settings, on whatever attention the pipeline has."""
    return clips_of(pipe, settings, (prompt,), (seed,), on_step)[0].cpu()


def clips_of(
    pipe: Any,
    settings: Settings,
    prompts: Sequence[str],
    seeds: Sequence[int],
    on_step: Callable[[int], None] | None = None,
) -> Tensor:
    """Those of several in one call, [n, F, H, W, 3], where they were decoded."""
    from jali.integration.models.pipeline import generate_videos

    def step_ended(_pipe: Any, step: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        if on_step is not None:
            on_step(step + 1)
        return kwargs

    tells = "callback_on_step_end" in inspect.signature(type(pipe).__call__).parameters
    names = ("height", "width", "num_frames", "steps", "guidance", "negative_prompt")
    return generate_videos(
        pipe, prompts, settings.model, seeds=seeds,
        callback_on_step_end=step_ended if tells else None,
        **settings.pick(*names), **settings.arguments,
    )  # fmt: skip


def warm_up(pipe: Any, runs: Iterable[Settings], *prompts: str, decode: bool = True) -> None:
    """One step of every run at its size, one layer dense and the others sparse, and one decoding:
    what is loaded, compiled and tuned at first use is in no time of a clip made after. Several
    prompts are those of one call.

    Quietly, for there is nothing to say of so short a run. A book fits its own steps only; they are
    done up to the first that is sparse.
    """
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        for number, own in enumerate(runs):
            with contextlib.suppress(_Enough):
                _begin_clips(pipe, own, prompts, decode=decode and number == 0)
            pipe.maybe_free_model_hooks()  # as a pipeline does where it is not stopped
    finally:
        log.setLevel(level)


class _Enough(Exception):  # noqa: N818
    """A clip that nobody wants to see the end of."""


def _begin_clips(pipe: Any, settings: Settings, prompts: Sequence[str], decode: bool) -> None:
    from jali.methods import Dense, Schedule

    method, short = None, settings
    if settings.masks is None:
        method, short = settings.make_method().base, replace(settings, steps=1)
        if not isinstance(method, Dense):
            method = Schedule(method, dense_layers=(0,))
    with attention(pipe, settings, method) as handle:

        def stop(_: int) -> None:
            if not decode and (method is not None or handle.stats().sparse_cost is not None):
                raise _Enough

        clips_of(pipe, short, prompts, [short.seed] * len(prompts), stop)


# The folder


@dataclass(frozen=True)
class _Production:
    """A run on its pipeline: what does not change from clip to clip."""

    pipe: Any
    prompts: tuple[str, ...]
    settings: Settings  # resolved
    rank: Rank
    progress: Callable[[Tick], None] | None
    warm: bool

    def finish(self, run: RunFolder) -> RunFolder:
        """The clips that are missing, each in the manifest as soon as it is whole."""
        from jali import __version__

        check_sizes(self.pipe, self.settings)
        here, packages = machine(str(self.settings.device)), versions()
        _warn_of_changes(run, here, packages)
        run = replace(run, machine=here, versions=packages, jali=__version__)
        with attention(self.pipe, self.settings) as handle:
            first = len(run.clips)
            for number in range(first, len(self.prompts)):
                clip = self._make_clip(handle, number, run.folder)
                if number == first and not self.warm:
                    begun = handle.stats().seconds_first_call
                    begun = None if begun is None else round(begun, 4)
                    clip = replace(clip, cold=True, seconds_first_call=begun)
                run = run.with_clip(clip, complete=number + 1 == len(self.prompts))
                if self.rank.writes:
                    run.write()
        return run

    def _make_clip(self, handle: Handle, number: int, folder: Path) -> ClipRecord:
        from jali.clips.clip import to_uint8

        prompt, seed, steps = self.prompts[number], self.settings.seed + number, self.settings.steps

        def tell(step: int) -> None:
            if self.progress is not None:
                self.progress(Tick(number, len(self.prompts), step, steps or 0, prompt))

        tell(0)
        start = time.perf_counter()
        frames = frames_of(self.pipe, self.settings, prompt, seed, tell)
        seconds = time.perf_counter() - start
        tell(steps or 0)
        stats = handle.stats()
        clip = describe_clip(self.settings, number, prompt, frames, seconds, stats)
        if self.rank.writes:
            write_clip(folder, clip, to_uint8(frames), sites_text(handle, stats))
        return clip


def describe_clip(
    settings: Settings,
    number: int,
    prompt: str,
    frames: Tensor,
    seconds: float,
    stats: Stats,
    together: int = 1,
) -> ClipRecord:
    """What a manifest says of clip `number`. Of several made `together` the stats are those of all,
    and so are the seconds: each has its share of them."""
    from jali.integration.models.registry import model_card

    card, name = model_card(settings.model), clip_name(number, prompt)
    inside = None if stats.seconds is None else round(stats.seconds / together, 4)
    return ClipRecord(
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
        seconds=round(seconds / together, 4),
        seconds_transformer=inside,
        cost=round(stats.cost, 6),
        sparse_cost=None if stats.sparse_cost is None else round(stats.sparse_cost, 6),
        budget=settings.budget,
        calls=stats.sums.calls,
        sparse_calls=stats.sums.sparse_calls,
        dense_reasons=stats.dense,
        summary=stats.line(),
        image=f"{name}.png" if card.image else None,
    )


def sites_text(handle: Handle, stats: Stats) -> str:
    """What `NAME.sites.json` says of the latest generation. Asked once: the plans are forgotten."""
    from jali.generation.call_record import PlanRecorder, record_text

    watch = handle.run.watch
    plans = watch.plans() if isinstance(watch, PlanRecorder) else []
    return record_text(handle.run, stats, plans)


def write_clip(folder: Path, clip: ClipRecord, whole: Tensor, sites: str) -> None:
    """Everything of a clip on disk, from its frames in uint8; the manifest, which names it, comes
    after."""
    from jali.clips.clip import write_lossless, write_mp4

    remove_leftovers(folder, clip.name)
    write_lossless(folder / clip.lossless, whole, clip.fps)
    write_mp4(folder / clip.video, whole, clip.fps)
    if clip.image is not None:
        from PIL import Image

        with files.whole_file(folder / clip.image) as temporary:
            Image.fromarray(whole[0].numpy()).save(temporary, format="png")
    files.write_text(folder / clip.sites, sites)


def _warn_of_changes(
    run: RunFolder, machine: dict[str, Any], versions: dict[str, str | None]
) -> None:
    """A run that goes on elsewhere is still one run, but its times are not of one machine."""
    for before, now in ((run.machine, machine), (run.versions, versions)):
        for name, value in now.items():
            if before is not None and before.get(name) != value:
                log.warning(
                    "jali: %s goes on with another %s than before: %s, not %s",
                    run.folder, name, value, before.get(name),
                )  # fmt: skip
