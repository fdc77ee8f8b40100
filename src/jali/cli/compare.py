"""`jali compare`: runs side by side, on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jali.cli.exits import input_errors, job_errors
from jali.cli.options import Json, check_file, read_metrics
from jali.cli.output import print_json

LARGE = 200  # MB


def compare(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="The reference, then the others: run folders or folders of videos; or one folder "
            "that holds several runs.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", help="The page; only one of ours is replaced.")
    ] = Path("compare.html"),
    metrics: Annotated[
        str,
        typer.Option(
            help="Measure these now, comma-separated, or none (without it: each folder's "
            "metrics.json, or the usual ones where there is none).",
            show_default=False,
        ),
    ] = "",
    name: Annotated[
        list[str] | None, typer.Option(help="What to call a run; once for each.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Only the first N clips.")] = None,
    as_json: Json = False,
) -> None:
    """Put runs side by side on one page: players, wipe, difference, curves, costs, plans.

    Examples:

      jali compare runs/mine

      jali compare runs/dense runs/entropy runs/psa --output page.html

      jali compare before/ after/ --metrics psnr,ssim --name before --name after

      jali compare runs/mine --json --metrics none
    """
    from rich.console import Console

    with input_errors():
        asked = read_metrics(metrics, "none")
        wanted = [] if asked == ["none"] else asked or None
        for folder in folders:
            if not folder.expanduser().exists():
                raise ValueError(f"there is no folder {folder}")
        check_file(output)
    with job_errors():
        from jali.evaluation.report import check_output, read_comparison, render_page, write_page

        check_output(output)  # before any work, not after
        with Console(stderr=True).status("reading") as status:
            found = read_comparison(folders, name or [], wanted, limit, status.update)
            write_page(output, render_page(found))
    if as_json:
        print_json({**found.to_dict(), "page": str(output)}, indent=1, allow_nan=False)
        return
    for note in found.notes:
        typer.echo(f"jali: {note}", err=True)
    size = output.stat().st_size / 1e6
    if size > LARGE:
        typer.echo("jali: browsers take long over such a page; --limit takes fewer clips", err=True)
    typer.echo(f"{found.headline()}\n{output} ({size:.1f} MB): open it in a browser")
