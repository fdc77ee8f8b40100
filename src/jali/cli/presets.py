"""`jali presets`: the methods that ship with a name, and what is in them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli import completion
from jali.cli.exits import input_errors
from jali.cli.options import Json
from jali.cli.output import make_table, print_json, say
from jali.name import preset_names, resolve_model
from jali.value import suggest

if TYPE_CHECKING:
    from rich.table import Table

    from jali.presets import Preset

EXAMPLES = (
    "jali presets",
    "jali presets --model wan-t2v-1.3b",
    "jali presets psa_balanced --model cogvideox-5b",
    "jali presets --config attention_config.yaml",
)


def presets(
    name: Annotated[
        str | None,
        typer.Argument(
            help="Show this one in full.", show_default=False, autocompletion=completion.presets
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Only this model's; any of its names.", autocompletion=completion.models),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="Of a file, in jali's format or PSA's.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the presets, or show one in full."""
    with input_errors():
        found = _find(name, model, config)
    if as_json:
        facts = [_plain(preset) for preset in found]
        print_json(facts if name is None else facts[0])
    elif name is None:
        from rich.console import Console

        Console().print(_table(found))
    else:
        _show(found[0])


def _find(name: str | None, model: str | None, config: Path | None) -> list[Preset]:
    if config is None and name is not None:
        known = preset_names(model)
        if name.replace("-", "_") not in known:
            whose = f"{resolve_model(model)} has no" if model else "unknown"
            raise ValueError(f"{whose} preset {name!r}{suggest(name, known)}")
    elif config is None and model is not None:
        resolve_model(model)
    elif config is not None and not config.expanduser().exists():
        raise ValueError(f"--config: no preset file {config}")
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


def _table(found: list[Preset]) -> Table:
    def cells(preset: Preset, before: str | None) -> tuple[str, ...]:
        cost = preset.nominal_cost
        return (
            "" if preset.model == before else str(preset.model or "any"),
            preset.name,
            str(_plain(preset)["method"]),
            "data" if cost is None else f"{cost:.2f}",
            preset.description,
        )

    before = [None, *(preset.model for preset in found)]
    return make_table(
        ("model", "preset", "method", "cost", ""),
        map(cells, found, before),
        left=3,
        wrap_last=True,
        caption="cost: the share of dense attention's work it asks for",
    )


def _show(preset: Preset) -> None:
    import yaml

    facts = {key: value for key, value in _plain(preset).items() if value not in (None, "", [])}
    text = yaml.safe_dump(facts, sort_keys=False, allow_unicode=True, default_flow_style=None)
    say(text, end="")
