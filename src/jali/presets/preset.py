"""A preset: a method with a name, for a model; and all presets of a model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from jali.methods import Method
from jali.tokens.grid import Box, Text, TokenGrid
from jali.value import check_count, suggest


@dataclass(frozen=True, slots=True)
class VideoScale:
    """Pixels and frames behind one token along each axis; files call them divisors, as PSA does."""

    width: int = field(metadata={"key": "width_divisor"})
    height: int = field(metadata={"key": "height_divisor"})
    depth: int = field(metadata={"key": "depth_divisor"})

    def __post_init__(self) -> None:
        for name in ("width", "height", "depth"):
            check_count(f"{name} divisor", getattr(self, name))

    def box(self, frames: int, height: int, width: int) -> Box:
        """The tokens of a video of this size."""
        return Box(-(-frames // self.depth), -(-height // self.height), -(-width // self.width))


@dataclass(frozen=True)
class Preset:
    """A method with a name, and what the file it comes from says of the model it is meant for.

        print(load_preset("entropy_balanced").method)

    Args:
        name: of the preset.
        model: the registry's name of its model; None where it is for every model.
        method: the method with its schedule.
        description: in words.
        source: the file it comes from.
        video_scale, text_length: kept where a file states them (presets of this package do not:
            the grid comes from the call); `check` compares them with the grid of a run.
        tile_n: the key tile PSA's kernels were tuned with.
        notes: what was decided for want of a key.
    """

    name: str
    model: str | None
    method: Method
    description: str = ""
    source: str = ""
    video_scale: VideoScale | None = None
    text_length: int | None = None
    tile_n: int | None = None
    notes: tuple[str, ...] = ()

    def check(self, grid: TokenGrid, size: tuple[int, int, int] | None = None) -> None:
        """Refuse a run with another text length or, given (frames, height, width) in pixels,
        another video scale."""
        text = sum(s.tokens for s in grid.segments if isinstance(s, Text))
        if self.text_length is not None and text != self.text_length:
            raise ValueError(
                f"preset {self.name!r} of {self.source} is for {self.text_length} text tokens, "
                f"but this run has {text}; set text_length to {text} or remove it"
            )
        box = next((s for s in grid.segments if isinstance(s, Box)), None)
        if self.video_scale is None or size is None or box is None:
            return
        expected = self.video_scale.box(*size)
        if box != expected:
            pixels = "×".join(map(str, size))
            raise ValueError(
                f"preset {self.name!r} of {self.source} makes {expected} tokens of {pixels} "
                f"frames × height × width by its video_scale, but this run has {box}"
            )

    @property
    def nominal_cost(self) -> float | None:
        """Share of dense work that is asked for: of the whole run where it has a total, else of a
        sparse call; None where only the data can tell."""
        return self.method.mean_budget if self.method.total is None else self.method.total

    def __str__(self) -> str:
        cost = self.nominal_cost
        work = "cost depends on the data" if cost is None else f"nominal cost {cost:.3f}"
        return f"{self.model or 'any model'}: {self.name} ({work}). {self.description}".rstrip()


@dataclass(frozen=True)
class ModelPresets:
    """The presets of one model: `section` is its name in the file. `defaults` are those of other
    names, where they are not the `default`."""

    section: str
    presets: tuple[Preset, ...]
    aliases: tuple[str, ...] = ()
    kind: str | None = None
    default: str | None = None
    defaults: Mapping[str, str] = field(default_factory=dict)

    def names(self) -> tuple[str, ...]:
        return tuple(preset.name for preset in self.presets)

    def default_under(self, name: str) -> str | None:
        """The default preset of the model by this name of it."""
        return self.defaults.get(name.lower(), self.default)

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
        default = " (its default)" if name is None else ""
        known = suggest(wanted, self.names())
        raise ValueError(f"{self.section} has no preset {wanted!r}{default}{known}")
