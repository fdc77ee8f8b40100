"""What a book says about itself, and how that is read from a file without trust."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from jali.maskbook.bits import width
from jali.maskbook.container import BookError, Entry, lay_out
from jali.tokens.grid import Box, Text, TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import FrameWindows, Gilbert, Order, Raster, Tiled

FORMAT = 1
MEAN = "mean"  # the branch of a book that averages over them
LIMITS = {"tokens": 2**24, "block": 2**16, "layers": 4096, "heads": 4096, "steps": 10_000}
TEXT_LIMIT = 500
NOISES = ("sigma", "timestep")

Plain = str | int | float | bool | None


@dataclass(frozen=True)
class Fingerprint:
    """A transformer: its class, a digest of its configuration, and a few of its weights."""

    kind: str
    config: str
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    def other_model(self, here: Fingerprint) -> str | None:
        """Why `here` is another model; None where it is the same."""
        if self.kind != here.kind:
            return f"the book is of a {self.kind}, this is a {here.kind}"
        if self.config != here.config:
            return (
                f"the book's {self.kind} has the configuration {self.config[:12]}, this one "
                f"{here.config[:12]}"
            )
        return None

    def other_weights(self, here: Fingerprint) -> str | None:
        """Where the weights differ by more than a change of precision (fp8 is the coarsest) makes
        them."""
        for name, values in self.weights.items():
            found = here.weights.get(name)
            if found is None or len(found) != len(values):
                continue
            largest = max(map(abs, values), default=0.0)
            for own, other in zip(values, found, strict=True):
                if abs(own - other) > 0.08 * largest + 1e-6:
                    return f"{name} holds {own:.4g} in the book and {other:.4g} here"
        return None


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
        plain = {
            "grid": write_grid(self.grid),
            "order": write_order(self.order),
            "blocks": [self.blocks.q, self.blocks.k],
        }
        return hashlib.sha256(canonical(plain).encode()).hexdigest()

    def tensors(self) -> tuple[Entry, ...]:
        """What the file must hold, byte for byte."""
        outer = (self.steps, self.layers)
        branches, heads, M, N = self.slab
        parts: dict[str, tuple[str, tuple[int, ...]]] = {}
        for i in range(len(self.budgets)):
            parts[f"bits.{i}"] = ("U8", (*outer, branches, heads, M, width(N)))
        if self.importance:
            parts["importance"] = ("U8", (*outer, branches, heads, M, N))
            # Floats start at a multiple of their size.
            odd = sum(entry.bytes for entry in lay_out(parts)) % 8
            if odd:
                parts["filler"] = ("U8", (8 - odd,))
            parts["peaks"] = ("F32", (*outer, branches, heads, M))
        elif odd := sum(entry.bytes for entry in lay_out(parts)) % 8:
            parts["filler"] = ("U8", (8 - odd,))
        for i in range(len(self.budgets)):
            parts[f"costs.{i}"] = ("F32", (*outer, branches, heads))
        parts["checks"] = ("U32", (len(self.checked), *outer))
        return lay_out(parts)

    @property
    def checked(self) -> tuple[str, ...]:
        """The tensors with a checksum for every step and layer."""
        bits = tuple(f"bits.{i}" for i in range(len(self.budgets)))
        return (*bits, "importance") if self.importance else bits

    def text(self) -> str:
        """Canonical JSON."""
        plain: dict[str, Any] = {"format": FORMAT}
        for f in fields(self):
            value = getattr(self, f.name)
            plain[f.name] = _WRITERS.get(f.name, _as_is)(value)
        plain["layout"] = self.layout_digest
        return canonical(plain)


def read_header(text: str, name: str) -> Header:
    """The header in a file's words. Strict: every name known, every value of its kind."""
    try:
        plain = json.loads(text, parse_constant=_no_number)
        if not isinstance(plain, dict):
            raise ValueError("it is not a mapping")
        version = plain.pop("format", None)
        if version != FORMAT:
            raise ValueError(
                f"it has format {version!r}, written by jali {str(plain.get('jali'))[:20]!r}; "
                f"this version reads format {FORMAT}"
            )
        digest = plain.pop("layout", None)
        known = {f.name for f in fields(Header)}
        if set(plain) != known:
            wrong = sorted(map(str, set(plain) ^ known))
            raise ValueError(f"missing or unknown: {', '.join(wrong)[:200]}")
        values = {key: _READERS.get(key, _as_is)(value) for key, value in plain.items()}
        header = Header(**values)
        if header.layout_digest != digest:
            raise ValueError("its layout does not match the digest of it")
    except (ValueError, TypeError, KeyError, RecursionError, OverflowError) as error:
        raise BookError(f"{name} is not a readable book: {error}") from None
    return header


def canonical(plain: Any) -> str:
    return json.dumps(plain, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _no_number(value: str) -> None:
    raise ValueError(f"{value} is no number")


def _as_is(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


# Grids and orders


def write_grid(grid: TokenGrid) -> list[Any]:
    """[tokens] for text, [frames, height, width] for a box."""
    return [[s.tokens] if isinstance(s, Text) else list(s.shape) for s in grid.segments]


def read_grid(plain: Any) -> TokenGrid:
    if not isinstance(plain, list) or not 1 <= len(plain) <= 64:
        raise ValueError(f"a grid is a list of 1 to 64 segments, got {str(plain)[:80]}")
    for segment in plain:
        sizes = isinstance(segment, list) and len(segment) in (1, 3)
        if not sizes or not all(type(n) is int for n in segment):
            raise ValueError(f"a segment is one or three sizes, got {str(segment)[:80]}")
    return TokenGrid(tuple(Text(*s) if len(s) == 1 else Box(*s) for s in plain))


_ORDERS: dict[str, Order] = {
    "raster": Raster(), "gilbert": Gilbert(), "frame_windows": FrameWindows(),
}  # fmt: skip


def write_order(order: Order) -> Any:
    if isinstance(order, Tiled):
        return {"tiled": list(order.window), "first_frame_last": order.first_frame_last}
    for name, known in _ORDERS.items():
        if order == known:
            return name
    raise ValueError(f"a book cannot hold the order {order!r}; use one of jali.tokens.order")


def read_order(plain: Any) -> Order:
    if isinstance(plain, str) and plain in _ORDERS:
        return _ORDERS[plain]
    if isinstance(plain, dict) and set(plain) == {"tiled", "first_frame_last"}:
        window, last = plain["tiled"], plain["first_frame_last"]
        good = isinstance(window, list) and len(window) == 3 and isinstance(last, bool)
        if good and all(type(n) is int and 1 <= n <= LIMITS["block"] for n in window):
            return Tiled((window[0], window[1], window[2]), last)
    raise ValueError(f"unknown order {str(plain)[:80]}")


def _read_blocks(plain: Any) -> Blocks:
    if not isinstance(plain, list) or len(plain) != 2:
        raise ValueError(f"blocks are two sizes, got {str(plain)[:80]}")
    return Blocks(*plain)


def _write_fingerprints(given: Mapping[str, Fingerprint]) -> Any:
    return {
        name: {
            "kind": f.kind,
            "config": f.config,
            "weights": {key: list(values) for key, values in f.weights.items()},
        }
        for name, f in given.items()
    }


def _read_fingerprints(plain: Any) -> dict[str, Fingerprint]:
    if not isinstance(plain, dict):
        raise ValueError("fingerprints must be a mapping")
    found = {}
    for name, value in plain.items():
        if not isinstance(value, dict) or set(value) != {"kind", "config", "weights"}:
            raise ValueError("a fingerprint is kind, config and weights")
        if not isinstance(value["weights"], dict):
            raise ValueError("the weights of a fingerprint must be a mapping")
        weights = {key: _tuple(values) for key, values in value["weights"].items()}
        found[name] = Fingerprint(value["kind"], value["config"], weights)
    return found


def _tuple(plain: Any) -> tuple[Any, ...]:
    if not isinstance(plain, list):
        raise ValueError(f"expected a list, got {str(plain)[:80]}")
    return tuple(plain)


_WRITERS: dict[str, Callable[[Any], Any]] = {
    "fingerprints": _write_fingerprints,
    "grid": write_grid,
    "order": write_order,
    "blocks": lambda blocks: [blocks.q, blocks.k],
    "settings": dict,
}
_LISTS = ("noise", "transformers", "branches", "budgets", "prompts", "costs", "history")
_READERS: dict[str, Callable[[Any], Any]] = {
    "fingerprints": _read_fingerprints,
    "grid": read_grid,
    "order": read_order,
    "blocks": _read_blocks,
    **dict.fromkeys(_LISTS, _tuple),
}


def _check(header: Header) -> None:
    """Every rule of a header, whoever made it."""
    if header.grid.tokens > LIMITS["tokens"]:
        raise ValueError(f"grid {header.grid} has more than {LIMITS['tokens']} tokens")
    if max(header.blocks.q, header.blocks.k) > LIMITS["block"]:
        raise ValueError(f"blocks of at most {LIMITS['block']}, got {header.blocks}")
    write_order(header.order)
    for name in ("layers", "heads"):
        value = getattr(header, name)
        if type(value) is not int or not 1 <= value <= LIMITS[name]:
            raise ValueError(f"{name} must be an int in 1..{LIMITS[name]}, got {value!r}")
    if not 1 <= header.steps <= LIMITS["steps"]:
        raise ValueError(f"steps must be 1..{LIMITS['steps']}, got {header.steps}")
    if header.noise_kind not in NOISES:
        raise ValueError(f"noise_kind is sigma or timestep, got {header.noise_kind!r}")
    for level in header.noise:
        _number("noise level", level)
    if len(header.transformers) != header.steps:
        raise ValueError("transformers must name one for every step")
    if set(header.transformers) - set(header.fingerprints):
        raise ValueError("a step names a transformer without a fingerprint")
    if not header.branches or len(set(header.branches)) != len(header.branches):
        raise ValueError(f"branches must be different names, got {header.branches!r}")
    if MEAN in header.branches and len(header.branches) > 1:
        raise ValueError("a book averages over branches or keeps them apart, not both")
    if len(header.budgets) > 64 or list(header.budgets) != sorted(set(header.budgets)):
        raise ValueError(f"budgets must be different and ascending, got {header.budgets!r}")
    for share in (*header.budgets, *header.costs):
        if _number("a budget or cost", share) > 1 or share < 0:
            raise ValueError(f"a budget and a cost lie in 0..1, got {share!r}")
    if header.costs and len(header.costs) != len(header.budgets):
        raise ValueError("costs must be one for every budget")
    if not header.budgets and not header.importance:
        raise ValueError("a book without importance needs budgets")
    for name in ("importance", "noise_assumed"):
        if type(getattr(header, name)) is not bool:
            raise ValueError(f"{name} is true or false, got {getattr(header, name)!r}")
    if header.importance_error is not None:
        _number("importance_error", header.importance_error)
    if _number("sharpness", header.sharpness) < 0:
        raise ValueError(f"sharpness must be >= 0, got {header.sharpness}")
    if not isinstance(header.settings, Mapping):
        raise ValueError("settings must be a mapping")
    for f in header.fingerprints.values():
        for values in f.weights.values():
            for value in values:
                _number("a weight", value)
    for text in _texts(header):
        if not isinstance(text, str) or len(text) > TEXT_LIMIT or not text.isprintable():
            raise ValueError(f"a text of at most {TEXT_LIMIT} printable letters, got {text!r:.80}")


def _texts(header: Header) -> list[Any]:
    found: list[Any] = [header.scorer, header.jali, *header.prompts, *header.history]
    found += [*header.transformers, *header.branches, *header.fingerprints, *header.settings]
    found += [] if header.model is None else [header.model]
    for f in header.fingerprints.values():
        found += [f.kind, f.config, *f.weights]
    for value in header.settings.values():
        if isinstance(value, str):
            found.append(value)
        elif value is not None and not isinstance(value, bool):
            _number("a setting", value)
    return found


def _number(what: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{what} must be a finite number, got {value!r:.80}")
    return value
