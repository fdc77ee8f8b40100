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

from jali import files
from jali.cli import completion
from jali.cli.exits import input_errors, refuse
from jali.error import show
from jali.generation import settings as described
from jali.generation.prompts import as_typed
from jali.generation.setting import SettingDescription
from jali.generation.settings import Settings
from jali.name import METRICS, method_names
from jali.value import suggest

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


def with_settings(
    *names: str, check: bool = True, **changes: Mapping[str, Any]
) -> Callable[..., Any]:
    """Give a command the options of these settings (of all, where none is named), and hand it the
    finished `Settings` as its argument `settings`.

    The command's own parameters stay as they are. `changes` replaces words of a description for
    one command, as `masks={"help": "A book to replay instead of calibrating."}`. A value that a
    setting cannot have ends the command with code 2 and the flag's name; with `check` so does
    what can be told without torch.

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
                if check:
                    settings.check()
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
    return Settings(**found)


def flag_of(name: str) -> str:
    """The option of an argument, as it is typed."""
    about = DESCRIPTIONS.get(name)
    own = None if about is None else about.flag
    return (own or f"--{name.replace('_', '-')}").partition("/")[0]


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


def check_folder(folder: Path | None, flag: str = "--output-dir") -> None:
    """Refuse a file in the place of a folder, or one that cannot be made, before anything slow."""
    if folder is not None and folder.is_file():
        raise ValueError(f"{flag}: {folder} is a file, and a run needs a folder")
    _check_place(folder, flag)


def check_file(file: Path | None, flag: str = "--output") -> None:
    """Refuse a folder in the place of a file, or one that cannot be made, before anything slow."""
    if file is not None and file.is_dir():
        raise ValueError(f"{flag} {file} is a folder; name a file in it")
    _check_place(file, flag)


def _check_place(path: Path | None, flag: str) -> None:
    try:
        if path is not None:
            files.check_place(path)
    except files.WriteError as error:
        raise ValueError(f"{flag}: {error}") from None


def read_list(given: str, kind: Callable[[str], T], rule: str) -> list[T]:
    """The parts between commas, each read as `kind`; a ValueError tells the rule."""
    try:
        return [kind(part.strip()) for part in given.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{rule}, got {given!r}") from None


def read_names(given: str, known: Iterable[str] = (), what: str = "", flag: str = "") -> list[str]:
    """The names between commas; one that is not `known`, where those are given, is refused."""
    names, known = read_list(given, str, ""), list(known)
    for name in names:
        if known and name not in known:
            raise ValueError(f"{flag}: unknown {what} {name!r}{suggest(name, known)}")
    return names


def read_metrics(given: str, alone: str) -> list[str]:
    """Metrics between commas, or one word that stands alone."""
    asked = read_names(given.lower().replace("-", "_"))
    unknown = [name for name in asked if name not in METRICS]
    if unknown and asked != [alone]:
        raise ValueError(
            f"--metrics are {', '.join(METRICS)}, or {alone} alone; got {', '.join(unknown)}"
        )
    return asked


def read_budgets(given: str, flag: str, zero: bool = False) -> list[float]:
    """Shares between commas, at least one."""
    rule = f"{flag} are numbers in {'[' if zero else '('}0, 1]"
    found = read_list(given, float, rule)
    if not found or not all(0 < share <= 1 or (zero and share == 0) for share in found):
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
        metavar="N=V" if about.kind is Mapping else None,
        rich_help_panel=about.panel,
        autocompletion=completion.SETTINGS.get(name),
        show_default=about.shown or (default is not None and default is not False),
    )
    annotation: Any = Annotated[kind if default is not None else kind | None, option]
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
    )


class Command(TyperCommand):
    """A command whose help leaves words their room, and names every method that is registered,
    also from outside."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """A value that is no number, or out of range, is said as it was typed."""
        typed = list(args)
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            for name in () if error.param is None else error.param.opts:
                for word, after in zip(typed, [*typed[1:], ""], strict=False):
                    if word == name or word.startswith(f"{name}="):
                        value = after if word == name else word.partition("=")[2]
                        refuse(
                            f"{name}: {error.message[:1].lower()}{error.message[1:]}, got {value!r}"
                        )
            raise

    def format_help(self, ctx: Any, formatter: Any) -> None:
        name_methods(self)
        for param in self.get_params(ctx):
            shorten_help(param)
        super().format_help(ctx, formatter)


def shorten_help(param: Any) -> None:
    """No type beside a flag, a short one elsewhere, no column for a flag's opposite."""
    if getattr(param, "is_flag", False):
        param.metavar = ""
        if param.secondary_opts:
            param.help = f"{param.help} Or {param.secondary_opts.pop()}."
    elif getattr(param, "multiple", False) and param.metavar is None:
        param.metavar = "<str>"
    elif getattr(param, "min", None) is not None and param.metavar is None:
        param.metavar = "<int>"


def name_methods(command: Any) -> None:
    """Put the methods' names where a help text has `{methods}`, `{sparse_methods}` (not dense) or
    `{own_methods}` (nor cached, which needs a book)."""
    known = ", ".join(method_names())
    own = known.removeprefix("dense, ")
    for param in command.params:
        text = getattr(param, "help", None) or ""
        if "methods}" in text:
            param.help = text.format(
                methods=f"{known}, cached", sparse_methods=f"{own}, cached", own_methods=own
            )
