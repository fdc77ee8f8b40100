"""The models known by name, as data: where they live, and what a user gets without asking."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib import resources
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from jali.error import ArgumentError
from jali.integration.models.psa import PSA_MODELS
from jali.name import resolve_model
from jali.value import suggest

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True, slots=True)
class FlowShift:
    """The flow shift a model is sampled with: `large` from 720p on, which is the shorter side."""

    small: float
    large: float

    def at(self, height: int, width: int) -> float:
        return self.large if min(height, width) >= 720 else self.small

    def __contains__(self, shift: float) -> bool:
        return any(math.isclose(shift, own) for own in (self.small, self.large))


@dataclass(frozen=True, slots=True)
class Guidance:
    """How strongly the prompt is followed, and what the pipeline calls that.

    kind "cfg" compares with a negative prompt, "embedded" is an input of a distilled transformer
    (a negative prompt has no effect), "true_cfg" is cfg under another name, and "guider" is an
    object of the checkpoint's own.
    """

    scale: float | None
    kind: str = "cfg"
    second: float | None = None  # of the low-noise expert

    @property
    def argument(self) -> str | None:
        """The pipeline's name for the scale; a guider is no argument."""
        if self.kind == "guider":
            return None
        return "true_cfg_scale" if self.kind == "true_cfg" else "guidance_scale"


@dataclass(frozen=True)
class ModelCard:
    """A model of the registry. Sizes are in pixels; an image has one frame.

    `layers` lists the stacks of one transformer, `weights` counts its parameters. `token_size` is
    what lies behind one token: frames, height and width. A sequence has `text_tokens` besides, and
    a call `batch` samples (guidance may come as a batch).

    `index` and `config` are what `model_index.json` and the transformer's `config.json` of its
    checkpoints say, which tells models of one pipeline class apart. `packing` is how many latents
    along a side the pipeline packs into one token beyond the transformer's own patches; `multiple`
    is what the pipeline wants heights and widths to be a multiple of, whatever the strides are.
    `call` holds arguments that every generation gets unless it is given others. A model without a
    `hub` id lies in this package, in `folder`.
    """

    name: str
    hub: str | None
    pipeline: str
    height: int
    width: int
    frames: int
    steps: int
    guidance: Guidance
    layers: tuple[int, ...]
    heads: int
    head_dim: int
    weights: float
    token_size: tuple[int, int, int]
    text_tokens: int = 0
    batch: int = 1
    fps: int | None = None
    shift: FlowShift | None = None
    index: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    packing: int = 1
    multiple: int = 1
    vae_fp32: bool = False
    folder: str | None = None

    @property
    def image(self) -> bool:
        return self.fps is None

    @property
    def location(self) -> str:
        """Where its weights come from without a path: a hub id, or a folder of this package."""
        if self.hub is not None:
            return self.hub
        return str(resources.files("jali").joinpath(*str(self.folder).split("/")))

    @property
    def experts(self) -> int:
        return 1 if self.guidance.second is None else 2

    @property
    def tokens(self) -> int:
        """Of one sequence at its size; the first frame is a token deep of its own."""
        frames, height, width = self.token_size
        times = 1 + (self.frames - 1) // frames
        return times * (self.height // height) * (self.width // width) + self.text_tokens


def _wan(name: str, hub: str | None, **facts: Any) -> ModelCard:
    index = {"transformer_2": None, "expand_timesteps": False} | facts.pop("index", {})
    defaults: dict[str, Any] = {
        "steps": 50, "guidance": Guidance(5.0), "fps": 16, "head_dim": 128, "multiple": 16,
        "token_size": (4, 16, 16), "vae_fp32": True,
    }  # fmt: skip
    hub = hub and f"Wan-AI/{hub}-Diffusers"
    return ModelCard(name, hub, "WanPipeline", **(defaults | facts), index=index)


# Sizes of tokens and weights are from the checkpoints' own configurations.
_CARDS = (
    _wan(
        "wan-t2v-1.3b", "Wan2.1-T2V-1.3B", height=480, width=832, frames=81,
        layers=(30,), heads=12, weights=1.4e9, shift=FlowShift(3.0, 5.0),
    ),
    _wan(
        "wan-t2v-14b", "Wan2.1-T2V-14B", height=480, width=832, frames=81,
        layers=(40,), heads=40, weights=14.3e9, shift=FlowShift(3.0, 5.0),
    ),
    _wan(
        "wan2.2-ti2v-5b", "Wan2.2-TI2V-5B", height=704, width=1280, frames=121, fps=24,
        layers=(30,), heads=24, weights=5.0e9, token_size=(4, 32, 32), shift=FlowShift(5.0, 5.0),
        index={"expand_timesteps": True},
    ),
    _wan(
        "wan2.2-t2v-a14b", "Wan2.2-T2V-A14B", height=720, width=1280, frames=81,
        steps=40, guidance=Guidance(4.0, second=3.0),
        layers=(40,), heads=40, weights=14.3e9, index={"transformer_2": "WanTransformer3DModel"},
    ),
    ModelCard(
        "cogvideox-5b", "zai-org/CogVideoX-5b", "CogVideoXPipeline",
        height=480, width=720, frames=49, fps=8, steps=50, guidance=Guidance(6.0),
        layers=(42,), heads=48, head_dim=64, weights=5.6e9,
        token_size=(4, 16, 16), text_tokens=226, batch=2, config={"patch_size_t": None},
    ),
    ModelCard(
        "cogvideox1.5-5b", "zai-org/CogVideoX1.5-5B", "CogVideoXPipeline",
        height=768, width=1360, frames=81, fps=8, steps=50, guidance=Guidance(6.0),
        layers=(42,), heads=48, head_dim=64, weights=5.6e9,
        token_size=(8, 16, 16), text_tokens=226, batch=2, config={"patch_size_t": 2},
    ),
    ModelCard(
        "hunyuan-video", "hunyuanvideo-community/HunyuanVideo", "HunyuanVideoPipeline",
        height=544, width=960, frames=129, fps=24, steps=50, guidance=Guidance(6.0, "embedded"),
        layers=(20, 40), heads=24, head_dim=128, weights=12.8e9,
        token_size=(4, 16, 16), text_tokens=256, shift=FlowShift(7.0, 7.0), multiple=16,
    ),
    ModelCard(
        "hunyuan-video-1.5", "hunyuanvideo-community/HunyuanVideo-1.5-Diffusers-720p_t2v",
        "HunyuanVideo15Pipeline",
        height=720, width=1280, frames=121, fps=24, steps=50, guidance=Guidance(None, "guider"),
        layers=(54,), heads=16, head_dim=128, weights=8.3e9,
        token_size=(4, 16, 16), text_tokens=1000,
    ),
    ModelCard(
        "ltx-video", "Lightricks/LTX-Video", "LTXPipeline",
        height=512, width=704, frames=161, fps=25, steps=50, guidance=Guidance(3.0),
        layers=(28,), heads=32, head_dim=64, weights=1.9e9,
        token_size=(8, 32, 32), batch=2, multiple=32,
    ),
    ModelCard(
        "flux.1-dev", "black-forest-labs/FLUX.1-dev", "FluxPipeline",
        height=1024, width=1024, frames=1, steps=28, guidance=Guidance(3.5, "embedded"),
        layers=(19, 38), heads=24, head_dim=128, weights=11.9e9,
        token_size=(1, 16, 16), text_tokens=512, packing=2,
    ),
    _wan(
        "nano", None, folder="nano/weights", height=192, width=320, frames=37, fps=12,
        steps=20, guidance=Guidance(4.0), layers=(8,), heads=4, head_dim=64, weights=9.1e6,
        token_size=(4, 8, 8), shift=FlowShift(3.0, 3.0),
        config={"num_layers": 8, "num_attention_heads": 4, "text_dim": 128},
    ),
    ModelCard(
        "qwen-image", "Qwen/Qwen-Image", "QwenImagePipeline",
        height=1328, width=1328, frames=1, steps=50, guidance=Guidance(4.0, "true_cfg"),
        layers=(60,), heads=24, head_dim=128, weights=20.4e9,
        token_size=(1, 16, 16), text_tokens=64,
    ),
)  # fmt: skip

MODELS: Mapping[str, ModelCard] = MappingProxyType({card.name: card for card in _CARDS})


def model_card(name: str | ModelCard) -> ModelCard:
    """By name, by one of its other names (its presets list them), or by its hub id; case does not
    matter. Under PSA's names a model has PSA's sizes, steps and guidance."""
    if isinstance(name, ModelCard):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a model is a name of the registry, got {name!r}")
    wanted = name.lower()
    if wanted in PSA_MODELS:
        return _as_in_psa(wanted)
    for card in MODELS.values():
        if wanted in (card.name, str(card.hub).lower()):
            return card
    try:
        return MODELS[resolve_model(wanted)]
    except ValueError:
        raise ArgumentError("model", f": unknown model {name!r}{suggest(wanted, MODELS)}") from None


@functools.cache
def _as_in_psa(name: str) -> ModelCard:
    psa = PSA_MODELS[name]
    card, own = MODELS[psa.model], dict(psa.defaults)
    if "guidance" in own:
        own["guidance"] = replace(card.guidance, scale=own["guidance"])
    return replace(card, **own)


def matching(index: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[ModelCard, ...]:
    """The models a checkpoint may be, by its `model_index.json` and its transformer's config."""
    return tuple(card for card in MODELS.values() if not mismatch(card, index, config))


def mismatch(card: ModelCard, index: Mapping[str, Any], config: Mapping[str, Any]) -> str:
    """What of a checkpoint is not this model's, in words; empty where all is."""
    if index.get("_class_name") != card.pipeline:
        return f"its pipeline is {index.get('_class_name')}, not {card.pipeline}"
    for found, expected, where in (
        (index, card.index, "model_index.json"),
        (config, card.config, "transformer/config.json"),
    ):
        for key, value in expected.items():
            own = _component(found.get(key))
            if not _same(own, value):
                return f"its {where} says {key}: {own!r}, not {value!r}"
    return ""


def _component(value: Any) -> Any:
    """A component is written as [library, class]; an absent one as [null, null]."""
    return value[1] if isinstance(value, list | tuple) and len(value) == 2 else value


def model_of(pipe: Any, transformers: Sequence[tuple[str, nn.Module]]) -> str | None:
    """The registry's name of a loaded model, by its class, depth and heads; None where no card, or
    more than one, fits. Another pipeline around the same transformer (image to video) counts."""
    config = getattr(transformers[0][1], "config", None)
    if config is None:
        return None
    found = [card for card in MODELS.values() if _same_sizes(card, config)]
    if pipe is not None:
        found = [card for card in found if card.experts == len(transformers)]
        found = [card for card in found if card.pipeline == type(pipe).__name__] or found
    return found[0].name if len(found) == 1 else None


def _same_sizes(card: ModelCard, config: Mapping[str, Any]) -> bool:
    stacks = (config.get("num_layers"), config.get("num_single_layers"))
    heads = (config.get("num_attention_heads"), config.get("attention_head_dim"))
    return (
        tuple(depth for depth in stacks if depth) == card.layers
        and heads == (card.heads, card.head_dim)
        and all(_same(config.get(key), value) for key, value in card.config.items())
    )


def _same(found: Any, expected: Any) -> bool:
    """Older files lack keys that were added later; their default is false or none."""
    return (found or None) == (expected or None)
