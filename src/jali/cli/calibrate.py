"""`jali calibrate`: prompts in, a MaskBook out."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli.exits import input_errors, job_errors
from jali.cli.options import MACHINE, SIZES, PromptFile, read_list, with_settings
from jali.cli.output import progress_bar
from jali.generation.settings import Settings

if TYPE_CHECKING:
    from jali.cli.output import Tell
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
            min=1, help=f"Only the first N; without a file {NUM_PROMPTS} of the shipped set."
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
    from jali.cli.book import report_book
    from jali.generation.prompts import select_prompts

    with input_errors():
        ready = read_list(budgets, float, "--budgets are numbers in 0..1 with commas")
        texts = select_prompts(settings.model, None, prompts, num_prompts, shipped=NUM_PROMPTS)
        from jali.generation.produce import load
        from jali.maskbook.calibration import calibrate as record
        from jali.tokens.layout import Blocks

        sizes = settings.pick(*SIZES)
        pipe = load(settings)
    with job_errors(), progress_bar(quiet=as_json) as tell:
        book = record(
            pipe,
            texts,
            output,
            model=settings.model,
            budgets=ready,
            branches=branches,
            importance=importance,
            blocks=Blocks(q_block, k_block),
            resume=resume,
            progress=lambda at: _tell(at, tell),
            **{name: value for name, value in sizes.items() if value is not None},
        )
    report_book(book, as_json)


def _tell(at: Progress, tell: Tell) -> None:
    if at.writing:
        tell("writing the book", at.step, at.steps)
    else:
        words = f"prompt {at.prompt + 1} of {at.prompts}, step {at.step + 1} of {at.steps}"
        tell(words, at.prompt * at.steps + at.step, at.prompts * at.steps)
