"""A recipe: the method and the curve that were found for a wanted quality or speed, on one model.

A small YAML file, read strictly: what to run, for which model and size, what was measured of it on
prompts that had no part in finding it, and on which machine.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from torch import nn

from jali import files
from jali.error import ArgumentError, InputError, shorten
from jali.integration.fingerprint import Fingerprint, check_same_model
from jali.methods import Dense, Method, Schedule
from jali.name import recipe_file
from jali.planning.curve import Curve
from jali.presets import VideoScale
from jali.presets.method import read_method, write_method
from jali.presets.schema import errors_at, read_object, write_fields
from jali.strict_yaml import parse_yaml
from jali.tokens.grid import Box
from jali.value import check_amount, check_choice, check_count, check_share
from jali.version import __version__

KIND, VERSION = "jali-recipe", 1
LARGEST = 2**20  # bytes; a recipe has a few thousand
MOST = 1_000_000  # of steps, pixels, frames
TARGETS = ("psnr", "ssim", "lpips", "speedup")
OTHER_WEIGHTS = "Tune these: jali tune"


@dataclass(frozen=True)
class RunSize:
    """The runs that a recipe was found with."""

    steps: int
    height: int
    width: int
    num_frames: int
    guidance: float

    def __post_init__(self) -> None:
        for name in ("steps", "height", "width", "num_frames"):
            check_count(name, getattr(self, name))
            if getattr(self, name) > MOST:
                raise ValueError(f"{name} must be at most {MOST:,}, got {getattr(self, name)}")
        check_amount("guidance", self.guidance)

    def other(self, here: Mapping[str, Any]) -> str | None:
        """How a run with these settings differs, in words; None where it does not."""
        own = dataclasses.asdict(self)
        said = (f"{name} {v:g}, not {own[name]:g}" for name, v in here.items() if v != own[name])
        return ", ".join(said) or None

    def box(self, scale: VideoScale | None) -> Box | None:
        """The tokens of such a clip; None where the pixels behind one are not known."""
        return None if scale is None else scale.box(self.num_frames, self.height, self.width)


@dataclass(frozen=True)
class Target:
    """What was asked for: at least so much, of LPIPS at most."""

    metric: str
    value: float

    def __post_init__(self) -> None:
        check_choice("metric", self.metric, TARGETS)
        check_amount("value", self.value)

    def is_met(self, value: float) -> bool:
        return value <= self.value if self.metric == "lpips" else value >= self.value

    def __str__(self) -> str:
        return {
            "psnr": f"{self.value:g} dB",
            "ssim": f"SSIM {self.value:g}",
            "lpips": f"LPIPS {self.value:g}",
            "speedup": f"{self.value:g} times as fast as dense",
        }[self.metric]


@dataclass(frozen=True)
class Spread:
    """A mean over clips, its 95 % interval, and that of one more clip; none of fewer than three."""

    mean: float
    low: float | None = None
    high: float | None = None
    next_low: float | None = None
    next_high: float | None = None

    def __post_init__(self) -> None:
        order = [self.next_low, self.low, self.mean, self.high, self.next_high]
        known = [value for value in order if value is not None]
        if known != sorted(known):
            raise ValueError(f"an interval goes from low to high, around the mean, got {known}")


@dataclass(frozen=True)
class Measured:
    """What came of held-out prompts: metrics by name, the share of all attention work that was
    done, and planning beside it."""

    clips: int
    metrics: Mapping[str, Spread]
    work: float
    planning: float = 0.0

    def __post_init__(self) -> None:
        check_count("clips", self.clips, least=0)
        check_share("work", self.work)
        check_amount("planning", self.planning)
        for name in self.metrics:
            check_choice("every one of metrics", name, TARGETS)


@dataclass(frozen=True)
class Recipe:
    """What to run for a wanted quality or speed, and what was measured of it.

    Made by `jali.tune` or `jali tune`; `recipe=` of `apply_sparse_attention` and
    `sparse_processor_mode`, and `--recipe` of the commands, run it.

        recipe = Recipe.read("recipe.yaml")
        handle = apply_sparse_attention(pipe, recipe=recipe)

    Args:
        model: the registry's name.
        fingerprints: of its transformers; any other is refused.
        method: the method without a schedule; `Dense` where nothing sparse was worth it.
        curve: how its total is spread over steps and layers; None for dense.
        run: steps and size that it was found with; others are allowed, with a warning.
        target: what was asked for.
        met: whether the held-out clips have it in their mean.
        measured: what they have.
        machine: on which.
        notes: what to know besides, in sentences.
        forecast: on other devices, how many times as fast all transformer calls would be, by the
            cost model.
    """

    model: str
    fingerprints: Mapping[str, Fingerprint]
    method: Method
    curve: Curve | None
    run: RunSize
    target: Target
    met: bool
    measured: Measured
    machine: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    date: str = ""
    jali: str = __version__
    forecast: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.method, Schedule) or not isinstance(self.method, Method):
            raise TypeError(f"a recipe has a method without a schedule, got {self.method!r}")
        if isinstance(self.method, Dense) != (self.curve is None):
            raise ValueError("a recipe has a curve, and only the method dense has none")
        if not self.fingerprints:
            raise ValueError("a recipe names the transformers it is for, in fingerprints")

    @property
    def scheduled(self) -> Method:
        """The method as it runs."""
        return self.method if self.curve is None else Schedule(self.method, curve=self.curve)

    def check_model(self, transformers: Mapping[str, nn.Module]) -> None:
        """Refuse another model than the recipe's, in a sentence."""
        check_same_model("recipe", self.fingerprints, transformers, self.model, OTHER_WEIGHTS)

    def warning(self, here: Mapping[str, Any], tokens: str | None = None) -> str | None:
        """What to know before a run of another size or number of steps: its settings, or what its
        tokens tell."""
        other = ", ".join(filter(None, (self.run.other(here), tokens)))
        if not other:
            return None
        return (
            f"the recipe was measured with other runs (here: {other}): its curve fits, its numbers "
            f"need not"
        )

    # As a file

    def write(self, path: str | os.PathLike[str]) -> None:
        """The whole file or none."""
        files.write_text(Path(path), self.text())

    def text(self) -> str:
        """The recipe as YAML."""
        plain = self.to_dict()
        return yaml.safe_dump(plain, sort_keys=False, allow_unicode=True, default_flow_style=None)

    def to_dict(self) -> dict[str, Any]:
        """Plain values: what the file holds."""
        plain: dict[str, Any] = {"kind": KIND, "version": VERSION, "model": self.model}
        plain |= write_method(self.method)
        plain["curve"] = None if self.curve is None else write_fields(self.curve)
        for name in ("run", "target", "met", "measured", "machine", "forecast", "notes", "date",
                     "jali"):  # fmt: skip
            plain[name] = _plain(getattr(self, name))
        plain["fingerprints"] = {n: _plain(f) for n, f in self.fingerprints.items()}
        return plain

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> Recipe:
        """The recipe of a file, or of a model by name that comes with one; `InputError`, in a
        sentence, where it holds none."""
        place = recipe_file(os.fspath(path))
        try:
            return cls.parse(files.read_text(place, LARGEST), str(place))
        except FileNotFoundError:
            raise InputError(f"there is no recipe file {place}") from None

    @classmethod
    def parse(cls, text: str, source: str = "the recipe") -> Recipe:
        try:
            data = parse_yaml(text)
            if not isinstance(data, Mapping) or data.get("kind") != KIND:
                raise ValueError(f"its kind is not {KIND} (a file of presets is a `config`)")
            if data.get("version") != VERSION or data.get("version") is True:
                raise ValueError(f"it has version {data.get('version')!r}, this reads {VERSION}")
            plain: PlainRecipe = read_object(PlainRecipe, data, "recipe")
            method = read_method({"method": plain.method, "options": plain.options}, "recipe")
            names = [f.name for f in dataclasses.fields(cls) if f.name != "method"]
            with errors_at("recipe"):
                return cls(method=method, **{name: getattr(plain, name) for name in names})
        except (ValueError, TypeError) as error:
            raise InputError(f"{source} is no recipe that can be used: {shorten(error)}") from None

    def __str__(self) -> str:
        return "\n".join(self.sentences())

    def sentences(self) -> list[str]:
        """What it is, and what was measured, for people."""
        what = f"{self.model}, asked for {self.target}: "
        if self.curve is None:
            return [f"{what}dense is the answer.", *self.notes]
        layers = " with factors for its layers" if self.curve.layers else ""
        spread = self.curve.words if isinstance(self.curve.shape, str) else "a curve of its own"
        what += f"{self.method.name} at a total of {self.curve.total:g} ({spread}){layers}."
        found = "; ".join(say_spread(name, one) for name, one in self.measured.metrics.items())
        clips = f"{self.measured.clips} held-out clip{'' if self.measured.clips == 1 else 's'}"
        said = [what, f"On {clips}: {found}."]
        if self.forecast:
            each = ", ".join(f"{value:.2f} on {name}" for name, value in self.forecast.items())
            said.append(f"Forecast of the speed of all transformer calls, over dense: {each}.")
        return [*said, *self.notes]


@dataclass(frozen=True)
class PlainRecipe:
    """The keys of the file."""

    kind: str
    version: int
    model: str
    method: str
    curve: Curve | None
    run: RunSize
    target: Target
    met: bool
    measured: Measured
    fingerprints: Mapping[str, Fingerprint]
    options: Mapping[Any, Any] = field(default_factory=dict)
    machine: Mapping[str, str | int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    date: str = ""
    jali: str = ""
    forecast: Mapping[str, float] = field(default_factory=dict)


def check_alone(**asked: Any) -> None:
    """Refuse what is asked for beside a recipe, which has it already."""
    for name, value in asked.items():
        if value is not None and value != {}:
            raise ArgumentError(
                name, "and `recipe` ask for the same in two ways: the recipe says it; leave one out"
            )


DIGITS = {"psnr": 1, "ssim": 3, "lpips": 3, "speedup": 2}
WORDS = {"psnr": "{} dB", "ssim": "SSIM {}", "lpips": "LPIPS {}", "speedup": "{} times as fast"}


def say_spread(name: str, found: Spread) -> str:
    """A mean, how far it can be trusted, and where one more clip is to be expected."""
    digits = DIGITS[name]
    said = WORDS[name].format(f"{found.mean:.{digits}f}")
    if found.low is None or found.high is None:
        return said
    said += f" ({found.low:.{digits}f} to {found.high:.{digits}f}"
    if found.next_low is not None and found.next_high is not None:
        said += f"; one more clip {found.next_low:.{digits}f} to {found.next_high:.{digits}f}"
    return f"{said})"


def _plain(value: Any) -> Any:
    """As YAML holds it: no tuples, no dataclasses."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(name): _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, tuple | list) else value
