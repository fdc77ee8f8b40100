"""`jali methods`: every method in one line."""

from __future__ import annotations

import dataclasses
import inspect
import re
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli import completion
from jali.cli.exits import input_errors
from jali.cli.options import Json
from jali.cli.output import make_table, print_json, say
from jali.name import CONTROLS, method_names
from jali.value import suggest

if TYPE_CHECKING:
    from jali.methods import Method

EXAMPLES = ("jali methods", "jali methods rd", "jali methods --json")


def methods(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one with its options.",
            show_default=False,
            autocompletion=completion.registered,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the methods, or show one with its options."""
    with input_errors():
        known = method_names()
        if name is not None and name not in known:
            raise ValueError(f"unknown method {name!r}{suggest(name, known)}")
    from jali.methods import METHODS

    found = [describe(METHODS[one]) for one in ([name] if name else METHODS)]
    if as_json:
        print_json(found if name is None else found[0])
    elif name is None:
        rows = [(one["name"], one["reads"], one["what"]) for one in found]
        head, caption = ("method", "reads", "what it does"), "jali methods NAME: its options"
        say(make_table(head, rows, left=2, wrap_last=True, caption=caption))
    else:
        (one,) = found
        say(f"{one['name']}: {one['what']}\nreads {one['reads']}; budget: {one['budget']}")
        for option, usual in one["options"].items():
            say(f"  {option} = {usual}")


def describe(kind: type[Method]) -> dict[str, Any]:
    """A method from its class: the first sentence of its docstring, what its plans depend on, and
    its options with their defaults."""
    made = kind()
    return {
        "name": kind.name,
        "what": sentence(kind),
        "reads": reads(made),
        "budget": "its own" if made.mean_budget is not None else "found for what is asked",
        "control": kind.name in CONTROLS,
        "options": {f.name: repr(getattr(made, f.name)) for f in dataclasses.fields(made)},  # type: ignore[arg-type]
    }


def sentence(kind: type[Method]) -> str:
    """The first that the class says of itself."""
    text = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return re.split(r"\. |; ", text)[0].removesuffix(".")


def reads(method: Method) -> str:
    """What its plans depend on."""
    if method.name == "dense":
        return "q, k, v"
    if method.name in CONTROLS:
        return "nothing"
    tables = ", kept" if method.keeps_tables else ""
    return ("q, k, v" if method.needs_values else "q, k") + tables
