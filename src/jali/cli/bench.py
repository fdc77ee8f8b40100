"""`jali bench`: measurements on this machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from jali.backends import BACKENDS
from jali.bench import record
from jali.bench.inputs import KINDS
from jali.bench.kernel import DENSITIES, METHODS, Row, run
from jali.bench.shapes import SHAPES
from jali.methods import near

app = typer.Typer(no_args_is_help=True, help="Measure speed, each figure beside its error.")

MODELS = "wan-480p,wan-720p,cogvideox-5b,hunyuan-540p"


@app.callback()
def bench() -> None:
    """Measure speed, each figure beside its error."""


@app.command("kernel")
def kernel(
    shapes: Annotated[str, typer.Option(help=f"Comma-separated: {', '.join(SHAPES)}.")] = MODELS,
    densities: Annotated[str, typer.Option(help="Asked budgets, comma-separated.")] = ",".join(
        map(str, DENSITIES)
    ),
    inputs: Annotated[str, typer.Option(help="gaussian, structured, or both.")] = ",".join(KINDS),
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
    rows: list[Row] = []
    with console.status("measuring") as status:
        for row in run(chosen, kinds, budgets, where, dtype, names, repeats, calls):
            rows.append(row)
            status.update(f"{row.shape}, {row.inputs}: {row.backend} at {row.budget}")
    result: dict[str, Any] = {
        "what": "jali bench kernel",
        "machine": record.machine(where),
        "dtype": str(dtype).removeprefix("torch."),
        "rows": [asdict(row) for row in rows],
    }
    if output is not None:
        record.write(output, result)
    if plot is not None:
        from jali.bench.plot import speedups

        speedups(rows, plot)
    if as_json:
        typer.echo(json.dumps(result))
    else:
        for part in _tables(rows):
            console.print(part)


def _names(given: str, known: list[str], what: str) -> list[str]:
    names = [name.strip() for name in given.split(",") if name.strip()]
    for name in names:
        if name not in known:
            raise typer.BadParameter(f"unknown {what} {name!r}{near(name, known)}")
    if not names:
        raise typer.BadParameter(f"name at least one {what}: {', '.join(known)}")
    return names


def _budgets(given: str) -> list[float]:
    try:
        budgets = [float(part) for part in given.split(",")]
    except ValueError:
        raise typer.BadParameter(f"densities are numbers in (0, 1], got {given!r}") from None
    if not budgets or any(not 0 < b <= 1 for b in budgets):
        raise typer.BadParameter(f"densities are numbers in (0, 1], got {given!r}")
    return budgets


def _tables(rows: list[Row]) -> Iterator[Table | str]:
    """A table for every shape and kind of input, then why some backends are missing."""
    for key in dict.fromkeys((row.shape, row.inputs) for row in rows):
        here = [row for row in rows if (row.shape, row.inputs) == key]
        yield _table(f"{key[0]}, {key[1]} inputs", [row for row in here if row.why_not is None])
    for name in dict.fromkeys(row.backend for row in rows if row.why_not):
        reasons = next(row.why_not for row in rows if row.backend == name and row.why_not)
        yield f"[bold]{name}[/] did not run: {escape(reasons or '')}"


def _table(title: str, rows: list[Row]) -> Table:
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
