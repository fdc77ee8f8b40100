"""`jali calibrate`: prompts in, a MaskBook out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

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
    "jali calibrate --model nano --method rd --option samples=4 --output nano-rd.safetensors",
)
NUM_PROMPTS = 2
METHODS = ("entropy", "rd")
BUDGETS = "0.7,0.5,0.3"
BRANCHES = ("mean", "separate")


@with_settings(
    "model", "method", "options", "recipe", *SIZES, *MACHINE,
    recipe={"help": "The book of what `jali tune` found: its method and size; --masks and --recipe "
            "together replay it along its curve."},
    method={
        "help": "entropy records importance; rd errors, for any budget and number of steps.",
        "shown": "entropy",
    },
    options={"help": "NAME=VALUE of rd's own, as keep=0.25 (a quarter of the run to a table)."},
)  # fmt: skip
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
        str | None,
        typer.Option(
            help="Ready-made budgets; others are derived when they are asked for.",
            show_default=BUDGETS,
        ),
    ] = None,
    branches: Annotated[
        str,
        typer.Option(
            help="mean (over guidance branches) or separate.", autocompletion=words(*BRANCHES)
        ),
    ] = "mean",
    importance: Annotated[
        bool | None,
        typer.Option(
            "--importance/--no-importance",
            help="Without it the file is far smaller, but cannot be resampled, merged, or asked "
            "for another budget.",
            show_default="on",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on after the last whole prompt.")
    ] = False,
    q_block: Annotated[
        int | None,
        typer.Option(min=1, help="Queries in a block.", show_default="256, of rd 128"),
    ] = None,
    k_block: Annotated[int, typer.Option(min=1, help="Keys in a block.")] = 128,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print facts of the book as JSON, and nothing else.")
    ] = False,
) -> None:
    """Run prompts densely and record what every layer looks at in every step."""
    from jali.cli.book import report_book
    from jali.generation.prompts import select_prompts

    with input_errors():
        if settings.recipe is not None:
            settings = _of_recipe(settings)
            if settings.method == "entropy":  # any budget along its curve is derived
                budgets = budgets or ""
                q_block = q_block or settings.options.get("q_block")
                k_block = settings.options.get("k_block", k_block)
                settings = replace(settings, options={})
        what = _what(settings, budgets, importance)
        if branches not in BRANCHES:
            raise ValueError(f"--branches is {' or '.join(BRANCHES)}, got {branches!r}")
        _check_output(output)
        texts = select_prompts(settings.model, None, prompts, num_prompts, shipped=NUM_PROMPTS)
        resolved = replace(settings, method="dense", options={}).resolve()
        if settings.method == "rd":
            what, size = _errors(resolved, settings.options, q_block, k_block, branches)
            if not as_json:
                typer.echo(size, err=True)
        else:
            from jali.tokens.layout import Blocks

            what["blocks"] = Blocks(q_block or 256, k_block)
        from jali.generation.produce import check_sizes, load
        from jali.maskbook.calibration import calibrate as record

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
            branches=branches,
            resume=resume,
            progress=lambda at: _tell(at, tell),
            **what,
            **{name: value for name, value in settings.pick(*SIZES).items() if value is not None},
        )
    report_book(book, as_json)


def _of_recipe(settings: Settings) -> Settings:
    """The settings of a recipe's book: its method with its options, size and steps."""
    from dataclasses import asdict

    from jali.evaluation.arena.row import row_of
    from jali.integration.recipe import Recipe

    found = Recipe.read(str(settings.recipe))
    settings.find_recipe()  # refuses another model
    if found.curve is None or found.method.name not in METHODS:
        raise ValueError(
            f"--recipe: a book is of entropy or rd, and {settings.recipe} is of {found.method.name}"
        )
    options = dict(row_of(found.method, found.curve).method.options)
    options.pop("budget", None)
    own: dict[str, Any] = {"method": found.method.name, "options": options, "recipe": None}
    own |= {n: v for n, v in asdict(found.run).items() if getattr(settings, n) is None}
    return replace(settings, **own)


def _what(settings: Settings, budgets: str | None, importance: bool | None) -> dict[str, Any]:
    """What is recorded of importance, as arguments; refused where they mean nothing."""
    if settings.method not in (None, *METHODS):
        raise ValueError(
            f"--method is entropy (a book of importance) or rd (of errors), got {settings.method!r}"
        )
    if settings.method == "rd":
        for flag, given in (("--budgets", budgets), ("--no-importance", importance)):
            if given is not None:
                raise ValueError(f"{flag} has no meaning for a book of rd, which serves any budget")
        return {}
    if settings.options:
        raise ValueError(
            f"--option {next(iter(settings.options))}: importance is recorded as entropy samples "
            f"it; only rd has options here"
        )
    ready = BUDGETS if budgets is None else budgets
    found = read_budgets(ready, "--budgets", zero=True) if ready.strip() else []
    if not found and importance is False:
        raise ValueError("--no-importance needs --budgets: nothing could be replayed")
    return {"budgets": found, "importance": importance}


def _errors(
    resolved: Settings, options: Mapping[str, Any], q_block: int | None, k_block: int, branches: str
) -> tuple[dict[str, Any], str]:
    """The rd whose errors are recorded, and how large the book will be; refused, if too large."""
    from rich.filesize import decimal

    from jali.maskbook.calibration.request import OF_A_BOOK, method_of_errors
    from jali.maskbook.calibration.size import check_limit, expected_bytes
    from jali.maskbook.header import Errors
    from jali.methods import RateDistortion
    from jali.presets.method import read_method
    from jali.tokens.layout import Blocks

    own = {**OF_A_BOOK, "q_block": q_block or 128, "k_block": k_block, **options}
    made = read_method({"method": "rd", "options": own}, "--method rd")
    assert isinstance(made, RateDistortion)
    method_of_errors(made, None, None)
    sizes = resolved.pick("steps", "height", "width", "num_frames")
    size = expected_bytes(
        resolved.model, Errors(made.codes, float(made.keep)), Blocks(made.q_block, made.k_block),
        branches, **sizes,
    )  # fmt: skip
    check_limit(size)
    return {"method": made}, (
        f"the book will have about {decimal(size)}; up to {decimal(8 * size)} lie beside it while "
        f"it is made"
    )


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
