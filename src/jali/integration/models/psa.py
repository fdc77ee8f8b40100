"""The names that PSA's scripts have for models, and what they make under them without asking."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True, slots=True)
class PsaScript:
    """One of PSA's scripts, and the model it runs.

    `defaults` are what PSA sets otherwise than the model's card: they hold under PSA's names.
    `differences` are what stays as it is here, in words; where PSA has another value for an option,
    it is listed with that option in `options` instead.
    """

    model: str  # the registry's name
    names: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    differences: tuple[str, ...] = ()
    options: Mapping[str, str] = field(default_factory=dict)


_SEED = {"--seed": "the seed is 0, there 42"}
_WAN = _SEED | {"--negative-prompt": "the negative prompt is empty, there a list of faults"}
_SCHEDULER = "the scheduler is the checkpoint's, there CogVideoXDPMScheduler with trailing spacing"
_LORA = "GYP666/BLADE:cogvideox-5b-psa-lora/pytorch_lora_weights.safetensors"
_NO_LORA = {"--lora": f"no LoRA is loaded, there the 4-step one: add --lora {_LORA}"}
_720P = {"height": 720, "width": 1280, "frames": 69}
_768P = {"height": 768, "width": 1280, "frames": 69}
_4STEPS = {"steps": 4, "guidance": 1.0}  # of a distilled model, which is guided already

_MODELS = (
    PsaScript("wan-t2v-1.3b", ("wan21_1.3b", "wan2.1_1.3b"), _720P, options=_WAN),
    PsaScript("wan-t2v-14b", ("wan21_14b", "wan2.1_14b"), _720P, options=_WAN),
    PsaScript(
        "wan2.2-ti2v-5b", ("wan22_5b", "wan2.2_5b"),
        differences=("the flow shift is 5.0, there 3.0",), options=_WAN,
    ),
    PsaScript(
        "wan2.2-t2v-a14b", ("wan22_a14b", "wan2.2_a14b"), _768P,
        differences=("the second expert's guidance is 3.0, there 4.0 as the first's",),
        options=_WAN,
    ),
    PsaScript("cogvideox-5b", ("cogvideo_5b",), differences=(_SCHEDULER,), options=_SEED),
    PsaScript(
        "cogvideox-5b", ("cogvideo_5b_lora",), _4STEPS, (_SCHEDULER,), _SEED | _NO_LORA,
    ),
    PsaScript("cogvideox1.5-5b", ("cogvideo1.5_5b",), differences=(_SCHEDULER,), options=_SEED),
)  # fmt: skip

PSA_MODELS: Mapping[str, PsaScript] = MappingProxyType(
    {name: model for model in _MODELS for name in model.names}
)
