"""Names that people type, known before torch is loaded: a typing mistake is answered at once.

Methods and backends stand in the registries of `jali.methods` and `jali.backends`, which need
torch. Where those are loaded, they are asked: they may have been given more.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from jali.error import ArgumentError
from jali.value import suggest

_METHODS = (
    "dense", "entropy", "rd", "psa", "rf_v2", "ada_bsa",
    "sol", "sparge", "draft", "mass",
    "radial", "sta", "svg", "svg2",
    "random", "local",
)  # fmt: skip
_BACKENDS = ("fa4", "fa4+triton", "triton", "flex", "torch", "reference")
USUAL = "rd"  # the method of a run where nobody names one
CONTROLS = ("random", "local")  # methods that any other has to beat
METRICS = ("psnr", "ssim", "ms_ssim", "lpips", "lpips_vgg", "vmaf", "flicker")
ON_ANY_DEVICE = ("auto", "torch", "reference")  # the other backends are kernels for CUDA
DTYPES = {
    "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16",
    "fp32": "float32", "float32": "float32",
}  # fmt: skip


def method_names() -> tuple[str, ...]:
    """Every method that is registered, also from outside."""
    loaded = getattr(sys.modules.get("jali.methods"), "METHODS", None)
    return _METHODS if loaded is None else tuple(loaded)


def backend_names() -> tuple[str, ...]:
    """Every backend, fastest first, after "auto"."""
    loaded = getattr(sys.modules.get("jali.backends"), "BACKENDS", None)
    return ("auto", *(_BACKENDS if loaded is None else loaded))


@functools.cache
def model_names() -> dict[str, str]:
    """Every name of every model in lower case, and the registry's name that it means."""
    return {
        name.lower(): model
        for model, data in _preset_files().items()
        if "model" in data
        for name in (model, *data.get("aliases", ()))
    }


def resolve_model(name: str) -> str:
    """The registry's name of a model, from that or any of its other names; case does not matter."""
    known = model_names()
    if name.lower() not in known:
        models = sorted(set(known.values()))
        raise ArgumentError(
            "model", f": no presets for the model {name!r}{suggest(name.lower(), models)}"
        )
    return known[name.lower()]


def preset_names(model: str | None = None) -> tuple[str, ...]:
    """The shipped presets of a model (its own, then those of its kind), or of all."""
    files = _preset_files()
    if model is None:
        return tuple(sorted({name for data in files.values() for name in data["presets"]}))
    own = files[resolve_model(model)]
    return tuple(dict.fromkeys([*own["presets"], *files[own["kind"]]["presets"]]))


@functools.cache
def _preset_files() -> dict[str, Mapping[str, Any]]:
    """By model; "video" and "image" are those of a kind."""
    from jali.strict_yaml import parse_yaml

    folder = resources.files("jali") / "presets" / "data"
    found = [file for file in folder.iterdir() if file.name.endswith(".yaml")]
    return {
        file.name.removesuffix(".yaml"): parse_yaml(file.read_text(encoding="utf-8"))
        for file in sorted(found, key=lambda file: file.name)
    }


NO_RECIPE = "none"  # where a command has one of its own


def shipped_recipe(model: str) -> str | None:
    """The name under which a recipe of this model comes with the package."""
    return "nano" if resolve_model(model) == "nano" and recipe_file("nano").is_file() else None


def recipe_file(told: str) -> Path:
    """The file of a recipe: of one that is shipped by the model's name, else where it says."""
    if told == "nano":
        return Path(str(resources.files("jali.nano"))) / "recipe.yaml"
    return Path(told).expanduser()


def is_recipe_file(told: object) -> bool:
    """Whether what is given where a preset may be is a recipe's file."""
    return isinstance(told, str) and told.endswith((".yaml", ".yml"))
