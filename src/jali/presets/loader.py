"""Preset files, read strictly: jali's own format, and PSA's `configs/attention_config.yaml`."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from jali.methods import Dense, Method, Psa, Schedule, near
from jali.presets.method import (
    METHOD_KEYS,
    Fields,
    a_bool,
    a_mapping,
    a_number,
    a_text,
    an_int,
    at,
    fail,
    list_of,
    one_of,
    optional,
    ranges,
    read_method,
)
from jali.presets.preset import Preset, VideoScale
from jali.tokens.order import Gilbert, Order, Raster, Tiled


@dataclass(frozen=True)
class ModelPresets:
    """The presets of one model: `section` is its name in the file."""

    section: str
    presets: tuple[Preset, ...]
    aliases: tuple[str, ...] = ()
    kind: str | None = None
    default: str | None = None

    def names(self) -> tuple[str, ...]:
        return tuple(preset.name for preset in self.presets)

    def get(self, name: str | None) -> Preset:
        """By name, where - and _ are one; the default without one."""
        wanted = self.default if name is None else name
        if wanted is None:
            raise ValueError(
                f"{self.section} has no default preset, name one of {', '.join(self.names())}"
            )
        for preset in self.presets:
            if preset.name.replace("-", "_") == wanted.replace("-", "_"):
                return preset
        raise ValueError(f"{self.section} has no preset {wanted!r}{near(wanted, self.names())}")


class _UniqueKeys(yaml.SafeLoader):
    """YAML that refuses a key given twice; plain YAML keeps the last one without a word."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Hashable] = set()
        for key_node, _ in node.value:
            key: Hashable = self.construct_object(key_node, deep=True)
            if key in seen:
                line = key_node.start_mark.line + 1
                raise ValueError(f"line {line}: the key {key!r} is given twice")
            seen.add(key)
        return super().construct_mapping(node, deep)


def parse(text: str, source: str) -> Mapping[Any, Any]:
    try:
        data = yaml.load(text, Loader=_UniqueKeys)
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{source} is not a preset file: {error}") from error
    if not isinstance(data, Mapping) or not data:
        raise ValueError(f"{source} is not a preset file: it holds no models")
    return data


def read_file(path: str | Path) -> tuple[ModelPresets, ...]:
    """Every model of a file in either format."""
    path = Path(path).expanduser()
    if not path.is_file():
        raise FileNotFoundError(f"no preset file {path}")
    return read_text(path.read_text(encoding="utf-8"), str(path))


def read_text(text: str, source: str) -> tuple[ModelPresets, ...]:
    data = parse(text, source)
    if "presets" in data:
        return (_own_model(data, source),)
    for name, section in data.items():
        if not isinstance(section, Mapping) or "attention_configs" not in section:
            fail(
                source,
                f"is neither jali's format (keys model and presets) nor PSA's (sections with "
                f"attention_configs): {name!r} is neither",
            )
    return tuple(_psa_model(str(name), section, source) for name, section in data.items())


# jali's own format


def _own_model(data: Mapping[Any, Any], source: str) -> ModelPresets:
    known = ("model", "aliases", "kind", "default", "presets")
    where = data["model"] if isinstance(data.get("model"), str) else source
    fields = Fields(data, where, known)
    model = fields.take("model", optional(a_text), None)
    where = f"{where}.presets"
    presets = tuple(
        _own_preset(a_text(name, where), body, model, f"{where}.{name}", source)
        for name, body in fields.take("presets", a_mapping).items()
    )
    return ModelPresets(
        section=model or source,
        presets=presets,
        aliases=fields.take("aliases", list_of(a_text), ()),
        kind=fields.take("kind", one_of("video", "image"), None),
        default=fields.take("default", a_text, None),
    )


def _own_preset(name: str, data: Any, model: str | None, path: str, source: str) -> Preset:
    known = (*METHOD_KEYS, "description", "source", "video_scale", "text_length", "tile_n")
    fields = Fields(a_mapping(data, path), path, known)
    return Preset(
        name=name,
        model=model,
        method=read_method(data, path),
        description=fields.take("description", a_text, ""),
        source=fields.take("source", a_text, source),
        video_scale=fields.take("video_scale", _video_scale, None),
        text_length=fields.take("text_length", _count, None),
        tile_n=fields.take("tile_n", an_int, None),
    )


# PSA's format

_PSA_MODEL = ("default_attention", "video_scale", "text_length", "attention_configs")
_PSA_PRESET = (
    "type", "description", "use_rearrange", "use_sim_mask", "block_size", "mask_ratios",
    "mask_mode", "attn_impl", "tile_size", "warmup_steps", "rearrange_method", "verbose",
    "enable_logging", "log_dir", "sim_thresholds", "sim_2x_threshold", "sim_4x_threshold",
    "sim_8x_threshold", "text_length", "axis", "importance",
)  # fmt: skip
_MODES = ("topk", "thresholdbound")


def _psa_model(section: str, data: Mapping[Any, Any], source: str) -> ModelPresets:
    fields = Fields(data, section, _PSA_MODEL)
    scale = fields.take("video_scale", _video_scale, None)
    text = fields.take("text_length", _count, None)
    where = f"{section}.attention_configs"
    presets = tuple(
        _psa_preset(
            Preset(a_text(name, where), section, Dense(), "", source, scale, text),
            Fields(a_mapping(body, f"{where}.{name}"), f"{where}.{name}", _PSA_PRESET),
        )
        for name, body in fields.take("attention_configs", a_mapping).items()
    )
    default = fields.take("default_attention", a_text, None)
    found = ModelPresets(section, presets, default=default)
    if default is not None and default not in found.names():
        fail(f"{section}.default_attention", f"is {default!r}{near(default, found.names())}")
    return found


def _psa_preset(empty: Preset, fields: Fields) -> Preset:
    described = replace(
        empty,
        description=fields.take("description", a_text, ""),
        text_length=fields.take("text_length", _count, empty.text_length),
    )
    if fields.take("type", one_of("psa", "dense"), "psa") == "dense":
        return described
    # Where PSA writes its log changes nothing here, but a wrong value in a file is still wrong.
    for key in ("verbose", "enable_logging"):
        fields.take(key, a_bool, None)
    fields.take("log_dir", a_text, None)
    # Both of PSA's kernels read the same plan here.
    fields.take("attn_impl", one_of("new_mask_type", "old_mask_type"), None)
    block = Fields(
        fields.take("block_size", a_mapping, {}), f"{fields.path}.block_size", ("m", "n", "tile_n")
    )
    similarity, notes = _similarity(fields)
    options = {
        "mask_ratios": fields.take("mask_ratios", ranges),
        "mode": fields.take("mask_mode", _mode, "thresholdbound"),
        "axis": fields.take("axis", one_of("block", "step"), "block"),
        "importance": fields.take("importance", one_of("softmax", "surrogate"), "softmax"),
        "similarity": similarity,
        "q_block": block.take("m", an_int, 128),
        "k_block": block.take("n", an_int, 128),
        "order": _order(fields),
    }
    psa = at(fields.path, lambda: Psa(**options))
    return replace(
        described,
        method=_warmed_up(psa, fields),
        tile_n=block.take("tile_n", an_int, 32),
        notes=notes,
    )


def _mode(value: Any, path: str) -> str:
    """*_newtype named a format of the mask, not another rule."""
    known = (*_MODES, *(f"{mode}_newtype" for mode in _MODES))
    return one_of(*known)(value, path).removesuffix("_newtype")


def _similarity(fields: Fields) -> tuple[tuple[float, float, float] | None, tuple[str, ...]]:
    """The cap by key similarity: flat thresholds win over nested ones."""
    nested = Fields(
        fields.take("sim_thresholds", a_mapping, {}),
        f"{fields.path}.sim_thresholds",
        ("x2", "x4", "x8"),
    )
    # PSA's own defaults, which cap almost nothing.
    x2, x4, x8 = (
        fields.take(
            f"sim_{ratio}x_threshold", a_number, nested.take(f"x{ratio}", a_number, default)
        )
        for ratio, default in ((2, 0.0), (4, 0.0), (8, -1.0))
    )
    if "use_sim_mask" not in fields.data:
        return None, ("use_sim_mask is not given: off, since no threshold was asked for by it",)
    return ((x2, x4, x8) if fields.take("use_sim_mask", a_bool) else None), ()


def _order(fields: Fields) -> Order:
    name = fields.take("rearrange_method", a_text, "Gilbert")
    path = f"{fields.path}.rearrange_method"
    window = fields.take("tile_size", optional(list_of(an_int, 3)), None) or (2, 8, 8)
    if name in ("SemanticAware", "Hybrid"):
        fail(
            path,
            f"is {name!r}, which sorts tokens by k-means clusters; jali has no such order: "
            f"use Gilbert or STA, or set use_rearrange to false",
        )
    if name not in ("Gilbert", "STA"):
        fail(path, f"must be Gilbert or STA, got {name!r}")
    if not fields.take("use_rearrange", a_bool, True):
        return Raster()
    return Gilbert() if name == "Gilbert" else at(path, lambda: Tiled(window))


def _warmed_up(psa: Psa, fields: Fields) -> Method:
    """Dense first: a whole number is a count of steps, a fraction a share of them."""
    steps = fields.take("warmup_steps", a_number, 0)
    if not steps:
        return psa
    return at(f"{fields.path}.warmup_steps", lambda: Schedule(psa, dense_steps=steps))


def _count(value: Any, path: str) -> int:
    count = an_int(value, path)
    return count if count >= 0 else fail(path, f"must be a count >= 0, got {count}")


def _video_scale(value: Any, path: str) -> VideoScale:
    names = ("width_divisor", "height_divisor", "depth_divisor")
    fields = Fields(a_mapping(value, path), path, names)
    sizes = [fields.take(name, an_int) for name in names]
    return at(path, lambda: VideoScale(*sizes))
