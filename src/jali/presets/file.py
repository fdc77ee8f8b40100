"""Preset files, read strictly: jali's own format, or PSA's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jali import files
from jali.presets import psa
from jali.presets.method import PlainMethod, read_method
from jali.presets.preset import ModelPresets, Preset, VideoScale
from jali.presets.schema import ABSENT, Count, fail, read_object
from jali.strict_yaml import MOST_BYTES, parse_yaml


def parse(text: str, source: str) -> Mapping[Any, Any]:
    try:
        data = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{source} is not a preset file: {error}") from error
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"{source} is not a preset file: it holds no models")
    return data


def read_file(path: str | Path) -> tuple[ModelPresets, ...]:
    """Every model of a file in either format."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"no preset file {path}")
    return read_text(files.read_text(path, MOST_BYTES), str(path))


def read_text(text: str, source: str) -> tuple[ModelPresets, ...]:
    """Every model of a file's text; `source` names the file in errors and in presets."""
    data = parse(text, source)
    if "presets" in data:
        return (_read_model(data, source),)
    for name, section in data.items():
        if not isinstance(section, Mapping) or "attention_configs" not in section:
            fail(
                source,
                f"is neither jali's format (keys model and presets) nor PSA's (sections with "
                f"attention_configs): {name!r} is neither",
            )
    return tuple(psa.read_model(str(name), section, source) for name, section in data.items())


@dataclass(frozen=True)
class PlainModel:
    """A file in jali's own format."""

    presets: Mapping[str, Any]
    model: str | None = None
    aliases: tuple[str, ...] = ()
    kind: Literal["video", "image"] = ABSENT
    default: str = ABSENT
    defaults: Mapping[str, str] = ABSENT


@dataclass(frozen=True)
class PlainPreset(PlainMethod):
    """A preset of such a file: a method, and what is said of it."""

    description: str = ""
    source: str = ABSENT
    video_scale: VideoScale = ABSENT
    text_length: Count = ABSENT
    tile_n: int = ABSENT


def _read_model(data: Mapping[Any, Any], source: str) -> ModelPresets:
    where = data["model"] if isinstance(data.get("model"), str) else source
    plain: PlainModel = read_object(PlainModel, data, where)
    presets = tuple(
        _read_preset(name, body, plain.model, f"{where}.presets.{name}", source)
        for name, body in plain.presets.items()
    )
    section = plain.model or source
    defaults = plain.defaults or {}
    return ModelPresets(section, presets, plain.aliases, plain.kind, plain.default, defaults)


def _read_preset(name: str, data: Any, model: str | None, path: str, source: str) -> Preset:
    plain: PlainPreset = read_object(PlainPreset, data, path)
    return Preset(
        name, model, read_method(data, path), plain.description, plain.source or source,
        plain.video_scale, plain.text_length, plain.tile_n,
    )  # fmt: skip
