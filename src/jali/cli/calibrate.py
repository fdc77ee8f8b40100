"""`jali calibrate`: prompts in, a MaskBook out."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import input_errors, job_errors
from jali.cli.options import MACHINE, SIZES, PromptFile, with_settings
from jali.generation.settings import Settings

if TYPE_CHECKING:
    from jali.maskbook.calibration import Progress

EXAMPLES = (
    "jali calibrate --model nano --num-prompts 2 --output nano.safetensors",
    "jali calibrate --model wan-t2v-1.3b --height 720 --width 1280 --output wan-720p.safetensors",
    "jali calibrate --model wan-t2v-1.3b --prompts mine.txt --output wan.safetensors --resume",
)
NUM_PROMPTS = 2


@with_settings("model", *SIZES, *MACHINE)
def calibrate(
    settings: Settings,
    output: Annotated[Path, typer.Option(help="The book, a .safetensors file.")],
    prompts: PromptFile = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Only the first N; without a file {NUM_PROMPTS} of the shipped set.",
            show_default=False,
        ),
    ] = None,
    budgets: Annotated[
        str, typer.Option(help="Ready-made budgets; others are derived when they are asked for.")
    ] = "0.7,0.5,0.3",
    branches: Annotated[
        str, typer.Option(help="mean (over guidance branches) or separate.")
    ] = "mean",
    importance: Annotated[
        bool,
        typer.Option(
            "--importance/--no-importance",
            help="Without it the file is far smaller, but cannot be resampled, merged, or asked "
            "for another budget.",
        ),
    ] = True,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last whole prompt.")
    ] = False,
    q_block: Annotated[int, typer.Option(min=1, help="Queries in a block.")] = 256,
    k_block: Annotated[int, typer.Option(min=1, help="Keys in a block.")] = 128,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print facts of the book as JSON, and nothing else.")
    ] = False,
) -> None:
    """Run prompts densely and record what every layer looks at in every step."""
    from jali.cli.book import facts, print_facts

    with input_errors():
        asked = _numbers(budgets)
        texts = _prompts(settings.model, prompts, num_prompts)
        from jali.generation.produce import load
        from jali.maskbook.calibration import calibrate as record
        from jali.tokens.layout import Blocks

        sizes = {
            name: value
            for name in ("height", "width", "num_frames", "guidance")
            if (value := getattr(settings, name)) is not None
        }
        pipe = load(settings)
    with job_errors(), _bar(quiet=as_json) as progress:
        book = record(
            pipe,
            texts,
            output,
            model=settings.model,
            steps=settings.steps,
            seed=settings.seed,
            budgets=asked,
            branches=branches,
            importance=importance,
            blocks=Blocks(q_block, k_block),
            resume=resume,
            progress=progress,
            **sizes,
        )
    if as_json:
        typer.echo(json.dumps(facts(book)))
    else:
        print_facts(book)


def _numbers(given: str) -> list[float]:
    try:
        return [float(part) for part in given.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"--budgets are numbers in 0..1 with commas, got {given!r}") from None


def _prompts(model: str, file: Path | None, count: int | None) -> tuple[str, ...]:
    from jali.generation.prompts import default_prompts, read_prompts

    texts = default_prompts(model) if file is None else read_prompts(file)
    if file is None and count is None:
        count = NUM_PROMPTS
    if count is not None and count > len(texts):
        raise ValueError(f"--num-prompts is {count}, but there are only {len(texts)} prompts")
    return texts[:count]


@contextmanager
def _bar(quiet: bool) -> Iterator[Callable[[Progress], None] | None]:
    """One bar on stderr for the whole job, with the time that is left."""
    if quiet:
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns: Any = (
        TextColumn("{task.description}"),
        BarColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=Console(stderr=True)) as bar:
        recording = bar.add_task("loading", total=None)
        writing = bar.add_task("writing the book", total=None, visible=False)

        def show(at: Progress) -> None:
            if at.writing:
                bar.update(recording, completed=bar.tasks[0].total or 0)
                bar.update(writing, completed=at.step, total=at.steps, visible=True)
                return
            bar.update(
                recording,
                completed=at.prompt * at.steps + at.step,
                total=at.prompts * at.steps,
                description=f"prompt {at.prompt + 1} of {at.prompts}, step {at.step + 1} of "
                f"{at.steps}",
            )

        yield show
