"""`jali`: every command, one line each. Heavy imports wait until a command runs."""

from __future__ import annotations

from typing import Annotated

import typer

from jali.cli import bench, demo

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.add_typer(bench.app, name="bench")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"jali {version('jali')}")
        raise typer.Exit


EXAMPLES = ("jali demo", "jali demo --quick --budget 0.2", "jali demo --json > table.json")


@app.callback(epilog="\n\n".join(["Examples:", *EXAMPLES]))
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    """Training-free sparse attention for video and image diffusion transformers."""
    del version
