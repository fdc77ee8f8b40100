"""`jali experiment`: calibrate, benchmark, quality in one job; sweeps of them, here or on Slurm."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from jali.cli.experiment import cancel, collect, launch, logs, retry, run, status
from jali.cli.old_names import OldNames

app = typer.Typer(
    no_args_is_help=True,
    help="Speed and quality experiments, one or a sweep of them, on this machine or on Slurm.",
)


@app.callback()
def experiment() -> None:
    """Speed and quality experiments, one or a sweep of them, on this machine or on Slurm."""


def examples(lines: Sequence[str]) -> str:
    """The end of a help text; blank lines keep the examples on lines of their own."""
    return "\n\n".join(["Examples:", *lines])


app.command("run", cls=OldNames, epilog=examples(run.EXAMPLES))(run.run)
app.command("launch", epilog=examples(launch.EXAMPLES))(launch.launch)
app.command("status", epilog=examples(status.EXAMPLES))(status.status)
app.command("logs", epilog=examples(logs.EXAMPLES))(logs.show_logs)
app.command("cancel", epilog=examples(cancel.EXAMPLES))(cancel.cancel)
app.command("retry", epilog=examples(retry.EXAMPLES))(retry.retry)
app.command("collect", epilog=examples(collect.EXAMPLES))(collect.collect)
