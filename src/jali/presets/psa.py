"""PSA's `configs/attention_config.yaml`: presets of another form, in a section for every model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import Any, Literal

from jali.methods import Dense, Method, Psa, Schedule
from jali.presets.preset import ModelPresets, Preset, VideoScale
from jali.presets.schema import ABSENT, Count, errors_at, fail, read_object
from jali.tokens.order import Gilbert, Order, Raster, Tiled

# What PSA's configuration has where a preset names no levels.
LEVELS = {1: (0.0, 0.05), 2: (0.05, 0.15), 4: (0.15, 0.25), 8: (0.25, 0.5), 0: (0.5, 1.0)}
# What was decided for want of a key.
NOTES = {
    "use_sim_mask": "use_sim_mask is not given: off, since no threshold was asked for by it",
    "mask_ratios": "mask_ratios is not given: PSA's own, bounds 0.05, 0.15, 0.25, 0.5 at ratios "
    "1, 2, 4, 8",
}


@dataclass(frozen=True)
class PsaModel:
    """A section of the file."""

    attention_configs: Mapping[str, Any]
    default_attention: str = ABSENT
    video_scale: VideoScale = ABSENT
    text_length: Count = ABSENT


@dataclass(frozen=True)
class PsaBlocks:
    """Query and key blocks, and the key tile of PSA's kernels."""

    m: int = 128
    n: int = 128
    tile_n: int = 32


@dataclass(frozen=True)
class PsaThresholds:
    """The cap by key similarity. PSA's own defaults cap almost nothing."""

    x2: float = 0.0
    x4: float = 0.0
    x8: float = -1.0


@dataclass(frozen=True)
class PsaPreset:
    """A preset of a section, with the defaults of PSA's loader.

    Where PSA writes its log and which of its kernels runs change nothing here, but a wrong value
    in a file is still wrong. A `mask_mode` of *_newtype named a format of the mask, not another
    rule.
    """

    type: Literal["psa", "dense"] = "psa"
    description: str = ""
    use_rearrange: bool = True
    use_sim_mask: bool = ABSENT
    block_size: PsaBlocks = field(default_factory=PsaBlocks)
    mask_ratios: Mapping[int, tuple[float, float]] = ABSENT
    mask_mode: Literal["topk", "thresholdbound", "topk_newtype", "thresholdbound_newtype"] = (
        "thresholdbound"
    )
    attn_impl: Literal["new_mask_type", "old_mask_type"] = ABSENT
    tile_size: tuple[int, int, int] | None = None
    warmup_steps: int | float = 0
    rearrange_method: str = "Gilbert"
    verbose: bool = ABSENT
    enable_logging: bool = ABSENT
    log_dir: str = ABSENT
    sim_thresholds: PsaThresholds = field(default_factory=PsaThresholds)
    sim_2x_threshold: float = ABSENT
    sim_4x_threshold: float = ABSENT
    sim_8x_threshold: float = ABSENT
    text_length: Count = ABSENT
    axis: Literal["block", "step"] = "block"
    importance: Literal["softmax", "surrogate"] = "softmax"
    aligned: bool = False

    @property
    def similarity(self) -> tuple[float, float, float] | None:
        """Thresholds at 2×, 4× and 8×: flat ones win over nested ones."""
        flat = (self.sim_2x_threshold, self.sim_4x_threshold, self.sim_8x_threshold)
        pairs = zip(flat, astuple(self.sim_thresholds), strict=True)
        x2, x4, x8 = (nested if own is None else own for own, nested in pairs)
        return (x2, x4, x8) if self.use_sim_mask else None


def read_model(section: str, data: Mapping[Any, Any], source: str) -> ModelPresets:
    """The presets of one section."""
    model: PsaModel = read_object(PsaModel, data, section)
    presets = tuple(
        _read_preset(name, body, section, model, source)
        for name, body in model.attention_configs.items()
    )
    # A default that the section lacks is refused when it is asked for, as there.
    return ModelPresets(section, presets, default=model.default_attention)


def _read_preset(name: str, data: Any, section: str, model: PsaModel, source: str) -> Preset:
    path = f"{section}.attention_configs.{name}"
    if isinstance(data, Mapping) and isinstance(data.get("type"), str):
        data = {**data, "type": data["type"].lower()}  # PSA takes any case
    plain: PsaPreset = read_object(PsaPreset, data, path)
    text = model.text_length if plain.text_length is None else plain.text_length
    found = Preset(name, section, Dense(), plain.description, source, model.video_scale, text)
    if plain.type == "dense":
        return found
    notes = tuple(note for key, note in NOTES.items() if key not in data)
    tile_n = plain.block_size.tile_n
    return replace(found, method=_method(plain, path), tile_n=tile_n, notes=notes)


def _method(plain: PsaPreset, path: str) -> Method:
    """Dense first: a whole number of warm-up steps is a count, a fraction a share of them."""
    order = _order(plain, f"{path}.rearrange_method")
    if plain.aligned and plain.block_size.tile_n != Psa.TILE:
        own = plain.block_size.tile_n
        fail(f"{path}.block_size.tile_n", f"must be {Psa.TILE} where aligned is true, got {own}")
    with errors_at(path):
        psa = Psa(
            mask_ratios=LEVELS if plain.mask_ratios is None else plain.mask_ratios,
            mode=plain.mask_mode.removesuffix("_newtype"),
            axis=plain.axis,
            importance=plain.importance,
            similarity=plain.similarity,
            q_block=plain.block_size.m,
            k_block=plain.block_size.n,
            order=order,
            aligned=plain.aligned,
        )
    if not plain.warmup_steps:
        return psa
    with errors_at(f"{path}.warmup_steps"):
        return Schedule(psa, dense_steps=plain.warmup_steps)


def _order(plain: PsaPreset, path: str) -> Order:
    name = plain.rearrange_method
    if name in ("SemanticAware", "Hybrid"):
        fail(
            path,
            f"is {name!r}, which sorts tokens by k-means clusters; jali has no such order: "
            f"use Gilbert or STA, or set use_rearrange to false",
        )
    if name not in ("Gilbert", "STA"):
        fail(path, f"must be Gilbert or STA, got {name!r}")
    if not plain.use_rearrange:
        return Raster()
    if name == "Gilbert":
        return Gilbert()
    with errors_at(path):
        return Tiled(plain.tile_size or (2, 8, 8))
