"""`jali experiment`: calibrate, benchmark, quality in one job; sweeps of them, here or on Slurm."""

from __future__ import annotations

import typer

from jali.cli.experiment import launch, results, run
from jali.cli.old_names import OldNames
from jali.cli.options import Command

app = typer.Typer(
    no_args_is_help=True,
    help="Speed and quality experiments, one or a sweep of them, on this machine or on Slurm.",
)


@app.callback()
def experiment() -> None:
    """Speed and quality experiments, one or a sweep of them, on this machine or on Slurm."""


EXAMPLES = {
    run.run: run.EXAMPLES,
    launch.launch: (
        "launch experiments/sweeps/quick.yaml --on local --max-parallel 2",
        "launch experiments/sweeps/paper.yaml --on slurm --dry-run",
        "launch mine.yaml --on slurm --partition gpu --time 12:00:00 --wait",
    ),
    results.status: ("status", "status quick --watch 5"),
    results.logs: ("logs first", "logs a --lines 5"),
    launch.cancel: ("cancel quick",),
    launch.retry: ("retry quick", "retry a b --on local"),
    results.collect: ("collect quick", "collect a b --output tables"),
}
for command, lines in EXAMPLES.items():
    calls = [line if "jali" in line else f"jali experiment {line}" for line in lines]
    # Blank lines keep the examples on lines of their own.
    epilog = "\n\n".join(["Examples:", *calls])
    app.command(command.__name__, cls=OldNames if command is run.run else Command, epilog=epilog)(
        command
    )
