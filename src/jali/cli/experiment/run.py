"""`jali experiment run`: one experiment, whatever of it is not complete yet."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import refuse
from jali.cli.experiment.errors import errors
from jali.cli.experiment.options import (
    LOGS,
    RESULTS,
    Json,
    Logs,
    ResultsFolder,
    Track,
    check_track,
)
from jali.cli.experiment.progress import bar, heard
from jali.cli.experiment.tables import say, show_table
from jali.cli.options import (
    ATTENTION,
    PLACE,
    SIZE,
    BackendName,
    ContextParallel,
    CpuOffload,
    DenseFirstLayer,
    Device,
    Dtype,
    Seed,
    SourcePath,
    TensorParallel,
)

if TYPE_CHECKING:
    from jali.experiments.experiment import Experiment
    from jali.experiments.results import Results

EXAMPLES = (
    "jali experiment run --model nano --steps 4 --num-prompts 1 --tag first",
    "jali experiment run --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 "
    "--tag 1.3b-720p-b05",
    "jali experiment run --model wan-t2v-14b --cpu-offload --tag 14b",
    "torchrun --nproc-per-node 4 -m jali experiment run --model wan-t2v-14b "
    "--context-parallel 4 --masks 14b.safetensors --tag 14b-cp4",
)


def run(
    tag: Annotated[
        str | None, typer.Option(help="Names the folder of the results.", show_default=False)
    ] = None,
    model: Annotated[str, typer.Option(help="A name of the registry; see `jali doctor`.")] = "nano",
    method: Annotated[
        str,
        typer.Option(
            help="entropy, psa, rf_v2, ada_bsa, cached, random, local.", rich_help_panel=ATTENTION
        ),
    ] = "entropy",
    preset: Annotated[
        str | None,
        typer.Option(help="A method by preset; see `jali presets`.", rich_help_panel=ATTENTION),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Asked share of dense attention's work. [default: 0.5]",
            rich_help_panel=ATTENTION,
            show_default=False,
        ),
    ] = None,
    warmup_frac: Annotated[
        float | None, typer.Option(help="Share of dense first steps.", rich_help_panel=ATTENTION)
    ] = None,
    dense_first_layer: DenseFirstLayer = None,
    backend: BackendName = "auto",
    skip_calibrate: Annotated[
        bool,
        typer.Option(
            "--skip-calibrate",
            help="No new book: that of --masks, the tag's own, or none.",
            rich_help_panel=ATTENTION,
        ),
    ] = False,
    masks: Annotated[
        Path | None,
        typer.Option(help="A book to replay instead of calibrating.", rich_help_panel=ATTENTION),
    ] = None,
    calibration_prompts: Annotated[
        int, typer.Option(min=1, help="Prompts for the book.", rich_help_panel=ATTENTION)
    ] = 2,
    height: Annotated[int | None, typer.Option(help="In pixels.", rich_help_panel=SIZE)] = None,
    width: Annotated[int | None, typer.Option(help="In pixels.", rich_help_panel=SIZE)] = None,
    num_frames: Annotated[int | None, typer.Option(rich_help_panel=SIZE)] = None,
    steps: Annotated[int | None, typer.Option(help="Of denoising.", rich_help_panel=SIZE)] = None,
    guidance: Annotated[
        float | None, typer.Option(help="How strongly the prompt counts.", rich_help_panel=SIZE)
    ] = None,
    seed: Seed = 0,
    num_prompts: Annotated[
        int, typer.Option(min=1, help="Of the shipped set.", rich_help_panel=SIZE)
    ] = 5,
    prompts: Annotated[
        Path | None, typer.Option(help="A text file, one prompt a line.", rich_help_panel=SIZE)
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated. [default: all that can run]",
            rich_help_panel=SIZE,
            show_default=False,
        ),
    ] = None,
    bench_steps: Annotated[
        int, typer.Option(min=1, help="Steps of a timed run.", rich_help_panel=SIZE)
    ] = 5,
    bench_repeats: Annotated[
        int, typer.Option(min=1, help="Timed runs; the median counts.", rich_help_panel=SIZE)
    ] = 3,
    path: SourcePath = None,
    device: Device = None,
    dtype: Dtype = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, pinned.", rich_help_panel=PLACE)
    ] = None,
    cpu_offload: CpuOffload = False,
    context_parallel: ContextParallel = 1,
    tensor_parallel: TensorParallel = 1,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json of results, instead of flags.", rich_help_panel=PLACE),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Redo what differs under this tag.")
    ] = False,
    results: ResultsFolder = RESULTS,
    logs: Logs = LOGS,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Calibrate, benchmark, quality, report: whatever of it is not complete yet.

    Writes RESULTS/TAG/{config,speed,quality}.json, clips, report.html, and LOGS_DIR/TAG.log.
    """
    from jali.experiments.job import run_experiment
    from jali.experiments.results import Results
    from jali.experiments.stages import all_stages
    from jali.experiments.team import speaks

    with errors():
        check_track(track)
        place = Results(results, logs)
        if config is not None:
            asked = from_config(config)
        else:
            if tag is None:
                refuse("run needs --tag, which names the folder of the results")
            asked = from_flags(
                place=place,
                tag=tag, model=model, method=method, preset=preset, budget=budget,
                warmup_frac=warmup_frac, dense_first_layer=dense_first_layer, backend=backend,
                calibrate=not skip_calibrate, masks=None if masks is None else str(masks),
                calibration_prompts=calibration_prompts, height=height, width=width,
                num_frames=num_frames, steps=steps, guidance=guidance, seed=seed,
                num_prompts=num_prompts, prompts=prompts, metrics=metrics,
                bench_steps=bench_steps, bench_repeats=bench_repeats, path=path, device=device,
                dtype=dtype, threads=threads, cpu_offload=cpu_offload,
                context_parallel=context_parallel, tensor_parallel=tensor_parallel,
            )  # fmt: skip
        with heard(quiet=as_json), bar(quiet=as_json) as told:
            folder = run_experiment(
                asked, place, all_stages(), overwrite=overwrite, told=told, track=track
            )
    if speaks():
        _show_results(place, asked.tag, as_json, f"Open {folder / 'report.html'}")


def from_flags(
    *, place: Results, prompts: Path | None, metrics: str | None, **facts: Any
) -> Experiment:
    from jali.experiments.experiment import Experiment
    from jali.experiments.stages.calibration import with_own_book

    if prompts is not None:
        from jali.generation.prompts import read_prompts

        facts["prompts"] = read_prompts(prompts)
    if metrics is not None:
        facts["metrics"] = tuple(name.strip() for name in metrics.split(",") if name.strip())
    if facts["masks"] is not None:
        from jali.maskbook import MaskBook

        facts["masks"] = str(Path(facts["masks"]).expanduser().absolute())
        MaskBook.open(facts["masks"]).close()  # before an hour of work, not after
    found = Experiment(**facts).completed()
    return found if found.calibrate or found.masks else with_own_book(found, place)


def from_config(path: Path) -> Experiment:
    from jali.experiments.job import experiment_in
    from jali.experiments.storage import UnreadableError

    try:
        return experiment_in(path).completed()
    except UnreadableError as error:  # here it is the user's file, not a result of ours
        raise ValueError(str(error)) from error


def _show_results(place: Results, tag: str, as_json: bool, then: str) -> None:
    from jali.experiments.collect import collect

    table = collect(place, [tag])
    if as_json:
        typer.echo(table.to_json(), nl=False)
        return
    show_table(table.rows)
    say(then)
