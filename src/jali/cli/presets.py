"""`jali presets`: the methods that ship with a name, and what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import input_errors

if TYPE_CHECKING:
    from jali.presets import Preset

EXAMPLES = (
    "jali presets",
    "jali presets --model wan-t2v-1.3b",
    "jali presets psa_balanced --model cogvideox-5b",
    "jali presets --config attention_config.yaml",
)


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Show this one in full.", show_default=False)
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Only this model's; any of its names.", show_default=False)
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(help="Of a file, in jali's format or PSA's.", show_default=False),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, and nothing else.")] = False,
) -> None:
    """List the presets, or show one in full."""
    with input_errors():
        found = _found(name, model, config)
    if as_json:
        told = [_plain(preset) for preset in found]
        typer.echo(json.dumps(told if name is None else told[0], ensure_ascii=False))
    elif name is None:
        _table(found)
    else:
        _show(found[0])


def _found(name: str | None, model: str | None, config: Path | None) -> list[Preset]:
    from jali.presets import load_preset, presets, read_file

    if name is not None:
        return [load_preset(name, model, config)]
    if config is None:
        return list(presets(model))
    sections = read_file(config)
    every = [preset for section in sections for preset in section.presets]
    if model is None:
        return every
    # The file's own word for the model decides, as it does for a single preset.
    names = list(dict.fromkeys(preset.name for preset in every))
    own = []
    for each in names:
        try:
            own.append(load_preset(each, model, config))
        except ValueError:
            continue
    if not own:
        load_preset(names[0], model, config)  # says what the file has instead
    return own


def _plain(preset: Preset) -> dict[str, Any]:
    from jali.presets.method import write_method

    return {
        "name": preset.name,
        "model": preset.model,
        "description": preset.description,
        "source": preset.source,
        "nominal_cost": preset.nominal_cost,
        **write_method(preset.method),
        "notes": list(preset.notes),
    }


def _table(found: list[Preset]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE, caption="cost: the share of dense attention's work it asks for")
    for heading in ("model", "preset", "method"):
        table.add_column(heading, no_wrap=True)
    table.add_column("cost", justify="right", no_wrap=True)
    table.add_column("")
    before = None
    for preset in found:
        cost = preset.nominal_cost
        table.add_row(
            "" if preset.model == before else str(preset.model or "any"),
            preset.name,
            str(_plain(preset)["method"]),
            "data" if cost is None else f"{cost:.2f}",
            preset.description,
        )
        before = preset.model
    Console().print(table)


def _show(preset: Preset) -> None:
    import yaml
    from rich.console import Console

    told = {key: value for key, value in _plain(preset).items() if value not in (None, "", [])}
    text = yaml.safe_dump(told, sort_keys=False, allow_unicode=True, default_flow_style=None)
    Console().print(text, highlight=False, markup=False, end="")
