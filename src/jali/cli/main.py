"""`jali`: every command, one line each. Heavy imports wait until a command runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jali.cli import (
    bench,
    book,
    calibrate,
    compare,
    demo,
    doctor,
    evaluate,
    experiment,
    export,
    generate,
    inspect,
    presets,
)
from jali.cli.exits import INTERRUPTED
from jali.cli.old_names import OldNames


class Commands(TyperGroup):
    """The group of all commands: Ctrl-C ends any of them with 130, and nothing half-written."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("jali: interrupted; what is finished is kept", err=True)
            raise typer.Exit(INTERRUPTED) from None


def examples(lines: Sequence[str]) -> str:
    """The end of a help text; blank lines keep the examples on lines of their own."""
    return "\n\n".join(["Examples:", *lines])


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


# In the order in which people need them; one line each, so that the help fits a screen.
app.command(
    "demo",
    short_help="A first look, without any download.",
    epilog=examples(demo.EXAMPLES),
)(demo.demo)
app.command(
    "generate",
    cls=OldNames,
    short_help="Prompts to clips, sparse or dense.",
    epilog=examples(generate.EXAMPLES),
)(generate.generate)
app.command("evaluate", short_help="Metrics of clips against their references.")(evaluate.evaluate)
app.command("compare", short_help="Runs side by side, as one HTML page.")(compare.compare)
app.command("export", short_help="Tensors or lossless frames to mp4.")(export.export)
app.command(
    "calibrate",
    cls=OldNames,
    short_help="Record what a model attends to, once, in a MaskBook.",
    epilog=examples(calibrate.EXAMPLES),
)(calibrate.calibrate)
app.add_typer(book.app, name="book", short_help="Look into a MaskBook, resample it, merge two.")
app.add_typer(bench.app, name="bench", short_help="Measure speed, beside error or quality.")
app.add_typer(
    experiment.app, name="experiment", short_help="Speed and quality of a model, here or on Slurm."
)
app.command(
    "inspect",
    short_help="Which method suits a model.",
    epilog=examples(inspect.EXAMPLES),
)(inspect.inspect)
app.command("presets", short_help="Methods that have a name.", epilog=examples(presets.EXAMPLES))(
    presets.presets
)
app.command(
    "doctor",
    short_help="What runs here, why not the rest, what to expect.",
    epilog=examples(doctor.EXAMPLES),
)(doctor.doctor)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"jali {version('jali')}")
        raise typer.Exit


@app.callback(epilog="Begin with: jali demo, jali doctor, jali generate --with-dense")
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    """Training-free sparse attention for video and image diffusion transformers."""
    del version
