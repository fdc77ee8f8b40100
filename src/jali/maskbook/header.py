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
from jali.tokens.grid import Box, Text, TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import FrameWindows, Gilbert, Order, Raster, Tiled

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
        plain = self._plain()
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
        return files.canonical({**self._plain(), "format": FORMAT, "layout": self.layout_digest})

    def _plain(self) -> dict[str, Any]:
        return {
            **vars(self),
            "fingerprints": {name: asdict(f) for name, f in self.fingerprints.items()},
            "grid": write_grid(self.grid),
            "order": write_order(self.order),
            "blocks": [self.blocks.q, self.blocks.k],
        }


def read_header(text: str, name: str) -> Header:
    """The header in a file's metadata. Strict: every name known, every value of its kind."""
    try:
        plain = _mapping(json.loads(text))
        version, digest = plain.pop("format", None), plain.pop("layout", None)
        if version != FORMAT:
            raise ValueError(
                f"it has format {version!r}, written by jali {str(plain.get('jali'))[:20]!r}; "
                f"this version reads format {FORMAT}"
            )
        wrong = sorted(set(plain) ^ {f.name for f in fields(Header)})
        if wrong:
            raise ValueError(f"missing or unknown: {', '.join(wrong)[:200]}")
        for key in ("noise", "transformers", "branches", "budgets", "prompts", "costs", "history"):
            plain[key] = tuple(_list(plain[key]))
        plain["grid"], plain["order"] = read_grid(plain["grid"]), read_order(plain["order"])
        plain["blocks"] = Blocks(*_list(plain["blocks"]))
        plain["fingerprints"] = {
            key: _read_fingerprint(**_mapping(one))
            for key, one in _mapping(plain["fingerprints"]).items()
        }
        header = Header(**plain)
        if header.layout_digest != digest:
            raise ValueError("its layout does not match the digest of it")
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise BookError(f"{name} is not a readable book: {error}") from None
    return header


def write_grid(grid: TokenGrid) -> list[list[int]]:
    """[tokens] for text, [frames, height, width] for a box."""
    return [[s.tokens] if isinstance(s, Text) else list(s.shape) for s in grid.segments]


def read_grid(plain: Any) -> TokenGrid:
    """The grid that `write_grid` wrote; anything else is a ValueError or a TypeError."""
    segments = [_list(segment) for segment in _list(plain)]
    if len(segments) > 64 or not all(len(segment) in (1, 3) for segment in segments):
        raise ValueError(f"a grid is 1 to 64 segments of one or three sizes, got {str(plain)[:80]}")
    return TokenGrid(tuple(Text(*s) if len(s) == 1 else Box(*s) for s in segments))


_ORDERS: dict[str, Order] = {
    "raster": Raster(), "gilbert": Gilbert(), "frame_windows": FrameWindows(),
}  # fmt: skip


def write_order(order: Order) -> Any:
    """The name of an order, or {"tiled": window, "first_frame_last": …}."""
    if isinstance(order, Tiled):
        return {"tiled": list(order.window), "first_frame_last": order.first_frame_last}
    for name, known in _ORDERS.items():
        if order == known:
            return name
    raise ValueError(f"a book cannot hold the order {order!r}; use one of jali.tokens.order")


def read_order(plain: Any) -> Order:
    """The order that `write_order` wrote; anything else is a ValueError."""
    if isinstance(plain, str) and plain in _ORDERS:
        return _ORDERS[plain]
    if isinstance(plain, dict) and set(plain) == {"tiled", "first_frame_last"}:
        window: Any = tuple(_list(plain["tiled"]))
        sizes = all(type(n) is int and n <= LIMITS["block"] for n in window)
        if sizes and type(plain["first_frame_last"]) is bool:
            return Tiled(window, plain["first_frame_last"])
    raise ValueError(f"unknown order {str(plain)[:80]}")


def _read_fingerprint(kind: Any, config: Any, weights: Any) -> Fingerprint:
    values = {key: tuple(_list(numbers)) for key, numbers in _mapping(weights).items()}
    return Fingerprint(kind, config, values)


def _list(plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise ValueError(f"expected a list, got {str(plain)[:80]}")
    return plain


def _mapping(plain: Any) -> dict[str, Any]:
    if not isinstance(plain, dict):
        raise ValueError(f"expected a mapping, got {str(plain)[:80]}")
    return plain


def check_blocks(blocks: Blocks) -> None:
    """Refuse blocks that no book could hold."""
    if max(blocks.q, blocks.k) > LIMITS["block"]:
        raise ValueError(f"blocks of at most {LIMITS['block']}, got {blocks}")


def _check(h: Header) -> None:
    """Every rule of a header, whoever made it."""
    check_blocks(h.blocks)
    write_order(h.order)
    if h.grid.tokens > LIMITS["tokens"]:
        raise ValueError(f"grid {h.grid} has more than {LIMITS['tokens']} tokens")
    for name in ("layers", "heads", "steps"):
        value = getattr(h, name)
        if type(value) is not int or not 1 <= value <= LIMITS[name]:
            raise ValueError(f"{name} must be an int in 1..{LIMITS[name]}, got {value!r}")
    for name in ("importance", "noise_assumed"):
        if type(getattr(h, name)) is not bool:
            raise ValueError(f"{name} is true or false, got {getattr(h, name)!r}")
    if not isinstance(h.settings, Mapping):
        raise ValueError("settings must be a mapping")
    for what, number in _numbers(h):
        real = isinstance(number, int | float) and not isinstance(number, bool)
        if not real or not math.isfinite(number):
            raise ValueError(f"{what} must be a finite number, got {number!r:.80}")
    for text in _texts(h):
        if not isinstance(text, str) or len(text) > TEXT_LIMIT or not text.isprintable():
            raise ValueError(f"a text of at most {TEXT_LIMIT} printable letters, got {text!r:.80}")
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


def _numbers(h: Header) -> Iterator[tuple[str, Any]]:
    named = {"noise level": h.noise, "budget": h.budgets, "cost": h.costs}
    for f in h.fingerprints.values():
        named |= {f"weight of {name}": values for name, values in f.weights.items()}
    for what, values in named.items():
        yield from ((f"a {what}", value) for value in values)
    yield "sharpness", h.sharpness
    if h.importance_error is not None:
        yield "importance_error", h.importance_error
    for name, value in h.settings.items():
        if value is not None and not isinstance(value, str | bool):
            yield f"the setting {name}", value


def _texts(h: Header) -> Iterator[Any]:
    yield from (h.scorer, h.jali, *h.prompts, *h.history, *h.transformers, *h.branches)
    yield from (*h.fingerprints, *h.settings, *([] if h.model is None else [h.model]))
    yield from (value for value in h.settings.values() if isinstance(value, str))
    for f in h.fingerprints.values():
        yield from (f.kind, f.config, *f.weights)
