"""`jali experiment run`: one experiment, whatever of it is not complete yet."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import refuse
from jali.cli.experiment.options import Track, with_results
from jali.cli.experiment.progress import print_log, show_bars
from jali.cli.experiment.table import say, show_table
from jali.cli.options import ATTENTION, MACHINE, PARALLEL, PLACE, SIZE, SIZES, with_settings
from jali.cli.output import print_json
from jali.generation.settings import Settings
from jali.name import method_names, recipe_file, shipped_recipe
from jali.value import suggest

if TYPE_CHECKING:
    from jali.experiments.experiment import Experiment
    from jali.experiments.results import Results

EXAMPLES = (
    "run --model nano --steps 4 --num-prompts 1 --tag first",
    "run --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 --tag 1.3b-720p-b05",
    "run --model wan-t2v-14b --cpu-offload --tag 14b",
    "torchrun --nproc-per-node 4 -m jali experiment run --model wan-t2v-14b "
    "--context-parallel 4 --masks 14b.safetensors --tag 14b-cp4",
)
SPARSE = (
    "model",
    "method",
    "preset",
    "recipe",
    "budget",
    "warmup_frac",
    "dense_first_layer",
    "backend",
)


def _count(help: str, panel: str) -> Any:
    return typer.Option(min=1, help=help, rich_help_panel=panel)


@with_settings(
    *SPARSE, "masks", *SIZES, *MACHINE, "compile", *PARALLEL,
    method={"help": "One of {sparse_methods}."},
    masks={"help": "A book to replay instead of calibrating."},
    check=False,
)  # fmt: skip
@with_results
def run(
    settings: Settings,
    results: Results,
    as_json: bool,
    tag: Annotated[
        str | None, typer.Option(help="Names the folder of the results.", show_default=False)
    ] = None,
    skip_calibrate: Annotated[
        bool,
        typer.Option(
            "--skip-calibrate", rich_help_panel=ATTENTION,
            help="No new book: that of --masks, the tag's own, or none.",
        ),
    ] = False,
    calibration_prompts: Annotated[int, _count("Prompts for the book.", ATTENTION)] = 2,
    num_prompts: Annotated[int, _count("Of the shipped set.", SIZE)] = 5,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file, one prompt a line.", rich_help_panel=SIZE)
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated.", rich_help_panel=SIZE, show_default="all that can run"
        ),
    ] = None,
    bench_steps: Annotated[int, _count("Steps of a timed run.", SIZE)] = 5,
    bench_repeats: Annotated[int, _count("Timed runs; the median counts.", SIZE)] = 3,
    threads: Annotated[int | None, _count("CPU threads, pinned.", PLACE)] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json of results, instead of flags.", rich_help_panel=PLACE),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Redo what differs under this tag.")
    ] = False,
    track: Track = None,
) -> None:  # fmt: skip
    """Calibrate, benchmark, quality, report: whatever of it is not complete yet.

    Writes RESULTS/TAG/{config,speed,quality}.json, clips, report.html, and LOGS_DIR/TAG.log.
    """
    from jali.experiments.job import is_first_rank, run_experiment
    from jali.experiments.stages import all_stages

    if config is not None:
        asked = _from_config(config)
    elif tag is None:
        refuse("run needs --tag, which names the folder of the results")
    else:
        asked = _from_flags(
            results, tag, settings, prompts, metrics, calibrate=not skip_calibrate,
            calibration_prompts=calibration_prompts, num_prompts=num_prompts,
            bench_steps=bench_steps, bench_repeats=bench_repeats, threads=threads,
        )  # fmt: skip
    with print_log(quiet=as_json), show_bars(quiet=as_json) as on_progress:
        folder = run_experiment(
            asked, results, all_stages(), overwrite=overwrite, on_progress=on_progress, track=track
        )
    if is_first_rank():
        from jali.experiments.collect import collect

        table = collect(results, [asked.tag])
        if as_json:
            print_json(table.to_dict(), indent=1, allow_nan=False)
        else:
            show_table(table)
            say(f"Open {folder / 'report.html'}")


def _from_flags(
    results: Results,
    tag: str,
    settings: Settings,
    prompts: Path | None,
    metrics: str | None,
    **own: Any,
) -> Experiment:
    _check(settings)
    from jali.experiments.experiment import Experiment
    from jali.experiments.stages.calibration import with_own_book

    if prompts is not None:
        from jali.generation.prompts import read_prompts

        own["prompts"] = read_prompts(prompts)
    if metrics is not None:
        own["metrics"] = tuple(name.strip() for name in metrics.split(",") if name.strip())
    if settings.masks is not None:
        from jali.maskbook import MaskBook

        book = str(Path(settings.masks).expanduser().absolute())
        MaskBook.open(book).close()  # before an hour of work, not after
        settings = replace(settings, masks=book)
    if settings.recipe is not None and settings.recipe != shipped_recipe(settings.model):
        settings = replace(settings, recipe=str(recipe_file(settings.recipe).absolute()))
    found = Experiment(tag=tag, settings=settings, **own).completed()
    return found if found.calibrate or found.settings.masks else with_own_book(found, results)


def _check(settings: Settings) -> None:
    """What can be told without torch. A book is measured beside the method, whichever that is."""
    known = (*method_names()[1:], "cached")
    if settings.method is not None and settings.preset is not None:
        raise ValueError("give --method or --preset, not both: a preset names its method")
    if settings.method not in (None, "dense", *known):
        method = str(settings.method)
        raise ValueError(f"--method: unknown method {method!r}{suggest(method, known)}")
    if settings.masks is not None and not Path(settings.masks).expanduser().exists():
        raise ValueError(f"--masks: no book at {settings.masks}")
    replace(settings, method=None, masks=None).check()


def _from_config(path: Path) -> Experiment:
    from jali.experiments.job import read_config
    from jali.files import UnreadableError

    try:
        return read_config(path).completed()
    except UnreadableError as error:  # here it is the user's file, not a result of ours
        raise ValueError(str(error)) from error
