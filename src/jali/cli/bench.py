"""`jali bench`: measurements on this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from jali.cli import completion
from jali.cli.arena import compare
from jali.cli.exits import input_errors, job_errors
from jali.cli.old_names import OldNames
from jali.cli.options import (
    MACHINE,
    SIZES,
    Command,
    PromptFile,
    Prompts,
    check_file,
    check_folder,
    read_budgets,
    read_names,
    with_settings,
)
from jali.cli.output import can_draw, make_table, number, print_json, progress_bar, say, tell_clips
from jali.cli.quiet import quiet_libraries
from jali.device import check_device
from jali.generation.settings import Settings
from jali.name import backend_names, method_names, preset_names, resolve_model

if TYPE_CHECKING:
    from rich.table import Table

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


@app.command("kernel", cls=Command)
def kernel(
    shapes: Annotated[
        str,
        typer.Option(
            help="Comma-separated; psa-32k and tiny are further ones.",
            show_default=SHAPES.replace(",", ", "),
        ),
    ] = SHAPES,
    densities: Annotated[str, typer.Option(help="Asked budgets, comma-separated.")] = DENSITIES,
    inputs: Annotated[
        str, typer.Option(help="gaussian, structured, or both.")
    ] = "gaussian,structured",
    backends: Annotated[
        str,
        typer.Option(
            help="Comma-separated.", autocompletion=completion.several(completion.backends)
        ),
    ] = "fa4,triton,flex,torch",
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
    with input_errors():
        if device:
            check_device(device)
        budgets = read_budgets(densities, "--densities: budgets")
        names = _names(backends, backend_names()[1:], "backend", "--backends")
        for file, flag in ((output, "--output"), (plot, "--plot")):
            check_file(file, flag)
        from jali.evaluation.bench.inputs import KINDS, SHAPES
        from jali.evaluation.bench.kernel import METHODS, run
        from jali.evaluation.bench.machine import machine
        from jali.files import write_json
        from jali.integration.models.checkpoint import choose_device

        chosen = [SHAPES[name] for name in _names(shapes, SHAPES, "shape", "--shapes")]
        kinds = _names(inputs, KINDS, "kind of input", "--inputs")
        calls = list(METHODS)
        if methods != "all":
            calls = read_names(methods, METHODS, "method", "--methods")
        where = choose_device(device or None)
    import torch

    dtype = torch.bfloat16 if where.type == "cuda" else torch.float32
    console = Console(stderr=as_json)
    rows: list[KernelRow] = []
    with job_errors(), console.status("measuring") as status:
        for row in run(chosen, kinds, budgets, where, dtype, names, repeats, calls):
            rows.append(row)
            status.update(f"{row.shape}, {row.inputs}: {row.backend} at {row.budget}")
    result: dict[str, Any] = {
        "what": "jali bench kernel",
        "machine": machine(where),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": [asdict(row) for row in rows],
    }
    with job_errors():
        if output is not None:
            write_json(output, result, sort_keys=False)
        if plot is not None:
            from jali.evaluation.bench.plot import plot_speedups

            plot_speedups(rows, plot)
    if as_json:
        print_json(result)
    else:
        for part in _tables(rows):
            console.print(part)


@app.command("pipeline", cls=OldNames)
@with_settings(
    "model", "recipe", "warmup_frac", "backend", *SIZES, "arguments", "lora", *MACHINE, "compile"
)
def pipeline(
    settings: Settings,
    methods: Annotated[
        str,
        typer.Option(
            help="Methods and presets, comma-separated; dense is always there.",
            autocompletion=completion.several(completion.methods),
        ),
    ] = METHODS,
    budgets: Annotated[str, typer.Option(help="Asked budgets, comma-separated.")] = BUDGETS,
    totals: Annotated[
        str | None,
        typer.Option(
            help="Instead of budgets, equal achieved shares of all work: as jali arena.",
            show_default=False,
        ),
    ] = None,
    masks: Annotated[Path | None, typer.Option(help="A calibrated MaskBook: cached too.")] = None,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first N.", show_default="2 of the shipped set"),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="A new folder: results.json, pareto.svg, every clip.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Whole generations: time against quality, every method and dense in one run.

    Examples:

      jali bench pipeline --model nano --budgets 0.5,0.3

      jali bench pipeline --model wan-t2v-1.3b --methods entropy,psa_balanced --num-prompts 4

      jali bench pipeline --model nano --masks nano.safetensors --output-dir runs/cached
    """
    from jali.files import read_json
    from jali.generation.prompts import select_prompts

    if totals is not None:
        with input_errors():
            for flag, other in (
                ("--masks", masks),
                ("--warmup-frac", settings.warmup_frac),
                ("--recipe", settings.recipe),
            ):
                if other is not None:
                    raise ValueError(f"{flag} does not go with --totals; leave one of them out")
            texts = select_prompts(settings.model, prompt, prompts, num_prompts, shipped=2)
            shares = read_budgets(totals, "--totals")
            folder = output_dir or Path("outputs") / f"arena-{resolve_model(settings.model)}"
        compare(
            settings, folder, shares, methods.replace("-", "_"), "graded", texts, 1, None, as_json,
            "--output-dir",
        )  # fmt: skip
        return
    with input_errors():
        known = (*method_names(), *preset_names(settings.model))
        asked = read_names(methods.replace("-", "_"), known, "method or preset", "--methods")
        shares = read_budgets(budgets, "--budgets")
        texts = select_prompts(settings.model, prompt, prompts, num_prompts, shipped=2)
        check_folder(output_dir)
        if masks is not None:
            replace(settings, masks=str(masks), recipe=None).check()
        from jali.evaluation.bench import pipeline as bench_
        from jali.generation.produce import check_sizes, load

        book = None if masks is None else str(masks)
        runs = bench_.candidates(settings, asked, shares, book)
        dense = runs[bench_.DENSE]
        folder = output_dir or Path("outputs") / f"bench-{dense.model}"
        bench_.check_empty(folder)
    quiet_libraries()
    with job_errors(), progress_bar(quiet=as_json) as tell:
        pipe = load(dense)
        check_sizes(pipe, dense)
        tell("warming up", 0, 1)
        rows = bench_.run(pipe, texts, runs, folder, tell_clips(tell))
        files = [bench_.RESULTS]
        if can_draw():
            from jali.evaluation.bench.plot import plot_pareto

            plot_pareto(rows, folder / bench_.PLOT, f"{dense.model}, {len(texts)} prompts")
            files.append(bench_.PLOT)
    result = read_json(folder / bench_.RESULTS)
    if as_json:
        print_json(result, indent=1)
        return
    Console().print(_pipeline_table(rows))
    say(f"warm-up, with what is compiled: {result['warm_up_seconds']:.1f} s, in no row")
    say(f"{folder}: {', '.join(files)}, and a run folder for every row")


def _pipeline_table(rows: list[PipelineRow]) -> Table:
    found = dict.fromkeys(name for row in rows for name in row.quality)
    metrics = [name for name in ("psnr", "ssim", "lpips") if name in found]
    controls = {row.label for row in rows if row.method in ("random", "local")}
    return make_table(
        ("", "cost", "clip\ns", "clip\n×", "calls\ns", "calls\n×", *metrics),
        [
            (
                f"{row.label}{' ●' if row.best else ''}",
                f"{row.cost:.3f}",
                f"{row.seconds:.2f}",
                f"{row.speedup:.2f}",
                number(row.seconds_transformer, ".2f"),
                number(row.speedup_transformer, ".2f"),
                *(_quality(row, name) for name in metrics),
            )
            for row in rows
        ],
        dim=lambda row: row[0].removesuffix(" ●") in controls,
        caption="measured after a warm-up, means of one clip: the whole and its transformer calls; "
        "× is over dense in this run; ● no other row is both faster and nearer",
    )


def _quality(row: PipelineRow, metric: str) -> str:
    if not row.quality:
        return ""
    value = row.quality.get(metric)
    if metric == "psnr":
        return "same" if value is None else f"{value:.2f}"
    return number(value, ".4f")


def _names(given: str, known: Iterable[str], what: str, flag: str) -> list[str]:
    names = read_names(given, known, what, flag)
    if not names:
        raise ValueError(f"{flag}: name at least one {what}: {', '.join(known)}")
    return names


def _tables(rows: list[KernelRow]) -> Iterator[Table | str]:
    """A table for every shape and kind of input, then why some backends are missing."""
    for key in dict.fromkeys((row.shape, row.inputs) for row in rows):
        here = [row for row in rows if (row.shape, row.inputs) == key]
        yield _table(f"{key[0]}, {key[1]} inputs", [row for row in here if row.why_not is None])
    for name in dict.fromkeys(row.backend for row in rows if row.why_not):
        reasons = next(row.why_not for row in rows if row.backend == name and row.why_not)
        yield f"[bold]{name}[/] did not run: {escape(reasons or '')}"


def _table(title: str, rows: list[KernelRow]) -> Table:
    return make_table(
        ("", "asked", "cost", "ms", "TF/s", "×", "plan", "whole", "whole\n×", "rounding"),
        [
            (
                row.backend if row.method in ("dense", "entropy") else row.method,
                f"{row.budget:.3g}",
                f"{row.cost:.3f}",
                f"{row.ms:.3f}",
                f"{row.tflops:.0f}",
                f"{row.speedup:.2f}",
                number(row.plan_ms, ".3f"),
                number(row.whole_ms, ".3f"),
                number(row.whole_speedup, ".2f"),
                number(row.error, ".1e"),
            )
            for row in rows
        ],
        title=title,
        caption="ms; × is over the fastest dense kernel of this run; whole: planning and "
        "attention; rounding: against fp32 over the same plan, not what skipping does",
        pad_edge=False,
    )
