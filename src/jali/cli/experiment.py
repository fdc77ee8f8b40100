"""`jali experiment`: calibrate, benchmark, quality in one job; sweeps of them, here or on Slurm."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import INTERRUPTED, fail, refuse
from jali.cli.old_names import OldNames

if TYPE_CHECKING:
    from rich.table import Table

    from jali.experiments.experiment import Experiment
    from jali.experiments.launch import Cluster
    from jali.experiments.place import Place
    from jali.experiments.resources import Resources
    from jali.experiments.status import Standing
    from jali.experiments.sweep import Sweep

app = typer.Typer(
    no_args_is_help=True,
    help="Speed and quality experiments, one or a sweep of them, on this machine or on Slurm.",
)

ATTENTION, SIZE, PLACE, JOB = "Attention", "What is made", "Where and how it runs", "Each job"
COLOURS = {
    "done": "green", "running": "cyan", "queued": "blue", "waiting": "dim", "failed": "red",
    "lost": "red", "damaged": "red", "cancelled": "yellow",
}  # fmt: skip

Results = Annotated[Path, typer.Option(help="Folder of all results.", rich_help_panel=PLACE)]
# Not --logs: torchrun takes that for an option of its own, cut short.
Logs = Annotated[
    Path, typer.Option("--logs-dir", help="Folder of all logs.", rich_help_panel=PLACE)
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
Tags = Annotated[
    list[str] | None,
    typer.Argument(help="Tags of experiments, or names of sweeps.", show_default=False),
]
Track = Annotated[
    str | None,
    typer.Option(help="Rows also go to trackio or wandb.", rich_help_panel=PLACE),
]
RESULTS, LOGS = Path("results"), Path("experiments/logs")


def examples(*lines: str) -> str:
    """The end of a help text; blank lines keep the examples on lines of their own."""
    return "\n\n".join(["Examples:", *lines])


@app.callback()
def experiment() -> None:
    """Speed and quality experiments, one or a sweep of them, on this machine or on Slurm."""


@app.command(
    "run",
    cls=OldNames,
    epilog=examples(
        "jali experiment run --model nano --steps 4 --num-prompts 1 --tag first",
        "jali experiment run --model wan-t2v-1.3b --height 720 --width 1280 --budget 0.5 "
        "--tag 1.3b-720p-b05",
        "jali experiment run --model wan-t2v-14b --cpu-offload --tag 14b",
        "torchrun --nproc-per-node 4 -m jali experiment run --model wan-t2v-14b "
        "--context-parallel 4 --masks 14b.safetensors --tag 14b-cp4",
    ),
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
    dense_first_layer: Annotated[
        bool | None,
        typer.Option(
            "--dense-first-layer/--sparse-first-layer",
            help="Whether layer 0 stays dense.",
            rich_help_panel=ATTENTION,
            show_default=False,
        ),
    ] = None,
    backend: Annotated[
        str, typer.Option(help="auto, or one of `jali doctor`.", rich_help_panel=ATTENTION)
    ] = "auto",
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
    seed: Annotated[int, typer.Option(help="Clip i has seed + i.", rich_help_panel=SIZE)] = 0,
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
    path: Annotated[
        str | None,
        typer.Option(help="Local folder or hub id, not the usual one.", rich_help_panel=PLACE),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu; cuda where there is one.", rich_help_panel=PLACE),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16 or fp32.", rich_help_panel=PLACE)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads, pinned.", rich_help_panel=PLACE)
    ] = None,
    cpu_offload: Annotated[
        bool,
        typer.Option("--cpu-offload", help="Parts wait in host memory.", rich_help_panel=PLACE),
    ] = False,
    context_parallel: Annotated[
        int,
        typer.Option(min=1, help="Ranks that share a sequence (torchrun).", rich_help_panel=PLACE),
    ] = 1,
    tensor_parallel: Annotated[
        int,
        typer.Option(min=1, help="Ranks that share the weights (torchrun).", rich_help_panel=PLACE),
    ] = 1,
    config: Annotated[
        Path | None,
        typer.Option(help="A config.json of results, instead of flags.", rich_help_panel=PLACE),
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Redo what differs under this tag.")
    ] = False,
    results: Results = RESULTS,
    logs: Logs = LOGS,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Calibrate, benchmark, quality, report: whatever of it is not complete yet.

    Writes RESULTS/TAG/{config,speed,quality}.json, clips, report.html, and LOGS_DIR/TAG.log.
    """
    from jali.experiments.job import run_experiment
    from jali.experiments.stages import all_stages

    with _errors():
        _check_track(track)
        place = _place(results, logs)
        if config is not None:
            asked = _from_config(config)
        else:
            if tag is None:
                refuse("run needs --tag, which names the folder of the results")
            asked = _experiment(
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
        with _heard(quiet=as_json), _bar(quiet=as_json) as told:
            folder = run_experiment(
                asked, place, all_stages(), overwrite=overwrite, told=told, track=track
            )
    if _leads():
        _show_results(place, [asked.tag], as_json, f"Open {folder / 'report.html'}")


@app.command(
    "launch",
    epilog=examples(
        "jali experiment launch experiments/sweeps/quick.yaml --on local --max-parallel 2",
        "jali experiment launch experiments/sweeps/paper.yaml --on slurm --dry-run",
        "jali experiment launch mine.yaml --on slurm --partition gpu --time 12:00:00 --wait",
    ),
)
def launch(
    sweep: Annotated[Path, typer.Argument(help="A YAML file; see docs/experiments.md.")],
    on: Annotated[str, typer.Option(help="local or slurm.")] = "local",
    max_parallel: Annotated[
        int | None, typer.Option(min=1, help="Jobs at a time.", show_default=False)
    ] = None,
    partition: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    time: Annotated[
        str | None, typer.Option(help="[default: 6:00:00]", rich_help_panel=JOB, show_default=False)
    ] = None,
    mem: Annotated[
        str | None, typer.Option(help="[default: 64GB]", rich_help_panel=JOB, show_default=False)
    ] = None,
    cpus_per_task: Annotated[
        int | None, typer.Option(help="[default: 8]", rich_help_panel=JOB, show_default=False)
    ] = None,
    gpus: Annotated[
        int | None, typer.Option(help="[default: 1]", rich_help_panel=JOB, show_default=False)
    ] = None,
    account: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    qos: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    constraint: Annotated[str | None, typer.Option(rich_help_panel=JOB)] = None,
    wait: Annotated[
        bool,
        typer.Option("--wait", help="Stay and watch on Slurm too; failed jobs are tried again."),
    ] = False,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="How often one experiment may be started.")
    ] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check all, say what would be done, do nothing.")
    ] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Redo what differs under these tags.")
    ] = False,
    results: Results = RESULTS,
    logs: Logs = LOGS,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Run every experiment of a sweep that is not done, on this machine or as a Slurm array.

    On this machine it stays until all are done, and Ctrl-C ends them. On Slurm it submits and
    leaves, unless --wait.
    """
    from dataclasses import replace

    from jali.experiments import launch as launching
    from jali.experiments.resources import Resources
    from jali.experiments.stages import all_stages
    from jali.experiments.sweep import read_sweep

    with _errors():
        if on not in ("local", "slurm"):
            refuse(f"--on is local or slurm, got {on!r}")
        _check_track(track)
        found = read_sweep(sweep)
        given = {
            "partition": partition, "time": time, "mem": mem, "cpus_per_task": cpus_per_task,
            "gpus": gpus, "account": account, "qos": qos, "constraint": constraint,
        }  # fmt: skip
        asked = found.resources.to_dict() | {k: v for k, v in given.items() if v is not None}
        found = replace(found, resources=Resources.from_dict(asked))
        place = _place(results, logs)
        cluster = _cluster(on, found.resources, place.sweep(found.name), found.name, max_parallel)
        if dry_run:
            _dry_run(found, place, cluster, as_json)
            return
        with _heard(quiet=as_json), _live(quiet=as_json) as watched:
            rows = launching.launch(
                found, place, cluster, all_stages, wait=wait or on == "local",
                overwrite=overwrite, track=track, max_attempts=max_attempts, watched=watched,
                every=1.0 if on == "local" else 5.0,
            )  # fmt: skip
    _show_standings(rows, as_json)
    if on == "slurm" and not wait:
        _say(f"Submitted. See: jali experiment status {found.name}", quiet=as_json)
    elif any(row.state != "done" for row in rows):
        count = sum(row.state != "done" for row in rows)
        fail(f"{count} of {len(rows)} experiments are not done; see their logs in {place.logs}")


@app.command(
    "status",
    epilog=examples("jali experiment status", "jali experiment status quick --watch 5"),
)
def status(
    tags: Tags = None,
    watch: Annotated[
        float | None, typer.Option(min=0.2, help="Draw it again every N seconds, until all rest.")
    ] = None,
    results: Results = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """Where experiments stand, from their own files and from Slurm."""
    import time

    from jali.experiments.status import find_tags, standings

    with _errors():
        place = _place(results, logs)
        names = find_tags(place, tags or [])
        rows = standings(place, names)
        if watch is not None and not as_json:
            with _live() as watched:
                while watched is not None:
                    watched(rows)
                    if not any(row.alive for row in rows):
                        break
                    time.sleep(watch)
                    rows = standings(place, names)
    _show_standings(rows, as_json)


@app.command(
    "logs", epilog=examples("jali experiment logs first", "jali experiment logs a --lines 5")
)
def show_logs(
    tags: Annotated[list[str], typer.Argument(help="Tags of experiments, or names of sweeps.")],
    lines: Annotated[int, typer.Option(min=1, help="Only the last N lines of each.")] = 40,
    scheduler: Annotated[
        bool, typer.Option("--scheduler", help="What the process itself printed, too.")
    ] = False,
    results: Results = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """What experiments said, newest last."""
    from jali.experiments import ledger
    from jali.experiments.status import find_tags

    found: dict[str, list[str]] = {}
    with _errors():
        place = _place(results, logs)
        for tag in find_tags(place, tags):
            found[tag] = _tail(place.log(tag), lines)
            for sent in ledger.submissions(place, tag)[-1:] if scheduler else []:
                found[tag] += _tail(Path(sent.folder) / f"{sent.job}_0_log.out", lines)
    if as_json:
        typer.echo(json.dumps(found, ensure_ascii=False))
        return
    for tag, text in found.items():
        typer.echo(f"── {tag}")
        typer.echo("\n".join(text) if text else "nothing yet")


@app.command("cancel", epilog=examples("jali experiment cancel quick"))
def cancel(
    tags: Annotated[list[str], typer.Argument(help="Tags of experiments, or names of sweeps.")],
    results: Results = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """Stop what waits or runs. What is complete is kept, and a retry goes on from there."""
    from jali.experiments import launch as launching
    from jali.experiments.status import find_tags

    with _errors():
        place = _place(results, logs)
        stopped = launching.cancel(place, find_tags(place, tags))
    if as_json:
        typer.echo(json.dumps({"cancelled": stopped}))
    else:
        typer.echo(f"cancelled: {', '.join(stopped) or 'nothing was waiting or running'}")


@app.command(
    "retry", epilog=examples("jali experiment retry quick", "jali experiment retry a b --on local")
)
def retry(
    tags: Annotated[list[str], typer.Argument(help="Tags of experiments, or names of sweeps.")],
    on: Annotated[
        str | None, typer.Option(help="local or slurm. [default: as before]", show_default=False)
    ] = None,
    max_attempts: Annotated[
        int, typer.Option(min=1, help="How often one experiment may be submitted in all.")
    ] = 3,
    max_parallel: Annotated[int | None, typer.Option(min=1, help="Jobs at a time.")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Stay and watch on Slurm too.")] = False,
    results: Results = RESULTS,
    logs: Logs = LOGS,
    track: Track = None,
    as_json: Json = False,
) -> None:
    """Submit again what failed, was pre-empted, lost, damaged or cancelled; the rest stays."""
    from jali.experiments import launch as launching
    from jali.experiments.stages import all_stages
    from jali.experiments.status import find_tags, standings

    with _errors():
        if on not in (None, "local", "slurm"):
            refuse(f"--on is local or slurm, got {on!r}")
        _check_track(track)
        place = _place(results, logs)
        names = find_tags(place, tags)

        def cluster(where: str, resources: Resources) -> Cluster:
            return _cluster(where, resources, place.results / "_sweeps", "retry", max_parallel)

        with _heard(quiet=as_json), _live(quiet=as_json) as watched:
            submitted, spent = launching.retry(
                place, names, cluster, all_stages, on=on, max_attempts=max_attempts, wait=wait,
                track=track, watched=watched,
            )  # fmt: skip
        rows = standings(place, names)
    if as_json:
        typer.echo(json.dumps({"submitted": submitted, "spent": spent}))
    else:
        _say(f"submitted again: {', '.join(submitted) or 'nothing needed it'}")
        _show_standings(rows, as_json)
    if spent:
        fail(
            f"{', '.join(spent)}: submitted {max_attempts} times already; read the log "
            f"(jali experiment logs {spent[0]}), or raise --max-attempts"
        )


@app.command(
    "collect",
    epilog=examples("jali experiment collect quick", "jali experiment collect a b --output tables"),
)
def collect(
    tags: Tags = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for table.csv, .json and .html.", show_default=False),
    ] = None,
    results: Results = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """All results in one table: CSV, JSON, and a page with quality over speed-up.

    The same result files always give the same bytes.
    """
    from jali.experiments.collect import collect as collected
    from jali.experiments.collect import write
    from jali.experiments.status import find_tags

    with _errors():
        place = _place(results, logs)
        table = collected(place, find_tags(place, tags or []))
        paths = [] if as_json and output is None else write(table, output or place.results)
    if as_json:
        typer.echo(table.to_json(), nl=False)
    else:
        _show_table(table.rows)
        _say("Written: " + ", ".join(map(str, paths)))
    if table.left_out:
        told = "; ".join(f"{tag}: {why}" for tag, why in table.left_out.items())
        fail(f"{len(table.left_out)} experiments are left out: {told}")


# What the commands share


@contextmanager
def _errors() -> Iterator[None]:
    """One sentence each: 2 for what was asked, 1 for what went wrong, 130 for Ctrl-C."""
    from jali.experiments.job import Stopped, sentence
    from jali.experiments.launch import LaunchError
    from jali.experiments.lock import HeldError
    from jali.experiments.scheduler import SlurmSilentError
    from jali.experiments.storage import UnreadableError

    try:
        yield
    except (LaunchError, HeldError, SlurmSilentError, UnreadableError) as error:
        fail(error)
    except FileNotFoundError as error:
        refuse(error)
    except (ValueError, TypeError) as error:
        refuse(error)
    except (OSError, MemoryError, ArithmeticError) as error:
        fail(sentence(error))
    except Stopped as error:
        typer.echo(f"jali: {error}", err=True)
        raise typer.Exit(INTERRUPTED) from None


def _place(results: Path, logs: Path) -> Place:
    from jali.experiments.place import Place

    return Place(results, logs)


def _check_track(track: str | None) -> None:
    if track is not None:
        from jali.experiments.track import check_tracker

        check_tracker(track)


def _experiment(
    *, place: Place, prompts: Path | None, metrics: str | None, **facts: Any
) -> Experiment:
    from jali.experiments.experiment import Experiment

    if prompts is not None:
        from jali.prompts import read_prompts

        facts["prompts"] = read_prompts(prompts)
    if metrics is not None:
        facts["metrics"] = tuple(name.strip() for name in metrics.split(",") if name.strip())
    if facts["masks"] is not None:
        from jali.maskbook import MaskBook

        facts["masks"] = str(Path(facts["masks"]).expanduser().absolute())
        MaskBook.open(facts["masks"]).close()  # before an hour of work, not after
    found = Experiment(**facts).completed()
    return found if found.calibrate or found.masks else _with_own_book(found, place)


def _with_own_book(found: Experiment, place: Place) -> Experiment:
    """--skip-calibrate takes the book that an earlier run left under this tag, if there is one."""
    from dataclasses import replace

    from jali.experiments.stage import why_again
    from jali.experiments.stages.calibration import Calibration
    from jali.experiments.stages.variant import BOOK

    own = place.folder(found.tag) / BOOK
    if not own.is_file():
        return found
    as_before = replace(found, calibrate=True)
    if as_before.wants_book and not why_again(Calibration(), as_before, place):
        return as_before  # complete and unchanged, so it is skipped by itself
    return replace(found, masks=str(own))


def _from_config(path: Path) -> Experiment:
    from jali.experiments.experiment import Experiment
    from jali.experiments.job import CONFIG
    from jali.experiments.storage import read_json

    return Experiment.from_dict(read_json(path, CONFIG)["experiment"]).completed()


def _cluster(
    on: str, resources: Resources, folder: Path, name: str, max_parallel: int | None
) -> Cluster:
    from jali.experiments.launch import OnSlurm, OnThisMachine

    try:
        import submitit  # noqa: F401
    except ImportError:
        refuse("launching needs submitit: pip install 'jali[slurm]'")
    if on == "slurm":
        return OnSlurm(folder / "jobs", resources, name, max_parallel)
    gpus = _gpus() if resources.gpus else 0
    room = max(1, gpus // resources.gpus) if gpus else None
    if gpus and resources.gpus > gpus:
        refuse(f"a job asks for {resources.gpus} GPUs, and this machine has {gpus}")
    if room is not None and max_parallel is not None and max_parallel > room:
        refuse(
            f"--max-parallel {max_parallel} jobs of {resources.gpus} GPUs each do not fit on the "
            f"{gpus} GPUs of this machine; at most {room} do"
        )
    return OnThisMachine(folder / "jobs", resources, max_parallel or room or 1, range(gpus))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _leads() -> bool:
    import os

    return os.environ.get("RANK", "0") == "0"


@contextmanager
def _heard(*, quiet: bool) -> Iterator[None]:
    """What jali logs, on stderr. Only what matters where something else is on the screen."""
    log = logging.getLogger("jali")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    handler.setLevel(logging.WARNING if quiet or sys.stderr.isatty() else logging.INFO)
    before = log.level
    log.setLevel(logging.DEBUG)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


@contextmanager
def _bar(*, quiet: bool) -> Iterator[Callable[[str, int, int, str], None] | None]:
    """A bar for each stage, on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if quiet or not console.is_terminal or not _leads():
        yield None
        return
    columns = (
        TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[what]}"),
        TimeRemainingColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as bar:
        tasks: dict[str, Any] = {}

        def told(stage: str, done: int, total: int, what: str) -> None:
            if stage not in tasks:
                tasks[stage] = bar.add_task(stage, total=total, what=what)
            bar.update(tasks[stage], completed=done, total=total, what=what)

        yield told


@contextmanager
def _live(*, quiet: bool = False) -> Iterator[Callable[[Sequence[Standing]], None] | None]:
    """The table, drawn in place on a terminal."""
    from rich.console import Console
    from rich.live import Live

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield (lambda rows: None) if not quiet else None  # noqa: ARG005
        return
    with Live(console=console, transient=True, auto_refresh=False) as live:
        yield lambda rows: live.update(_standings_table(rows), refresh=True)


def _show_standings(rows: Sequence[Standing], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps([row.to_dict() for row in rows], ensure_ascii=False))
        return
    from rich.console import Console

    console = Console()
    if not rows:
        _say("no experiments here yet")
        return
    console.print(_standings_table(rows))
    counts: dict[str, int] = {}
    for row in rows:
        counts[row.state] = counts.get(row.state, 0) + 1
    _say(", ".join(f"{count} {state}" for state, count in counts.items()))


def _standings_table(rows: Sequence[Standing]) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    shared = _shared_start([row.tag for row in rows])
    table = Table(box=box.SIMPLE, padding=(0, 1), pad_edge=False, title_justify="left")
    table.title = f"{shared}…" if shared else None
    table.add_column("experiment", overflow="fold", min_width=14)
    for name in ("state", "stage", "", "time", "left", "tries", "job"):
        right = name in ("time", "left", "tries")
        table.add_column(name, justify="right" if right else "left", no_wrap=True)
    if any(row.why for row in rows):
        table.add_column("", overflow="fold", min_width=12)
    for row in rows:
        colour = COLOURS[row.state]
        part = f" {row.done}/{row.total}" if row.total and row.state == "running" else ""
        table.add_row(
            escape(row.tag.removeprefix(shared)),
            f"[{colour}]{row.state}[/]",
            f"{row.stage or ''}{part}",
            _meter(row.share),
            _clock(row.seconds),
            _clock(row.seconds_left),
            str(max(row.attempts, row.submitted) or ""),
            row.job or "",
            *([escape(row.why)] if any(other.why for other in rows) else []),
        )
    return table


def _shared_start(tags: Sequence[str]) -> str:
    """What all tags of a sweep begin with: a table that repeats it has no room for the rest."""
    first, last = min(tags, default=""), max(tags, default="")
    same = next((i for i, pair in enumerate(zip(first, last, strict=False)) if len({*pair}) > 1), 0)
    start, dash, _ = first[:same].rpartition("-")
    return start + dash


def _meter(share: float) -> str:
    full = round(6 * share)
    return f"{'━' * full}[dim]{'━' * (6 - full)}[/] {share:4.0%}"


def _clock(seconds: float | None) -> str:
    if seconds is None:
        return ""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def _show_results(place: Place, tags: Sequence[str], as_json: bool, then: str) -> None:
    from jali.experiments.collect import collect as collected

    table = collected(place, tags)
    if as_json:
        typer.echo(table.to_json(), nl=False)
        return
    _show_table(table.rows)
    _say(then)


def _show_table(rows: Sequence[Any]) -> None:
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    metrics = sorted({name for row in rows for name in row if name.endswith(".mean")})
    shared = _shared_start([row["tag"] for row in rows])
    table = Table(box=box.SIMPLE, padding=(0, 1), pad_edge=False, title_justify="left")
    table.title = f"{shared}…" if shared else None
    table.add_column("experiment", overflow="fold", min_width=12)
    table.add_column("variant", no_wrap=True)
    for name in ("asked", "cost", "dense s", "s", "speed-up", *(m.split(".")[1] for m in metrics)):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        names = ("budget", "cost", "dense_seconds", "seconds", "speedup", *metrics)
        table.add_row(
            escape(row["tag"].removeprefix(shared)),
            escape(str(row["variant"])),
            *(_number(row.get(n)) for n in names),
        )
    Console().print(table)


def _number(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _dry_run(sweep: Sweep, place: Place, cluster: Cluster, as_json: bool) -> None:
    """What would be submitted, and what it would cost."""
    from jali.experiments.launch import OnSlurm
    from jali.experiments.scale import forecast

    found = [(experiment, forecast(experiment)) for experiment in sweep.experiments]
    hours = sum(f.seconds for _, f in found if f is not None) / 3600
    size = sum(f.bytes for _, f in found if f is not None) / 2**30
    script = cluster.script(len(found)) if isinstance(cluster, OnSlurm) else None
    if as_json:
        facts = {
            "sweep": sweep.name, "on": cluster.where, "resources": sweep.resources.to_dict(),
            "experiments": [experiment.to_dict() for experiment in sweep.experiments],
            "script": script, "h200_hours": round(hours, 2), "gib": round(size, 2),
        }  # fmt: skip
        typer.echo(json.dumps(facts, ensure_ascii=False))
        return
    for experiment, cost in found:
        known = "" if cost is None else f"  {cost.tokens:,} tokens, {_clock(cost.seconds)} on H200"
        done = "  (done)" if place.speed(experiment.tag).exists() else ""
        _say(f"{experiment.tag}{known}{done}")
    _say(
        f"{len(found)} experiments, about {hours:.1f} hours of one H200 without loading and "
        f"decoding, about {size:.1f} GiB on disk. Nothing was submitted."
    )
    if script is not None:
        _say(script)


def _tail(path: Path, lines: int) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


def _say(text: str, *, quiet: bool = False) -> None:
    from rich.console import Console

    Console(stderr=quiet).print(text, highlight=False, markup=False, soft_wrap=True)
