"""`jali arena`: every method and both controls on finished clips, at equal achieved totals."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli import completion
from jali.cli.exits import fail, input_errors, job_errors
from jali.cli.options import (
    MACHINE,
    SIZES,
    Json,
    PromptFile,
    Prompts,
    check_folder,
    read_budgets,
    with_settings,
)
from jali.cli.output import make_table, number, print_json, progress_bar, say
from jali.cli.quiet import quiet_libraries
from jali.generation.settings import Settings
from jali.name import CONTROLS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.table import Table

    from jali.evaluation.arena.leaderboard import Board, Leaderboard, Standing
    from jali.evaluation.arena.row import ScheduleSpec

EXAMPLES = (
    "jali arena --model nano --quick --output runs/arena",
    "jali arena --model nano --totals 0.5,0.4,0.3 --steps 12 --num-prompts 16 --batch 16 "
    "--output runs/arena-12",
    'jali arena --model wan-t2v-1.3b --totals 0.4 --methods "entropy rd:samples=8" --schedule '
    "graded,esa --minutes 120 --output runs/wan",
)


@with_settings(
    "model", "recipe", "backend", "negative_prompt", *SIZES, "arguments", "lora", *MACHINE,
    "compile",
    recipe={"help": "What `jali tune` found, as one more row; all others at its total."},
)  # fmt: skip
def arena(
    settings: Settings,
    output: Annotated[
        Path, typer.Option(help="The arena's folder; one that was cut goes on.", show_default=False)
    ],
    totals: Annotated[
        str | None,
        typer.Option(
            help="Shares of all attention work, comma-separated.",
            show_default="0.5,0.4,0.3; 0.4 with --quick",
        ),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated, with options as in rd:samples=8; or all. random and local are "
            "always there.",
            autocompletion=completion.several(completion.contestants),
        ),
    ] = "all",
    schedule: Annotated[
        str,
        typer.Option(
            help="graded, linear, flat, esa, or several of them.",
            autocompletion=completion.several(completion.words("graded", "linear", "flat", "esa")),
        ),
    ] = "graded",
    prompt: Prompts = None,
    prompts: PromptFile = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first N.", show_default="4 of the shipped set"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts in one call of the model.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Begin nothing that would end later; 0: only report."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Three prompts, few steps, one total: a first ranking.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare all methods on finished clips, each at the same achieved total of the work.

    Prompts are the outer loop and every row is kept as it is made: whatever cuts a run, the methods
    are compared on the same prompts, and the same command goes on.
    """
    from jali.generation.prompts import select_prompts

    with input_errors():
        from jali.evaluation.arena.size import usual_size

        settings, usual, few = usual_size(settings, quick)
        if settings.recipe is not None and totals is None:
            from jali.evaluation.arena.run import recipe_row

            usual = (float(recipe_row(settings, settings.recipe).total or 1),)
        shares = usual if totals is None else read_budgets(totals, "--totals")
        texts = select_prompts(settings.model, prompt, prompts, num_prompts, shipped=few)
    compare(settings, output, shares, methods, schedule, texts, batch, minutes, as_json)


def compare(
    settings: Settings,
    output: Path,
    totals: Sequence[float],
    methods: str,
    schedule: str,
    prompts: Sequence[str],
    batch: int,
    minutes: float | None,
    as_json: bool,
    flag: str = "--output",
) -> None:
    """The arena of a command: checked before torch is loaded, played, and shown."""
    begun = time.monotonic()
    with input_errors():
        from jali.evaluation.arena.row import read_schedules, split_methods

        words, shapes = split_methods(methods, "--methods"), read_schedules(schedule, "--schedule")
        check_folder(output, flag)
        _check_totals(settings, shapes, totals)
        from jali.evaluation.arena.run import play, prepare, recipe_row

        own = () if settings.recipe is None else (recipe_row(settings, settings.recipe),)
        plan = prepare(settings, output, words, totals, shapes, prompts, batch, None, own)
    quiet_libraries()
    with job_errors(), progress_bar(quiet=as_json, log=True) as tell:
        from jali.generation.produce import load

        stop = None if minutes is None else begun + 60 * minutes
        board = play(plan, load(plan.dense), stop, lambda *said: tell(*said))
    if as_json:
        print_json(board.to_dict(), indent=1)
    else:
        _show(board, output)
    if board.results.failed:
        fail(f"{len(board.results.failed)} rows failed; the same command tries them again")


def _check_totals(
    settings: Settings, shapes: Sequence[ScheduleSpec], shares: Sequence[float]
) -> None:
    """What a schedule cannot have is said before torch is loaded."""
    from jali.integration.models.registry import model_card

    for shape in shapes:
        for total in shares:
            shape.check(total, settings.steps or model_card(settings.model).steps)


WIDE = 100  # letters of a terminal with room for all metrics


def _show(board: Leaderboard, folder: Path) -> None:
    from rich.console import Console

    metrics = board.metrics
    if Console().width < WIDE:
        metrics = list(dict.fromkeys([metrics[0], metrics[-1]])) if metrics else []
    for one in board.boards:
        say(_table(one, metrics))
    for sentence in board.sentences():
        say(sentence)
    if board.boards:
        say(f"{folder}: arena.html, pareto.svg, arena.json, and a run folder for every row")
    if not board.is_complete:
        say("Not finished: the same command goes on.")


def _table(board: Board, metrics: list[str]) -> Table:
    paired = () if board.total is None else ("to the\nfirst", "to the\ncontrol")
    heads = ("", *metrics, *paired, "total", "plan-\nning", "clip\n×")
    return make_table(
        heads,
        [_cells(standing, metrics) for standing in board.standings],
        dim=lambda cells: cells[0].split()[-1].partition(":")[0] in CONTROLS,
        title=f"{board.title}, {board.prompts} prompt{'' if board.prompts == 1 else 's'}",
        caption="± half of the 95 % interval over clips; = not told apart from the first; total "
        "and planning as done; × over dense in this run",
        pad_edge=False,
    )


def _cells(standing: Standing, metrics: list[str]) -> tuple[str, ...]:
    """Short enough for a terminal; the page has all intervals."""
    from jali.evaluation.arena.leaderboard import DIGITS, differs, plus_minus

    place = f"{standing.place}{'=' if standing.is_tied else ''}" if standing.place else "–"
    means = {name: found.mean for name, found in standing.metrics.items()}
    speed = standing.speed_up
    scheduled = standing.row.total is not None
    return (
        f"{place:<3} {standing.row.label}",
        plus_minus(standing.metrics["psnr"], 1),
        *(number(means.get(name), f".{DIGITS[name]}f") for name in metrics if name != "psnr"),
        *((differs(standing.behind), differs(standing.ahead)) if scheduled else ()),
        f"{standing.achieved:.3f}",
        f"{standing.planning:.3f}",
        number(None if speed is None else speed.mean, ".2f"),
    )
