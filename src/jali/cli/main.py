"""`jali`: every command, one line each. Heavy imports wait until a command runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from jali.cli import (
    arena,
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
    methods,
    presets,
    tune,
)
from jali.cli.exits import INTERRUPTED, short_usage_errors
from jali.cli.old_names import OldNames
from jali.cli.options import Command, shorten_help
from jali.cli.output import write_any_sign


class Commands(TyperGroup):
    """The group of all commands: Ctrl-C ends any of them with 130, and nothing half-written."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        for param in self.get_params(ctx):
            shorten_help(param)
            if param.name == "install_completion":
                param.help = "Complete words with Tab, in this shell."  # type: ignore[attr-defined]
            elif param.name == "show_completion":
                param.hidden = True  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)

    def main(self, *args: Any, **more: Any) -> Any:
        write_any_sign()
        return super().main(*args, **more)

    def make_context(self, *args: Any, **more: Any) -> Any:
        with short_usage_errors():
            return super().make_context(*args, **more)

    def invoke(self, ctx: Any) -> Any:
        try:
            with short_usage_errors():
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
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def add(run: Callable[..., None], text: str, lines: Sequence[str] = (), **more: Any) -> None:
    """A command by its function's name; examples that its docstring has are not repeated."""
    epilog = examples(lines) if lines else None
    app.command(run.__name__, short_help=text, epilog=epilog, **({"cls": Command} | more))(run)


# In the order in which people need them; one line each, so that the help fits a screen.
add(demo.demo, "A first look, without any download.", demo.EXAMPLES)
add(generate.generate, "Prompts to clips, sparse or dense.", generate.EXAMPLES, cls=OldNames)
add(evaluate.evaluate, "Metrics of clips against their references.")
add(compare.compare, "Runs side by side, as one HTML page.")
add(export.export, "Tensors or lossless frames to mp4.")
add(
    calibrate.calibrate, "Record what a model attends to, once, in a MaskBook.",
    calibrate.EXAMPLES, cls=OldNames,
)  # fmt: skip
for group, text in (
    (book, "Look into a MaskBook, resample it, merge two."),
    (bench, "Measure speed, beside error or quality."),
    (experiment, "Speed and quality of a model, here or on Slurm."),
):
    app.add_typer(group.app, name=group.__name__.rpartition(".")[2], short_help=text)
add(inspect.inspect, "Which method suits a model.", inspect.EXAMPLES)
add(arena.arena, "All methods on finished clips, at equal work.", arena.EXAMPLES)
add(tune.tune, "A wanted quality or speed to a recipe.", tune.EXAMPLES)
add(methods.methods, "Every method in one line.", methods.EXAMPLES)
add(presets.presets, "Methods that have a name.", presets.EXAMPLES)
add(doctor.doctor, "What runs here, why not the rest, what to expect.", doctor.EXAMPLES)


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"jali {version('jali')}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Say which version.")
    ] = False,
) -> None:
    """Training-free sparse attention for video and image diffusion transformers.

    Begin with: jali demo, jali doctor, jali tune
    """
    del version
