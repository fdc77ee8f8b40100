"""Presets: methods with a name, for a model; shipped with the package or in a file of yours."""

from __future__ import annotations

import functools
from dataclasses import replace
from importlib import resources
from pathlib import Path

from jali.name import model_names, resolve_model
from jali.presets.file import read_file, read_text
from jali.presets.preset import ModelPresets, Preset, VideoScale
from jali.value import suggest


def presets(model: str | None = None) -> tuple[Preset, ...]:
    """Every preset that comes with the package, or those of one model.

        for preset in presets("wan-t2v-1.3b"):
            print(preset)

    `model` is any name of the model; `ValueError` where there is no such one.
    """
    shipped = _shipped().values() if model is None else (_shipped()[resolve_model(model)],)
    return tuple(preset for found in shipped for preset in found.presets)


def load_preset(
    name: str | None, model: str | None = None, config: str | Path | None = None
) -> Preset:
    """A preset by name, or the model's default one without a name.

        preset = load_preset("psa_balanced", "wan-t2v-1.3b")
        handle = apply_sparse_attention(pipe, preset)

    Args:
        name: of the preset, where - and _ are one.
        model: a name of the registry or of PSA (`wan-t2v-1.3b`, `Wan2.1_1.3b`, `wan21_1.3b`). It
            may be left out where the name means the same for every model that has it.
        config: a file in jali's format or in PSA's; without one the presets of this package are
            searched.

    Raises:
        ValueError: an unknown name, one that means several presets, or a file that is not valid,
            with the place in it.
        FileNotFoundError: there is no such file.
    """
    if config is not None:
        return _from_file(name, model, config)
    if model is not None:
        found = _shipped()[resolve_model(model)]
        return found.get(found.default_under(model) if name is None else name)
    if name is None:
        raise ValueError("name a preset, or a model whose default one is meant")
    wanted = name.replace("-", "_")
    same = [preset for preset in presets() if preset.name == wanted]
    if not same:
        known = sorted({preset.name for preset in presets()})
        raise ValueError(f"unknown preset {name!r}{suggest(name, known)}")
    if any(preset.method != same[0].method for preset in same):
        models = ", ".join(str(preset.model) for preset in same)
        raise ValueError(f"preset {name!r} differs between models, so name one of: {models}")
    return same[0] if len(same) == 1 else replace(same[0], model=None)


def _known(model: str) -> str:
    """The registry's name where there is one; other models keep their own."""
    return model_names().get(model.lower(), model)


def _from_file(name: str | None, model: str | None, config: str | Path) -> Preset:
    sections = read_file(config)
    if model is not None:
        found = [section for section in sections if _is_for(section, model)][:1]
        missing = f"model {model!r}{suggest(model, [section.section for section in sections])}"
    else:
        found = [section for section in sections if name is None or name in section.names()]
        known = sorted({name for section in sections for name in section.names()})
        missing = f"preset {name!r}{suggest(str(name), known)}"
    if not found:
        raise ValueError(f"{config} has no {missing}")
    if len(found) > 1:
        models = ", ".join(section.section for section in found)
        raise ValueError(f"{config} has this preset for several models, so name one of: {models}")
    preset = found[0].get(name)
    return preset if preset.model is None else replace(preset, model=_known(preset.model))


def _is_for(section: ModelPresets, model: str) -> bool:
    """A file without a model's name is for every model."""
    names = (section.section, *section.aliases)
    any_model = all(preset.model is None for preset in section.presets)
    return any_model or model in names or _known(model) in map(_known, names)


@functools.cache
def _shipped() -> dict[str, ModelPresets]:
    """By model; those of its kind (video, image) follow its own."""
    folder = resources.files("jali.presets") / "data"
    files = {
        Path(file.name).stem: read_text(file.read_text(encoding="utf-8"), f"jali, {file.name}")[0]
        for file in folder.iterdir()
        if file.name.endswith(".yaml")
    }
    found = {}
    for name in sorted(files.keys() - {"video", "image"}):
        own, shared = files[name], files[str(files[name].kind)]
        of_kind = [p for p in shared.presets if p.name not in own.names()]
        found[name] = replace(
            own, presets=(*own.presets, *(replace(preset, model=name) for preset in of_kind))
        )
    return found


__all__ = [
    "Preset", "VideoScale", "load_preset", "model_names", "presets", "read_file", "resolve_model",
]  # fmt: skip
