"""What jali knows of each transformer class: a table, no model code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from jali.integration.geometry import Geometry, ImageIds, LatentShape, NamedSizes, ShapeList
from jali.tokens.grid import Box, Text, TokenGrid
from jali.value import check_choice

# How q, k and v come to us: through diffusers' dispatcher, or a `__call__` of our own.
ATTENTION_CALLS = ("dispatcher", "cogvideox", "hunyuan15")
BRANCHES: Mapping[str, str] = MappingProxyType(
    {
        "cond": "cond", "uncond": "uncond", "cond_uncond": "batched",
        "pred_cond": "cond", "pred_uncond": "uncond",
    }
)  # fmt: skip


@dataclass(frozen=True)
class Family:
    """One transformer class.

    Args:
        name: in words, for messages.
        transformer: the name of the class.
        layers: a regex over module names: its self-attentions, in order of execution.
        geometry: how the grid of a call follows from its arguments.
        text: where text tokens lie in the joint sequence: "none", "front" or "back".
        attention_call: how jali gets at q, k and v; a new class goes through diffusers' dispatcher.
        branches: translates the names under which pipelines announce their passes; an unknown
            name stays as it is.
    """

    name: str
    transformer: str
    layers: str
    geometry: Geometry = field(default_factory=LatentShape)
    text: str = "none"
    attention_call: str = "dispatcher"
    branches: Mapping[str, str] = field(default_factory=lambda: BRANCHES)

    def __post_init__(self) -> None:
        check_choice("text", self.text, ("none", "front", "back"))
        check_choice("attention_call", self.attention_call, ATTENTION_CALLS)
        if not isinstance(self.geometry, Geometry):
            raise TypeError(f"geometry must be a Geometry, got {self.geometry!r}")

    def grid(self, boxes: tuple[Box, ...], tokens: int) -> TokenGrid | str:
        """The grid of a sequence of `tokens`, or why there is none. Never guesses."""
        seen = sum(box.tokens for box in boxes)
        text = tokens - seen
        if not boxes:
            return "the call does not say its frames, height and width"
        if text < 0 or (text > 0 and self.text == "none"):
            shapes = " + ".join(map(str, boxes))
            return f"the sequence has {tokens} tokens, but {shapes} are {seen}"
        if text == 0:
            return TokenGrid(boxes)
        words = Text(text)
        return TokenGrid((words, *boxes) if self.text == "front" else (*boxes, words))


_WAN = r"^blocks\.\d+\.attn1$"
_ONE = r"^transformer_blocks\.\d+\.attn$"
_TWO = r"^(single_)?transformer_blocks\.\d+\.attn$"
_FIRST = r"^transformer_blocks\.\d+\.attn1$"

_TABLE = (
    Family("Wan", "WanTransformer3DModel", _WAN),
    Family("Wan VACE", "WanVACETransformer3DModel", r"^(vace_)?blocks\.\d+\.attn1$"),
    Family(
        "CogVideoX", "CogVideoXTransformer3DModel", _FIRST, LatentShape(axes=(1, 3, 4)),
        text="front", attention_call="cogvideox",
    ),
    Family("HunyuanVideo", "HunyuanVideoTransformer3DModel", _TWO, text="back"),
    Family(
        "HunyuanVideo 1.5", "HunyuanVideo15Transformer3DModel", _ONE,
        text="back", attention_call="hunyuan15",
    ),
    Family("LTX-Video", "LTXVideoTransformer3DModel", _FIRST, NamedSizes()),
    Family("LTX-2", "LTX2VideoTransformer3DModel", _FIRST, NamedSizes()),
    Family("Flux", "FluxTransformer2DModel", _TWO, ImageIds(), text="front"),
    Family("Qwen-Image", "QwenImageTransformer2DModel", _ONE, ShapeList(), text="front"),
)  # fmt: skip
FAMILIES: dict[str, Family] = {family.transformer: family for family in _TABLE}


def register_family(family: Family) -> None:
    """Teach jali another transformer class. One that is known already is replaced.

        register_family(
            Family("Mine", "MyTransformer3DModel", layers=r"^blocks[.][0-9]+[.]attn1$", text="back")
        )

    Args:
        family: what there is to know of it; its subclasses are of the same family.

    Raises:
        TypeError: it is not a `Family`.
    """
    if not isinstance(family, Family):
        raise TypeError(f"register_family takes a Family, got {family!r}")
    FAMILIES[family.transformer] = family


def family_of(transformer: Any) -> Family:
    """The family of a transformer, by its class or one that it inherits from."""
    for kind in type(transformer).__mro__:
        if kind.__name__ in FAMILIES:
            return FAMILIES[kind.__name__]
    name = type(transformer).__name__
    own = "Describe another class with jali.register_family(Family(...))"
    if "transformer" not in name.lower():
        raise ValueError(
            f"{name} is no transformer that jali knows: give a diffusers pipeline or its "
            f".transformer. {own}"
        )
    raise ValueError(f"jali does not know {name}; it knows {', '.join(FAMILIES)}. {own}")
