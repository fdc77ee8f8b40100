"""Presets: methods with a name, for a model; shipped with the package or in a file of yours."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path

from jali.methods import near
from jali.presets.loader import ModelPresets, read_file, read_text
from jali.presets.preset import Preset, VideoScale

_SHARED = ("video", "image")


def presets(model: str | None = None) -> tuple[Preset, ...]:
    """Every preset that comes with the package, or those of one model."""
    shipped = _shipped().values() if model is None else (_shipped()[resolve_model(model)],)
    return tuple(preset for found in shipped for preset in found.presets)


def load_preset(
    name: str | None, model: str | None = None, config: str | Path | None = None
) -> Preset:
    """A preset by name, or the model's default one without a name.

    `model` is a name of the registry or of PSA (`wan-t2v-1.3b`, `Wan2.1_1.3b`, `wan21_1.3b`). It
    may be left out where the name means the same for every model that has it. `config` is a file
    in jali's format or in PSA's; without one the presets of this package are searched.
    """
    if config is not None:
        return _from_file(name, model, config)
    if model is not None:
        return _shipped()[resolve_model(model)].get(name)
    if name is None:
        raise ValueError("name a preset, or a model whose default one is meant")
    wanted = name.replace("-", "_")
    found = [preset for preset in presets() if preset.name == wanted]
    if not found:
        known = sorted({preset.name for preset in presets()})
        raise ValueError(f"unknown preset {name!r}{near(name, known)}")
    if any(preset.method != found[0].method for preset in found):
        models = ", ".join(str(preset.model) for preset in found)
        raise ValueError(f"preset {name!r} differs between models, so name one of: {models}")
    return found[0] if len(found) == 1 else replace(found[0], model=None)


def resolve_model(name: str) -> str:
    """The registry's name of a model, from that or any of its other names; case does not matter."""
    names = {
        alias.lower(): found.section
        for found in _shipped().values()
        for alias in (found.section, *found.aliases)
    }
    if name.lower() not in names:
        raise ValueError(f"no presets for the model {name!r}{near(name.lower(), _shipped())}")
    return names[name.lower()]


def _from_file(name: str | None, model: str | None, config: str | Path) -> Preset:
    sections = read_file(config)
    if model is None:
        found = _section_without_model(name, sections, config)
    else:
        found = _section(model, sections, config)
    preset = found.get(name)
    return preset if preset.model is None else replace(preset, model=_known(preset.model))


def _section(model: str, sections: Sequence[ModelPresets], config: str | Path) -> ModelPresets:
    """A file without a model's name is for every model."""
    for found in sections:
        names = {found.section, *found.aliases}
        own = all(preset.model is None for preset in found.presets)
        if own or model in names or _known(model) in map(_known, names):
            return found
    known = [found.section for found in sections]
    raise ValueError(f"{config} has no model {model!r}{near(model, known)}")


def _section_without_model(
    name: str | None, sections: Sequence[ModelPresets], config: str | Path
) -> ModelPresets:
    holds = [s for s in sections if name is None or name in s.names()]
    if len(holds) == 1:
        return holds[0]
    if not holds:
        known = sorted({known for s in sections for known in s.names()})
        raise ValueError(f"{config} has no preset {name!r}{near(str(name), known)}")
    models = ", ".join(s.section for s in holds)
    raise ValueError(f"{config} has this preset for several models, so name one of: {models}")


def _known(model: str) -> str:
    """The registry's name where there is one; other models keep their own."""
    try:
        return resolve_model(model)
    except ValueError:
        return model


@functools.cache
def _shipped() -> dict[str, ModelPresets]:
    """By model; those of its kind (video, image) follow its own."""
    folder = resources.files("jali.presets") / "data"
    files = {
        Path(file.name).stem: read_text(file.read_text(encoding="utf-8"), f"jali, {file.name}")[0]
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    }
    return {
        name: replace(own, presets=(*own.presets, *_of_kind(files[str(own.kind)], name)))
        for name, own in sorted(files.items())
        if name not in _SHARED
    }


def _of_kind(shared: ModelPresets, model: str) -> tuple[Preset, ...]:
    return tuple(replace(preset, model=model) for preset in shared.presets)


__all__ = ["Preset", "VideoScale", "load_preset", "presets", "read_file", "resolve_model"]
