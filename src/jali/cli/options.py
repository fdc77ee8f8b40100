"""The options of a run, made from the descriptions in `Settings`, and others that are shared."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from typer.core import TyperCommand

from jali.cli.exits import input_errors
from jali.error import show
from jali.generation import settings as described
from jali.generation.prompts import as_typed
from jali.generation.settings import SettingDescription, SettingError, Settings

ATTENTION, SIZE, PLACE = described.ATTENTION, described.SIZE, described.PLACE
T = TypeVar("T")
DESCRIPTIONS: Mapping[str, SettingDescription] = {
    own.name: own.metadata["description"] for own in fields(Settings) if own.name != "attention"
}
# What `with_settings` is mostly asked for.
SIZES = ("steps", "guidance", "seed", "height", "width", "num_frames")
MACHINE = ("path", "device", "dtype", "cpu_offload")
PARALLEL = ("context_parallel", "tensor_parallel")

Json = Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")]
PromptFile = Annotated[
    Path | None, typer.Option(help="A text file, one prompt a line.", show_default=False)
]
Prompts = Annotated[
    list[str] | None, typer.Option(help="One clip; again for more.", show_default=False)
]


def with_settings(*names: str, **changes: Mapping[str, Any]) -> Callable[..., Any]:
    """Give a command the options of these settings (of all, where none is named), and hand it the
    finished `Settings` as its argument `settings`.

    The command's own parameters stay as they are. `changes` replaces words of a description for
    one command, as `masks={"help": "A book to replay instead of calibrating."}`. A value that a
    setting cannot have ends the command with code 2 and the flag's name.

    >>> @app.command()
    ... @with_settings("model", "steps", "device")
    ... def measure(settings: Settings, repeats: int = 3) -> None: ...
    """
    wanted = {
        name: replace(about, **changes.get(name, {}))
        for name, about in DESCRIPTIONS.items()
        if not names or name in names
    }

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        hints = get_type_hints(command, {"Settings": Settings, **command.__globals__}, None, True)
        own = [p for p in inspect.signature(command).parameters.values() if p.name != "settings"]
        # The model first, then what is the command's own, then the rest, panel by panel.
        first = [_parameter(name, about) for name, about in wanted.items() if about.panel is None]
        rest = [
            _parameter(name, about)
            for panel in (ATTENTION, SIZE, PLACE)
            for name, about in wanted.items()
            if about.panel == panel
        ]
        keyword = inspect.Parameter.KEYWORD_ONLY
        parameters = [
            *first, *(p.replace(annotation=hints[p.name], kind=keyword) for p in own), *rest,
        ]  # fmt: skip

        @functools.wraps(command)
        def run(**given: Any) -> Any:
            with input_errors():
                settings = settings_of({name: given.pop(name) for name in wanted})
            return command(settings=settings, **given)

        run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {p.name: p.annotation for p in parameters}
        return run

    return decorate


def settings_of(given: Mapping[str, Any]) -> Settings:
    """The settings of options as they were typed; an error names the flag."""
    found: dict[str, Any] = {}
    for name, value in given.items():
        mapping = DESCRIPTIONS[name].kind is Mapping
        found[name] = read_pairs(value, flag_of(name)) if mapping else value
    if found.get("negative_prompt"):
        found["negative_prompt"] = as_typed(found["negative_prompt"])
    try:
        return Settings(**found)
    except SettingError as error:
        raise ValueError(f"{flag_of(error.name)} {error.must}") from None


def flag_of(name: str) -> str:
    """The option of a setting, as it is typed."""
    return (DESCRIPTIONS[name].flag or f"--{name.replace('_', '-')}").partition("/")[0]


def read_pairs(given: list[str] | None, flag: str) -> dict[str, Any]:
    """NAME=VALUE pairs; a value is read as YAML, so numbers are numbers."""
    if not given:
        return {}
    from jali.strict_yaml import parse_yaml

    found: dict[str, Any] = {}
    for pair in given:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ValueError(f"{flag} is NAME=VALUE, got {pair!r}")
        try:
            found[name.strip().replace("-", "_")] = parse_yaml(text)
        except ValueError:
            raise ValueError(f"{flag} {name}: {show(text)} is not a value") from None
    return found


def read_list(given: str, kind: Callable[[str], T], rule: str) -> list[T]:
    """The parts between commas, each read as `kind`; a ValueError tells the rule."""
    try:
        return [kind(part.strip()) for part in given.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{rule}, got {given!r}") from None


def read_names(given: str, known: Iterable[str] = (), what: str = "") -> list[str]:
    """The names between commas; one that is not `known`, where those are given, is refused."""
    names, known = read_list(given, str, ""), list(known)
    for name in names:
        if known and name not in known:
            from jali.value import suggest

            raise ValueError(f"unknown {what} {name!r}{suggest(name, known)}")
    return names


def read_budgets(given: str) -> list[float]:
    """Shares between commas, at least one."""
    rule = "budgets are numbers in (0, 1]"
    found = read_list(given, float, rule)
    if not found or any(not 0 < share <= 1 for share in found):
        raise ValueError(f"{rule}, got {given!r}")
    return found


def _parameter(name: str, about: SettingDescription) -> inspect.Parameter:
    """An ordinary typer option."""
    default = Settings.__dataclass_fields__[name].default
    if default is MISSING:
        default = about.usual
    kind: Any = list[str] if about.kind is Mapping else about.kind
    option = typer.Option(
        *([] if about.flag is None else [about.flag]),
        help=about.help,
        rich_help_panel=about.panel,
        show_default=about.shown or (default is not None and default is not False),
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


class NamesMethods(TyperCommand):
    """A command whose help names every method that is registered, also from outside.

    They are looked up when help is asked for: the registry needs torch, and nothing else here does.
    """

    def format_help(self, ctx: Any, formatter: Any) -> None:
        name_methods(self)
        for param in self.params:  # flags in a column of their own leave the words no room
            if param.secondary_opts:
                param.help = f"{param.help} Or {param.secondary_opts.pop()}."  # type: ignore[attr-defined]
        super().format_help(ctx, formatter)


def name_methods(command: Any) -> None:
    """Put the methods' names where a help text has `{methods}` or `{sparse_methods}`."""
    for param in command.params:
        text = getattr(param, "help", None) or ""
        if "methods}" in text:
            from jali.methods import METHODS

            known = ", ".join([*METHODS, "cached"])
            sparse = ", ".join([*(name for name in METHODS if name != "dense"), "cached"])
            param.help = text.format(methods=known, sparse_methods=sparse)
