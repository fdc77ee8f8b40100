"""What a book says about itself, and how that is read from a file without trust."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from jali import files
from jali.maskbook.bits import width
from jali.maskbook.container import BookError, TensorTable, lay_out
from jali.maskbook.fingerprint import Fingerprint
from jali.presets import schema
from jali.tokens.grid import Box, Text, TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Order, Tiled

FORMAT = 1
MEAN = "mean"  # the branch of a book that averages over them
LIMITS = {"tokens": 2**24, "block": 2**16, "layers": 4096, "heads": 4096, "steps": 10_000}
TEXT_LIMIT = 500

Plain = str | int | float | bool | None


@dataclass(frozen=True)
class Header:
    """Everything of a book but its blocks.

    `transformers` names, for every step, the one that makes it (Wan 2.2 has two); `noise` is the
    noise level of every step, a scheduler's sigma or its timestep (`noise_assumed`: not seen in a
    run, but worked out). `branches` is ("mean",), or the guidance branches that were kept apart.
    `prompts` are digests, one for each prompt and seed.
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
    budgets: tuple[float, ...]
    prompts: tuple[str, ...]
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
    def slab(self) -> tuple[int, int, int, int]:
        """The shape of the importance of one layer in one step."""
        return len(self.branches), self.heads, self.M, self.N

    @property
    def layout_digest(self) -> str:
        """Of grid, order and blocks: books with another one cut the tokens differently."""
        plain = self.plain()
        return files.digest({name: plain[name] for name in ("grid", "order", "blocks")})

    def tensors(self) -> TensorTable:
        """What the file must hold, byte for byte."""
        outer = (self.steps, self.layers)
        branches, heads, M, N = self.slab
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
        bits = tuple(f"bits.{i}" for i in range(len(self.budgets)))
        return (*bits, "importance") if self.importance else bits

    @property
    def tables(self) -> tuple[str, ...]:
        """The small tensors, which are read and compared with the digest when a book is opened."""
        names = [f"costs.{i}" for i in range(len(self.budgets))]
        return (*names, "checks", *(name for name in self.tensors() if name == "filler"))

    def text(self) -> str:
        """Canonical JSON."""
        return files.canonical({**self.plain(), "format": FORMAT, "layout": self.layout_digest})

    def plain(self) -> dict[str, Any]:
        """Its fields as JSON holds them."""
        return {
            **vars(self),
            "fingerprints": {name: asdict(f) for name, f in self.fingerprints.items()},
            "grid": write_grid(self.grid),
            "order": schema.write(self.order),
            "blocks": [self.blocks.q, self.blocks.k],
        }


def read_header(text: str, name: str) -> Header:
    """The header in a file's metadata. Strict: every name known, every value of its kind."""
    try:
        plain = json.loads(text)
        if not isinstance(plain, dict):
            raise ValueError("it is not a mapping")
        version, digest = plain.pop("format", None), plain.pop("layout", None)
        if version != FORMAT:
            raise ValueError(
                f"it has format {version!r}, written by jali {str(plain.get('jali'))[:20]!r}; "
                f"this version reads format {FORMAT}"
            )
        wrong = sorted(set(plain) ^ {f.name for f in fields(Header)})
        if wrong:
            raise ValueError(f"missing or unknown: {', '.join(wrong)[:200]}")
        header = Header(
            grid=read_grid(plain["grid"]),
            blocks=Blocks(*schema.read(tuple[int, int], plain["blocks"], "blocks")),
            **_read_others(plain),
        )
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
    if not h.budgets and not h.importance:
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
