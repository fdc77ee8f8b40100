"""`jali experiment logs`: what experiments said."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from jali.cli.experiment.errors import errors
from jali.cli.experiment.options import LOGS, RESULTS, Json, Logs, NamedTags, ResultsFolder

EXAMPLES = ("jali experiment logs first", "jali experiment logs a --lines 5")


def show_logs(
    tags: NamedTags,
    lines: Annotated[int, typer.Option(min=1, help="Only the last N lines of each.")] = 40,
    scheduler: Annotated[
        bool, typer.Option("--scheduler", help="What the process itself printed, too.")
    ] = False,
    results: ResultsFolder = RESULTS,
    logs: Logs = LOGS,
    as_json: Json = False,
) -> None:
    """What experiments said, newest last."""
    from jali.experiments import ledger
    from jali.experiments.results import Results
    from jali.experiments.status import find_tags

    found: dict[str, list[str]] = {}
    with errors():
        place = Results(results, logs)
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


def _tail(path: Path, lines: int) -> list[str]:
    try:
        return path.read_text("utf-8", errors="replace").splitlines()[-lines:]
    except FileNotFoundError:
        return []
