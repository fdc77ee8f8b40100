"""`jali generate`: prompts to a folder of clips."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import input_errors, job_errors, refuse
from jali.cli.options import PromptFile, Prompts, with_settings
from jali.generation.settings import Settings

if TYPE_CHECKING:
    from jali.generation import RunFolder, Tick

EXAMPLES = (
    'jali generate --model nano --prompt "a red striped ball moves right" --with-dense',
    "jali generate --model wan-t2v-1.3b --method psa --preset psa_balanced --num-prompts 4",
    "jali generate --model wan-t2v-14b --budget 0.3 --prompts mine.txt --output-dir runs/mine",
    "torchrun --nproc-per-node 4 -m jali generate --model wan-t2v-14b --context-parallel 4",
)


@with_settings()
def generate(
    settings: Settings,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first N; without prompts, of the shipped set."),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(help="The run folder; one that is half-finished goes on.", show_default=False),
    ] = None,
    with_dense: Annotated[
        bool, typer.Option("--with-dense", help="Dense too: DIR/dense beside DIR/METHOD.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifests, and nothing else.")
    ] = False,
) -> None:
    """Make clips, sparse or dense: mp4 for people, lossless for metrics, and a manifest."""
    from jali.cli.quiet import quiet_libraries
    from jali.generation import produce
    from jali.generation.ranks import check_ranks

    with input_errors():
        check_ranks(settings)
        settings = settings.resolve()
        texts = chosen_prompts(settings.model, prompt, prompts, num_prompts)
        runs = _runs(settings, output_dir or _folder(settings, texts, with_dense), with_dense)
    quiet_libraries()
    made: list[RunFolder] = []
    with job_errors():
        pipe = _pipe(runs, texts)
        for folder, own in runs:
            with shown(quiet=as_json or _rank() > 0) as progress:
                made.append(produce(pipe or own.model, texts, own, folder, progress))
    _report(made, as_json)


def chosen_prompts(
    model: str, given: list[str] | None, file: Path | None, count: int | None
) -> tuple[str, ...]:
    """What was asked for, in order: --prompt, then the file; without either, the shipped set."""
    from jali.generation.prompts import default_prompts, read_prompts

    texts = tuple(given or ())
    if any(not text.strip() for text in texts):
        raise ValueError("--prompt is empty")
    if file is not None:
        texts += read_prompts(file)
    if not texts:
        texts = default_prompts(model)
    if count is not None and count > len(texts):
        raise ValueError(f"--num-prompts is {count}, but there are only {len(texts)} prompts")
    return texts[:count]


def _folder(settings: Settings, texts: tuple[str, ...], dense: bool) -> Path:
    """A folder by the name of what is made: the first that is free, or holds this very run."""
    from jali.generation.folder import find_run

    asked = "" if settings.budget in (None, 1.0) else f"-{settings.budget:g}"
    name = f"{settings.model}-{settings.preset or settings.label}{asked}"
    for number in range(1, 10_000):
        folder = Path("outputs") / (name if number == 1 else f"{name}-{number}")
        try:
            for place, own in _runs(settings, folder, dense):
                find_run(place, own, texts)
        except ValueError:
            continue
        return folder
    raise ValueError(f"outputs holds too many runs of {name}; give --output-dir")


def _runs(settings: Settings, folder: Path, dense: bool) -> list[tuple[Path, Settings]]:
    """Which settings go to which folder. Other files are in nobody's way, so they are refused."""
    from jali.generation.manifest import NAME
    from jali.generation.settings import dense_twin

    if not dense or settings.label == "dense":
        if (folder / settings.label / NAME).exists() or (folder / "dense" / NAME).exists():
            raise ValueError(f"{folder} holds runs in folders of its own; choose another one")
        return [(folder, settings)]
    if (folder / NAME).exists():
        raise ValueError(f"{folder} is a run itself; with --with-dense choose another folder")
    own = {"dense", settings.label}
    others = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else []
    others = [name for name in others if name not in own and not name.startswith(".")]
    if others:
        raise ValueError(f"{folder} holds {others[0]}, which is not of this run; choose another")
    return [(folder / "dense", dense_twin(settings)), (folder / settings.label, settings)]


def _pipe(runs: list[tuple[Path, Settings]], texts: tuple[str, ...]) -> Any:
    """Two runs share one pipeline; one loads its own, and only if there is anything to do."""
    from jali.generation.folder import find_run
    from jali.generation.produce import load
    from jali.generation.ranks import share_pipeline

    found = [find_run(folder, settings, texts) for folder, settings in runs]
    if len(runs) == 1 or all(run and len(run.clips) >= len(texts) for run in found):
        return None
    settings = runs[0][1]
    if settings.context_parallel > 1 or settings.tensor_parallel > 1:
        refuse("--with-dense does not go with several ranks; make two runs")
    pipe = load(settings)
    share_pipeline(pipe, settings)
    return pipe


@contextmanager
def shown(quiet: bool) -> Iterator[Callable[[Tick], None] | None]:
    """A bar on stderr that follows the steps."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:.0f}/{task.total:.0f} steps"),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    hidden = not console.is_terminal  # a log file gets no bars
    with Progress(*columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task("loading", total=1)

        def follow(tick: Tick) -> None:
            words = tick.prompt if len(tick.prompt) < 40 else f"{tick.prompt[:39]}…"
            bar.update(
                task,
                description=f"clip {tick.clip + 1} of {tick.clips}: {words}".replace("[", "("),
                total=tick.clips * tick.steps,
                completed=tick.clip * tick.steps + tick.step,
            )

        yield follow


def _rank() -> int:
    """Under torchrun the first process speaks for all."""
    return int(os.environ.get("RANK", "0"))


def _report(made: list[RunFolder], as_json: bool) -> None:
    if _rank() > 0:
        return
    if as_json:
        found = [{"folder": str(run.folder), **run.to_dict()} for run in made]
        typer.echo(json.dumps(found if len(found) > 1 else found[0], ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    for run in made:
        seconds = [clip.seconds for clip in run.clips]
        console.print(
            f"{run.folder}: {len(seconds)} {'clip' if len(seconds) == 1 else 'clips'}, "
            f"{sum(seconds) / len(seconds):.1f} s each",
            highlight=False, markup=False,
        )  # fmt: skip
        console.print(f"  {run.clips[-1].summary}", highlight=False, markup=False, style="dim")
    if len(made) == 2:
        console.print(
            f"next: jali compare {made[0].folder} {made[1].folder}", highlight=False, markup=False
        )
