"""`jali calibrate`: prompts in, a MaskBook out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli.completion import words
from jali.cli.exits import input_errors, job_errors
from jali.cli.options import (
    MACHINE,
    SIZES,
    PromptFile,
    check_file,
    read_budgets,
    with_settings,
)
from jali.cli.output import progress_bar
from jali.cli.quiet import quiet_libraries
from jali.files import PICKLES
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
BRANCHES = ("mean", "separate")


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
        str,
        typer.Option(
            help="mean (over guidance branches) or separate.", autocompletion=words(*BRANCHES)
        ),
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
        ready = read_budgets(budgets, "--budgets", zero=True) if budgets.strip() else []
        if branches not in BRANCHES:
            raise ValueError(f"--branches is {' or '.join(BRANCHES)}, got {branches!r}")
        if not ready and not importance:
            raise ValueError("--no-importance needs --budgets: nothing could be replayed")
        _check_output(output)
        texts = select_prompts(settings.model, None, prompts, num_prompts, shipped=NUM_PROMPTS)
        resolved = replace(settings, method="dense").resolve()
        from jali.generation.produce import check_sizes, load
        from jali.maskbook.calibration import calibrate as record
        from jali.tokens.layout import Blocks

    quiet_libraries()
    with job_errors():
        pipe = load(resolved)
        check_sizes(pipe, resolved)
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
            **{name: value for name, value in settings.pick(*SIZES).items() if value is not None},
        )
    report_book(book, as_json)


def _check_output(output: Path) -> None:
    check_file(output)
    if output.suffix.lower() in PICKLES:
        raise ValueError(
            f"--output {output}: a book is a .safetensors file, never a pickle: use "
            f"{output.with_suffix('.safetensors')}"
        )


def _tell(at: Progress, tell: Tell) -> None:
    if at.writing:
        tell("writing the book", at.step, at.steps)
    else:
        words = f"prompt {at.prompt + 1} of {at.prompts}, step {at.step + 1} of {at.steps}"
        tell(words, at.prompt * at.steps + at.step, at.prompts * at.steps)
