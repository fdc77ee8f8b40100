"""`jali bench`: measurements on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jali.cli.exits import input_errors, job_errors, refuse
from jali.cli.old_names import OldNames
from jali.cli.options import MACHINE, SIZES, PromptFile, Prompts, with_settings
from jali.generation.settings import Settings

if TYPE_CHECKING:
    from jali.evaluation.bench.kernel import KernelRow
    from jali.evaluation.bench.pipeline import PipelineRow

app = typer.Typer(no_args_is_help=True, help="Measure speed, each figure beside its error.")

SHAPES = "wan-480p,wan-720p,cogvideox-5b,hunyuan-540p"
DENSITIES = "1.0,0.7,0.5,0.3,0.2,0.1"
# The published methods, and the two controls that any of them has to beat.
METHODS, BUDGETS = "entropy,psa,rf_v2,ada_bsa,random,local", "0.5,0.3,0.2"


@app.callback()
def bench() -> None:
    """Measure speed, each figure beside its error."""


@app.command("kernel")
def kernel(
    shapes: Annotated[
        str, typer.Option(help="Comma-separated; psa-32k and tiny are further ones.")
    ] = SHAPES,
    densities: Annotated[str, typer.Option(help="Asked budgets, comma-separated.")] = DENSITIES,
    inputs: Annotated[
        str, typer.Option(help="gaussian, structured, or both.")
    ] = "gaussian,structured",
    backends: Annotated[str, typer.Option(help="Comma-separated.")] = "fa4,triton,flex,torch",
    methods: Annotated[str, typer.Option(help="Whole calls, comma-separated; 'all' for all.")] = "",
    device: Annotated[str, typer.Option(help="cuda or cpu; none given: cuda if there.")] = "",
    repeats: Annotated[
        int, typer.Option(min=1, help="Timed calls per row; the median counts.")
    ] = 10,
    output: Annotated[Path | None, typer.Option(help="Write all rows to this JSON file.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw speed-up over cost to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Attention alone, dense and sparse, in one run.

    Examples:

      jali bench kernel --shapes wan-480p --densities 0.5,0.3

      jali bench kernel --output results.json --plot results.svg
    """
    import torch

    from jali.backends import BACKENDS
    from jali.evaluation.bench.inputs import KINDS, SHAPES
    from jali.evaluation.bench.kernel import METHODS, run
    from jali.evaluation.bench.machine import machine
    from jali.files import write_json

    where = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    chosen = [SHAPES[name] for name in _names(shapes, list(SHAPES), "shape")]
    budgets = _budgets(densities)
    kinds = _names(inputs, list(KINDS), "kind of input")
    names = _names(backends, list(BACKENDS), "backend")
    calls: list[str] = list(METHODS) if methods == "all" else []
    if methods and methods != "all":
        calls = _names(methods, list(METHODS), "method")
    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    console = Console(stderr=as_json)
    rows: list[KernelRow] = []
    with console.status("measuring") as status:
        for row in run(chosen, kinds, budgets, where, dtype, names, repeats, calls):
            rows.append(row)
            status.update(f"{row.shape}, {row.inputs}: {row.backend} at {row.budget}")
    result: dict[str, Any] = {
        "what": "jali bench kernel",
        "machine": machine(where),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": [asdict(row) for row in rows],
    }
    if output is not None:
        write_json(output, result, sort_keys=False)
    if plot is not None:
        from jali.evaluation.bench.plot import plot_speedups

        plot_speedups(rows, plot)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        for part in _tables(rows):
            console.print(part)


@app.command("pipeline", cls=OldNames)
@with_settings("model", "warmup_frac", "backend", *SIZES, "arguments", "lora", *MACHINE)
def pipeline(
    settings: Settings,
    methods: Annotated[
        str, typer.Option(help="Methods and presets, comma-separated; dense is always there.")
    ] = METHODS,
    budgets: Annotated[str, typer.Option(help="Asked budgets, comma-separated.")] = BUDGETS,
    masks: Annotated[
        Path | None, typer.Option(help="A calibrated MaskBook: cached too.", show_default=False)
    ] = None,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first N.", show_default="2 of the shipped set"),
    ] = None,
    output_dir: Annotated[
        Path | None,
        typer.Option(
            help="A new folder: results.json, pareto.svg, every clip.", show_default=False
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Whole generations: time against quality, every method and dense in one run.

    Examples:

      jali bench pipeline --model nano --budgets 0.5,0.3

      jali bench pipeline --model wan-t2v-1.3b --methods entropy,psa_balanced --num-prompts 4

      jali bench pipeline --model nano --masks nano.safetensors --output-dir runs/cached
    """
    from jali.cli.generate import chosen_prompts
    from jali.cli.quiet import quiet_libraries
    from jali.evaluation.bench import pipeline as bench_
    from jali.generation.produce import check_sizes, load

    with input_errors():
        asked = [name.strip() for name in methods.split(",") if name.strip()]
        runs = bench_.candidates(
            settings, asked, _budgets(budgets), None if masks is None else str(masks)
        )
        few = 2 if num_prompts is None and not prompt and prompts is None else num_prompts
        texts = chosen_prompts(settings.model, prompt, prompts, few)
        folder = output_dir or Path("outputs") / f"bench-{runs[bench_.DENSE].model}"
        bench_.check_empty(folder)
    quiet_libraries()
    with job_errors():
        pipe = load(runs[bench_.DENSE])
        check_sizes(pipe, runs[bench_.DENSE])
        console = Console(stderr=True)
        with console.status("warming up", spinner="line") as status:
            rows = bench_.run(
                pipe, texts, runs, folder,
                lambda label, tick: status.update(
                    f"{label}: clip {tick.clip + 1} of {tick.clips}, step {tick.step}/{tick.steps}"
                ),
            )  # fmt: skip
        drawn = _pareto(rows, folder, f"{runs[bench_.DENSE].model}, {len(texts)} prompts")
    if as_json:
        typer.echo((folder / bench_.RESULTS).read_text(encoding="utf-8").strip())
        return
    Console().print(_pipeline_table(rows))
    files = ", ".join([bench_.RESULTS, *drawn])
    Console().print(f"{folder}: {files}, and a run folder for every row", highlight=False)


def _pareto(rows: list[PipelineRow], folder: Path, title: str) -> list[str]:
    """The picture; nothing where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        typer.echo("jali: no picture without matplotlib: pip install 'jali[report]'", err=True)
        return []
    from jali.evaluation.bench.pipeline import PLOT
    from jali.evaluation.bench.plot import plot_pareto

    plot_pareto(rows, folder / PLOT, title)
    return [PLOT]


def _pipeline_table(rows: list[PipelineRow]) -> Table:
    caption = "per clip; × is over dense in this run; ● no other row is both faster and nearer"
    table = Table(caption=caption, caption_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0))
    table.add_column("", no_wrap=True)
    found = dict.fromkeys(name for row in rows for name in row.quality)
    metrics = [name for name in ("psnr", "ssim", "lpips") if name in found]
    for name in ("cost", "s", "×", "model s", "×", *metrics):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            f"{row.label}{' ●' if row.best else ''}",
            f"{row.cost:.3f}",
            f"{row.seconds:.2f}",
            f"{row.speedup:.2f}",
            _number(row.seconds_transformer, ".2f"),
            _number(row.speedup_transformer, ".2f"),
            *(_quality(row, name) for name in metrics),
            style="dim" if row.method in ("random", "local") else "",
        )
    return table


def _quality(row: PipelineRow, metric: str) -> str:
    if not row.quality:
        return ""
    value = row.quality.get(metric)
    if metric == "psnr":
        return "same" if value is None else f"{value:.2f}"
    return _number(value, ".4f")


def _names(given: str, known: list[str], what: str) -> list[str]:
    from jali.methods import near

    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            refuse(f"unknown {what} {name!r}{near(name, known)}")
    if not names:
        refuse(f"name at least one {what}: {', '.join(known)}")
    return names


def _budgets(given: str) -> list[float]:
    try:
        budgets = [float(part) for part in given.split(",")]
    except ValueError:
        budgets = []
    if not budgets or any(not 0 < b <= 1 for b in budgets):
        refuse(f"budgets are numbers in (0, 1], got {given!r}")
    return budgets


def _tables(rows: list[KernelRow]) -> Iterator[Table | str]:
    """A table for every shape and kind of input, then why some backends are missing."""
    for key in dict.fromkeys((row.shape, row.inputs) for row in rows):
        here = [row for row in rows if (row.shape, row.inputs) == key]
        yield _table(f"{key[0]}, {key[1]} inputs", [row for row in here if row.why_not is None])
    for name in dict.fromkeys(row.backend for row in rows if row.why_not):
        reasons = next(row.why_not for row in rows if row.backend == name and row.why_not)
        yield f"[bold]{name}[/] did not run: {escape(reasons or '')}"


def _table(title: str, rows: list[KernelRow]) -> Table:
    caption = "ms; × is over the fastest dense kernel of this run; whole: planning and attention"
    table = Table(title=title, caption=caption, box=box.SIMPLE, padding=0, pad_edge=False)
    table.add_column("", no_wrap=True)
    for name in ("asked", "cost", "ms", "TF/s", "×", "plan", "whole", "×", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.backend if row.method in ("dense", "entropy") else row.method,
            f"{row.budget:.3g}",
            f"{row.cost:.3f}",
            f"{row.ms:.3f}",
            f"{row.tflops:.0f}",
            f"{row.speedup:.2f}",
            _number(row.plan_ms, ".3f"),
            _number(row.whole_ms, ".3f"),
            _number(row.whole_speedup, ".2f"),
            _number(row.error, ".1e"),
        )
    return table


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)
