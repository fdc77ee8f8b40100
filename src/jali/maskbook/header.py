"""What a book says about itself, and how that is read from a file without trust."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jali import files
from jali.integration.fingerprint import Fingerprint
from jali.maskbook.bits import width
from jali.maskbook.container import BookError, TensorTable, lay_out, unique
from jali.planning.plan import LEVELS, SKIP, check_ratios
from jali.presets import schema
from jali.tokens.grid import Box, Text, TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Order, Tiled

# By format, what a header does not say: importance has no errors, and the other way round.
NOT_SAID = {
    1: ("errors",),
    2: ("budgets", "importance", "importance_error", "costs", "sharpness"),
}
MEAN = "mean"  # the branch of a book that averages over them
LIMITS = {"tokens": 2**24, "block": 2**16, "layers": 4096, "heads": 4096, "steps": 10_000}
TEXT_LIMIT = 500

Plain = str | int | float | bool | None


@dataclass(frozen=True)
class Errors:
    """What a book of rd holds: errors of these levels (as plans write them, without 1), in tables
    that serve a share `keep` of the run each."""

    levels: tuple[int, ...]
    keep: float

    def __post_init__(self) -> None:
        known = LEVELS[1:]
        if not self.levels or self.levels != tuple(x for x in known if x in self.levels):
            raise ValueError(
                f"levels must be some of {', '.join(map(str, known))}, in this order, got "
                f"{self.levels!r}"
            )
        if not 1 / LIMITS["steps"] <= self.keep <= 1:
            raise ValueError(
                f"keep is the share of a run that a table serves, at least 1/{LIMITS['steps']} and "
                f"at most 1, got {self.keep!r}"
            )

    @property
    def ratios(self) -> tuple[int, ...]:
        """Of the plans that are made of them."""
        return (1, *(level for level in self.levels if level != SKIP))

    def bucket(self, step: int, steps: int) -> int:
        """Which part of a run a step lies in: as `RateDistortion.period` counts them."""
        return int(step / (self.keep * steps) + 1e-9)


@dataclass(frozen=True)
class Header:
    """Everything of a book but its blocks.

    `transformers` names, for every step, the one that makes it (Wan 2.2 has two); `noise` is the
    noise level of every step, a scheduler's sigma or its timestep (`noise_assumed`: not seen in a
    run, but worked out). `branches` is ("mean",), or the guidance branches that were kept apart.
    `prompts` are digests, one for each prompt and seed. A book holds importance and bits (format
    1), or the errors of rd (format 2).
    """

    fingerprints: Mapping[str, Fingerprint]
    grid: TokenGrid
    order: Order
    blocks: Blocks
    layers: int
    heads: int
    noise: tuple[float, ...]
    noise_kind: str
    transformers: tuple[str, ...]
    branches: tuple[str, ...]
    prompts: tuple[str, ...]
    budgets: tuple[float, ...] = ()
    noise_assumed: bool = False
    importance: bool = True
    importance_error: float | None = None
    costs: tuple[float, ...] = ()
    sharpness: float = 1.0
    scorer: str = "sampled"
    model: str | None = None
    settings: Mapping[str, Plain] = field(default_factory=dict)
    history: tuple[str, ...] = ()
    jali: str = ""
    errors: Errors | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def steps(self) -> int:
        return len(self.noise)

    @property
    def M(self) -> int:
        return -(-self.grid.tokens // self.blocks.q)

    @property
    def N(self) -> int:
        return -(-self.grid.tokens // self.blocks.k)

    @property
    def format(self) -> int:
        return 1 if self.errors is None else 2

    @property
    def places(self) -> tuple[tuple[int, str], ...]:
        """What has tables of its own, along the run: (step, transformer), or of rd (part of the
        run, transformer)."""
        steps = enumerate(self.transformers)
        if self.errors is None:
            return tuple(steps)
        of = self.errors.bucket
        return tuple(dict.fromkeys((of(step, self.steps), name) for step, name in steps))

    @property
    def outer(self) -> tuple[int, int]:
        """How many places there are, and layers in each."""
        return len(self.places), self.layers

    @property
    def slab(self) -> tuple[int, ...]:
        """The shape of the importance of one layer in one step, or of its errors."""
        own = (len(self.branches), self.heads, self.M, self.N)
        return own if self.errors is None else (*own, len(self.errors.levels))

    @property
    def layout_digest(self) -> str:
        """Of grid, order and blocks: books with another one cut the tokens differently."""
        plain = self.plain()
        return files.digest({name: plain[name] for name in ("grid", "order", "blocks")})

    def tensors(self) -> TensorTable:
        """What the file must hold, byte for byte."""
        outer = self.outer
        branches, heads, M, N = self.slab[:4]
        if self.errors is not None:
            filler = -math.prod((*outer, *self.slab)) % 8
            return lay_out(
                {"errors": ("U8", (*outer, *self.slab))}
                | ({"filler": ("U8", (filler,))} if filler else {})
                | {"tops": ("F32", (*outer, branches, heads)), "checks": ("U32", (1, *outer))}
            )
        budgets = range(len(self.budgets))
        parts: dict[str, tuple[str, tuple[int, ...]]] = {
            f"bits.{i}": ("U8", (*outer, branches, heads, M, width(N))) for i in budgets
        }
        if self.importance:
            parts["importance"] = ("U8", (*outer, branches, heads, M, N))
        if odd := sum(math.prod(shape) for _, shape in parts.values()) % 8:
            parts["filler"] = ("U8", (8 - odd,))  # floats start at a multiple of their size
        if self.importance:
            parts["peaks"] = ("F32", (*outer, branches, heads, M))
        parts |= {f"costs.{i}": ("F32", (*outer, branches, heads)) for i in budgets}
        parts["checks"] = ("U32", (len(self.checked), *outer))
        return lay_out(parts)

    def sizes(self) -> dict[str, int]:
        """The bytes of every tensor."""
        places = {name: tensor["data_offsets"] for name, tensor in self.tensors().items()}
        return {name: end - start for name, (start, end) in places.items()}

    @property
    def checked(self) -> tuple[str, ...]:
        """The tensors with a checksum for every step and layer."""
        if self.errors is not None:
            return ("errors",)
        bits = tuple(f"bits.{i}" for i in range(len(self.budgets)))
        return (*bits, "importance") if self.importance else bits

    @property
    def tables(self) -> tuple[str, ...]:
        """The small tensors, which are read and compared with the digest when a book is opened."""
        own = [f"costs.{i}" for i in range(len(self.budgets))]
        names = own if self.errors is None else ["tops"]
        return (*names, "checks", *(name for name in self.tensors() if name == "filler"))

    def text(self) -> str:
        """Canonical JSON."""
        said = {n: x for n, x in self.plain().items() if n not in NOT_SAID[self.format]}
        return files.canonical({**said, "format": self.format, "layout": self.layout_digest})

    def plain(self) -> dict[str, Any]:
        """Its fields as JSON holds them."""
        return {
            **vars(self),
            "fingerprints": {name: asdict(f) for name, f in self.fingerprints.items()},
            "grid": write_grid(self.grid),
            "order": schema.write(self.order),
            "blocks": [self.blocks.q, self.blocks.k],
            "errors": None if self.errors is None else asdict(self.errors),
        }


def read_header(text: str, name: str) -> Header:
    """The header in a file's metadata. Strict: every name known, every value of its kind."""
    try:
        plain = json.loads(text, object_pairs_hook=unique)
        if not isinstance(plain, dict):
            raise ValueError("it is not a mapping")
        version, digest = plain.pop("format", None), plain.pop("layout", None)
        if isinstance(version, bool) or version not in NOT_SAID:
            raise ValueError(
                f"it has format {version!r}, written by jali {str(plain.get('jali'))[:20]!r}; "
                f"this version reads formats {' and '.join(map(str, NOT_SAID))}"
            )
        wrong = sorted(set(plain) ^ {f.name for f in fields(Header)} ^ set(NOT_SAID[version]))
        if wrong:
            raise ValueError(f"missing or unknown: {', '.join(wrong)[:200]}")
        header = Header(
            grid=read_grid(plain["grid"]),
            blocks=Blocks(*schema.read(tuple[int, int], plain["blocks"], "blocks")),
            **{"importance": version == 1, **_read_others(plain)},
        )
        if header.format != version:
            raise ValueError(f"it has format {version}, and nothing of it")
        if header.layout_digest != digest:
            raise ValueError("its layout does not match the digest of it")
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise BookError(f"{name} is not a readable book: {str(error)[:500]}") from None
    return header


def _read_others(plain: Mapping[str, Any]) -> dict[str, Any]:
    """All fields but grid and blocks, which a book writes shorter than other files do."""
    others = {name: value for name, value in plain.items() if name not in ("grid", "blocks")}
    return schema.read_fields(Header, others, "header", without=("grid", "blocks"))


def write_grid(grid: TokenGrid) -> list[list[int]]:
    """[tokens] for text, [frames, height, width] for a box."""
    return [[s.tokens] if isinstance(s, Text) else list(s.shape) for s in grid.segments]


def read_grid(plain: Any) -> TokenGrid:
    """The grid that `write_grid` wrote; anything else is a ValueError or a TypeError."""
    segments = schema.read(tuple[tuple[int, ...], ...], plain, "grid")
    if len(segments) > 64 or not all(len(segment) in (1, 3) for segment in segments):
        raise ValueError(f"a grid is 1 to 64 segments of one or three sizes, got {str(plain)[:80]}")
    return TokenGrid(tuple(Text(*s) if len(s) == 1 else Box(*s) for s in segments))


def check_blocks(blocks: Blocks) -> None:
    """Refuse blocks that no book could hold."""
    if max(blocks.q, blocks.k) > LIMITS["block"]:
        raise ValueError(f"blocks of at most {LIMITS['block']}, got {blocks}")


def _check(h: Header) -> None:
    """Every rule of a header, whoever made it."""
    plain = h.plain()
    _read_others(plain)
    for text in _texts(plain):
        if len(text) > TEXT_LIMIT or not text.isprintable():
            raise ValueError(f"a text of at most {TEXT_LIMIT} printable letters, got {text!r:.80}")
    check_blocks(h.blocks)
    if h.grid.tokens > LIMITS["tokens"]:
        raise ValueError(f"grid {h.grid} has more than {LIMITS['tokens']} tokens")
    if isinstance(h.order, Tiled) and max(h.order.window) > LIMITS["block"]:
        raise ValueError(f"windows of at most {LIMITS['block']}, got {h.order}")
    for name in ("layers", "heads", "steps"):
        if not 1 <= getattr(h, name) <= LIMITS[name]:
            raise ValueError(f"{name} must be in 1..{LIMITS[name]}, got {getattr(h, name)}")
    if h.noise_kind not in ("sigma", "timestep"):
        raise ValueError(f"noise_kind is sigma or timestep, got {h.noise_kind!r}")
    if len(h.transformers) != h.steps:
        raise ValueError("transformers must name one for every step")
    if set(h.transformers) - set(h.fingerprints):
        raise ValueError("a step names a transformer without a fingerprint")
    if not h.branches or len(set(h.branches)) != len(h.branches):
        raise ValueError(f"branches must be different names, got {h.branches!r}")
    if MEAN in h.branches and len(h.branches) > 1:
        raise ValueError("a book averages over branches or keeps them apart, not both")
    if len(h.budgets) > 64 or list(h.budgets) != sorted(set(h.budgets)):
        raise ValueError(f"budgets must be different and ascending, got {h.budgets!r}")
    if not all(0 <= share <= 1 for share in (*h.budgets, *h.costs)):
        raise ValueError(f"budgets and costs lie in 0..1, got {h.budgets} and {h.costs}")
    if h.costs and len(h.costs) != len(h.budgets):
        raise ValueError("costs must be one for every budget")
    if h.errors is not None:
        if h.budgets or h.importance or h.costs or h.importance_error is not None:
            raise ValueError("a book holds importance and bits, or errors, not both")
        check_ratios(h.errors.ratios, h.blocks.k)
    elif not h.budgets and not h.importance:
        raise ValueError("a book without importance needs budgets")
    if h.sharpness < 0:
        raise ValueError(f"sharpness must be >= 0, got {h.sharpness}")


def _texts(plain: Any) -> Iterator[str]:
    """All of a plain value, names included."""
    if isinstance(plain, str):
        yield plain
    elif isinstance(plain, Mapping | list | tuple):
        for item in plain.items() if isinstance(plain, Mapping) else plain:
            yield from _texts(item)
