"""`jali experiment status`, `logs` and `collect`: what became of experiments."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli.exits import fail
from jali.cli.experiment.options import AnyTags, NamedTags, with_results
from jali.cli.experiment.progress import show_live
from jali.cli.experiment.table import say, show_status, show_table
from jali.cli.output import print_json

if TYPE_CHECKING:
    from jali.experiments.results import Results


@with_results
def status(
    results: Results,
    as_json: bool,
    tags: AnyTags = None,
    watch: Annotated[
        float | None,
        typer.Option(min=0.2, metavar="<s>", help="Draw it again as often, until all rest."),
    ] = None,
) -> None:
    """Where experiments stand, from their own files and from Slurm."""
    from jali.experiments.status import read_status

    names = results.find_tags(tags or [])
    rows = read_status(results, names)
    with show_live(quiet=as_json) as on_status:
        while watch is not None and on_status is not None:
            on_status(rows)
            if not any(row.alive for row in rows):
                break
            time.sleep(watch)
            rows = read_status(results, names)
    show_status(rows, as_json)


@with_results
def logs(
    results: Results,
    as_json: bool,
    tags: NamedTags,
    lines: Annotated[int, typer.Option(min=1, help="Only the last N lines of each.")] = 40,
    scheduler: Annotated[
        bool, typer.Option("--scheduler", help="What the process itself printed, too.")
    ] = False,
) -> None:
    """What experiments said, newest last."""
    from jali.experiments.submission import last_submission

    found: dict[str, list[str]] = {}
    for tag in results.find_tags(tags):
        found[tag] = _tail(results.log(tag), lines)
        if scheduler and (sent := last_submission(results, tag)):
            found[tag] += _tail(Path(sent.folder) / f"{sent.job}_0_log.out", lines)
    if as_json:
        print_json(found)
        return
    for tag, text in found.items():
        say(f"── {tag}")
        say("\n".join(text) if text else "nothing yet")


def _tail(path: Path, lines: int) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []


@with_results
def collect(
    results: Results,
    as_json: bool,
    tags: AnyTags = None,
    output: Annotated[
        Path | None,
        typer.Option(help="Folder for table.csv, .json and .html.", show_default=False),
    ] = None,
) -> None:
    """All results in one table: CSV, JSON, and a page with quality over speed-up.

    The same result files always give the same bytes.
    """
    from jali.experiments.collect import collect as gather
    from jali.experiments.collect import write

    table = gather(results, results.find_tags(tags or []))
    paths = [] if as_json and output is None else write(table, output or results.root)
    if as_json:
        print_json(table.to_dict(), indent=1, allow_nan=False)
    else:
        show_table(table)
        say("Written: " + ", ".join(map(str, paths)))
    if table.left_out:
        told = "; ".join(f"{tag}: {why}" for tag, why in table.left_out.items())
        fail(f"{len(table.left_out)} experiments are left out: {told}")
