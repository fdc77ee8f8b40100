"""How two token sequences are ordered and cut into blocks."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali import kernels
from jali.tokens.grid import Text, TokenGrid
from jali.tokens.order import Index, Order, PerHead, Raster
from jali.value import check_count

Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Blocks:
    """How many queries and how many keys make a block."""

    q: int
    k: int

    def __post_init__(self) -> None:
        for name in ("q", "k"):
            check_count(f"a {name} block", getattr(self, name))

    def __str__(self) -> str:
        return f"{self.q}×{self.k}"


@dataclass(frozen=True, eq=False)
class Arrangement:
    """One sequence in its order: `restore(arrange(x))` is x, bit for bit.

    Both indices are None when nothing moves. Slots from `fixed_from` on hold the caller's own
    tokens, so a prefix length that is at least that long stays a prefix length.
    """

    tokens: int
    index: Tensor | None
    inverse: Tensor | None
    fixed_from: int
    device: torch.device

    def tokens_at(self, slots: Tensor | None) -> Tensor:
        """The caller's tokens in these slots, or in all of them in turn."""
        if slots is None:
            slots = torch.arange(self.tokens, device=self.device)
        return slots if self.index is None else self.index[slots]

    def arrange(self, x: Tensor) -> Tensor:
        """[B, H, S, D] or [B, S], in the caller's order, to arranged order."""
        return x if self.index is None else _gather(x, self.index)

    def restore(self, x: Tensor) -> Tensor:
        return x if self.inverse is None else _gather(x, self.inverse)


def _gather(x: Tensor, index: Tensor) -> Tensor:
    if x.dim() == 4 and kernels.available(index.device):
        return kernels.load("gather").gather_rows(x, index)
    return x.index_select(2 if x.dim() >= 3 else 1, index)


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The queries' and the keys' arrangement, cut into blocks that are full except the last.

    `offset` is the place of the first query among the keys (a chunk in a cache; 0 when both are
    one sequence), or None when queries and keys are different sequences. The boolean vectors say
    which blocks hold text, the first frame of a video or a single frame, and which mix segments;
    `own` [M, N] says which key blocks hold tokens of a query block. Where every head has its own
    order, only text is known of a slot: all else is false.
    """

    q_grid: TokenGrid
    k_grid: TokenGrid
    offset: int | None
    order: Order
    blocks: Blocks
    q: Arrangement
    k: Arrangement
    own: Tensor
    text_rows: Tensor
    text_keys: Tensor
    first_rows: Tensor
    first_keys: Tensor
    single_rows: Tensor
    single_keys: Tensor
    mixed_keys: Tensor
    has_text_keys: bool
    has_mixed_keys: bool
    has_text_rows: bool
    only_text_rows: bool
    device: torch.device

    def __repr__(self) -> str:
        keys = "" if self.k_grid is self.q_grid else f" on {self.k_grid}"
        offset = f" at {self.offset}" if self.offset else ""
        blocks = f"{self.M}×{self.N} blocks of {self.blocks}"
        return f"BlockLayout({self.q_grid}{keys}{offset}, {self.order}, {blocks}, {self.device})"

    def arrange(
        self, q: Tensor, k: Tensor, v: Tensor
    ) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
        """[B, H, S, D] each, in the caller's order, to arranged order; v when it is asked for.

        Kernels move all three at once. Elsewhere a copy of v would only lie there while q and k
        are looked at.
        """
        index = self.q.index
        if index is not None and self.k is self.q and kernels.available(index.device):
            q, k, v = kernels.load("gather").gather_each(q, k, v, index)
            return q, k, lambda: v
        return self.q.arrange(q), self.k.arrange(k), lambda: self.k.arrange(v)

    @functools.cached_property
    def M(self) -> int:
        return -(-self.q.tokens // self.blocks.q)

    @functools.cached_property
    def N(self) -> int:
        return -(-self.k.tokens // self.blocks.k)

    @functools.cached_property
    def pairs(self) -> int:
        """How many pairs of a query block and a key block there are."""
        return self.M * self.N

    @property
    def has_own(self) -> bool:
        """Whether every query block has own blocks."""
        return self.offset is not None and not isinstance(self.order, PerHead)

    @functools.cached_property
    def forced(self) -> Tensor:
        """Own and text key blocks: what every query block reads. bool [M, N]."""
        return self.own | self.text_keys

    @functools.cached_property
    def forced_first(self) -> Tensor:
        """The same with the first frame. bool [M, N]."""
        return self.forced | self.first_keys

    @functools.cached_property
    def counted_rows(self) -> Tensor | None:
        """The rows whose attention says how much a head needs: all but those of text, which read
        everything anyway. bool [M]; None where that is all of them, or none."""
        mixed = self.has_text_rows and not self.only_text_rows
        return ~self.text_rows if mixed else None

    @functools.cached_property
    def text_or_first_rows(self) -> Tensor:
        """Rows that hold text or the first frame of a video. bool [M]."""
        return self.text_rows | self.first_rows

    @functools.cached_property
    def causal(self) -> Tensor:
        """Which block pairs hold a key not after a query. bool [M, N]; needs an offset."""
        if self.offset is None:
            raise ValueError("a causal plan needs an offset: the first query's place in the keys")
        if self.q.index is not None or self.k.index is not None:
            raise ValueError(f"a causal plan needs the caller's order, not {self.order}")
        last_query = torch.arange(1, self.M + 1, device=self.device) * self.blocks.q
        last_query = last_query.clamp_max(self.q.tokens) - 1 + self.offset
        first_key = torch.arange(self.N, device=self.device) * self.blocks.k
        return first_key[None, :] <= last_query[:, None]

    @functools.cached_property
    def block_sizes(self) -> Tensor:
        """Real keys in every key block. int64 [N]."""
        start = torch.arange(self.N, device=self.device) * self.blocks.k
        return (self.k.tokens - start).clamp_max(self.blocks.k)

    @functools.cached_property
    def row_sizes(self) -> Tensor:
        """Queries in every query block. int64 [M]."""
        start = torch.arange(self.M, device=self.device) * self.blocks.q
        return (self.q.tokens - start).clamp_max(self.blocks.q)

    def with_blocks(self, blocks: Blocks) -> BlockLayout:
        return block_layout(self.q_grid, self.k_grid, self.order, blocks, self.offset, self.device)


def block_layout(
    q_grid: TokenGrid,
    k_grid: TokenGrid | None = None,
    order: Order | None = None,
    blocks: Blocks | None = None,
    offset: int | None = None,
    device: torch.device | str = "cpu",
) -> BlockLayout:
    """How queries and keys are ordered and cut into blocks; built once per value and remembered.

    q_grid, k_grid: what the tokens are; without `k_grid` the keys are the queries' own sequence, at
    offset 0. order: in which sequence tokens are cut (None: the caller's own, `Raster()`). blocks:
    queries and keys per block (None: 256 × 128). offset: the place of the first query among the
    keys, where queries are a chunk of them; None where they are different sequences. device: where
    the layout's tensors lie.

    Raises ValueError for an offset that puts queries outside the keys, TypeError for what is no
    order.

    >>> layout = block_layout(TokenGrid.video(4, 16, 16, text=32), None, Gilbert(), Blocks(128, 64))
    >>> layout
    BlockLayout(32 text + 4×16×16, Gilbert(), 9×17 blocks of 128×64, cpu)
    >>> layout.text_keys.nonzero().flatten()  # the order puts text last
    tensor([16])
    """
    if k_grid is None or k_grid == q_grid:
        k_grid = q_grid
        offset = 0 if offset is None else offset
    if offset is not None and not 0 <= offset <= k_grid.tokens - q_grid.tokens:
        raise ValueError(
            f"offset {offset} puts {q_grid.tokens} queries outside {k_grid.tokens} keys; "
            f"need 0 <= offset <= {k_grid.tokens - q_grid.tokens}"
        )
    if order is not None and not hasattr(order, "positions"):
        raise TypeError(f"order must be an Order, such as Tiled((2, 8, 8)), got {order!r}")
    device = torch.device(device)
    return _build(q_grid, k_grid, order or Raster(), blocks or Blocks(256, 128), offset, device)


# A model meets a handful of (grid, order, blocks) values; each holds a few megabytes.
@functools.lru_cache(maxsize=64)
def _build(
    q_grid: TokenGrid,
    k_grid: TokenGrid,
    order: Order,
    blocks: Blocks,
    offset: int | None,
    device: torch.device,
) -> BlockLayout:
    q_index = order.positions(q_grid)
    k_index = q_index if k_grid is q_grid else order.positions(k_grid)
    rows = _flags(q_grid, q_index, blocks.q)
    keys = _flags(k_grid, k_index, blocks.k)
    own = _own(q_grid, k_grid, q_index, k_index, blocks, offset)
    if isinstance(order, PerHead):  # a slot is no place
        for flags in (rows.first, rows.single, keys.first, keys.single, own):
            flags[:] = False
    on_device = functools.partial(_tensor, device=device)
    q = _arrangement(q_grid.tokens, q_index, device)
    return BlockLayout(
        q_grid=q_grid,
        k_grid=k_grid,
        offset=offset,
        order=order,
        blocks=blocks,
        q=q,
        k=q if k_grid is q_grid else _arrangement(k_grid.tokens, k_index, device),
        own=on_device(own),
        text_rows=on_device(rows.text),
        text_keys=on_device(keys.text),
        first_rows=on_device(rows.first),
        first_keys=on_device(keys.first),
        single_rows=on_device(rows.single),
        single_keys=on_device(keys.single),
        mixed_keys=on_device(keys.mixed),
        has_text_keys=bool(keys.text.any()),
        has_mixed_keys=bool(keys.mixed.any()),
        has_text_rows=bool(rows.text.any()),
        only_text_rows=bool(rows.text.all()),
        device=device,
    )


def _arrangement(tokens: int, index: Index | None, device: torch.device) -> Arrangement:
    if index is None or np.array_equal(index, np.arange(tokens)):
        return Arrangement(tokens, None, None, 0, device)
    inverse = np.empty_like(index)
    inverse[index] = np.arange(tokens)
    moved = np.flatnonzero(index != np.arange(tokens))
    return Arrangement(
        tokens,
        torch.from_numpy(index).to(device),
        torch.from_numpy(inverse).to(device),
        int(moved[-1]) + 1,
        device,
    )


def _tensor(array: NDArray[Any], device: torch.device) -> Tensor:
    return torch.from_numpy(array).to(device)


class _Flags(NamedTuple):
    """Per block: holds text, the first frame of a video, a single frame; mixes segments."""

    text: Flags
    first: Flags
    single: Flags
    mixed: Flags


def _flags(grid: TokenGrid, index: Index | None, block: int) -> _Flags:
    text, first, single = (np.zeros(grid.tokens, dtype=bool) for _ in range(3))
    segment_of = np.empty(grid.tokens, dtype=np.int64)
    for number, (start, segment) in enumerate(grid.spans()):
        span = slice(start, start + segment.tokens)
        segment_of[span] = number
        if isinstance(segment, Text):
            text[span] = True
        elif segment.frames == 1:
            single[span] = True
        else:
            first[start : start + segment.height * segment.width] = True
    if index is not None:
        text, first, single, segment_of = (x[index] for x in (text, first, single, segment_of))
    starts = np.arange(0, grid.tokens, block)
    text, first, single = (np.logical_or.reduceat(x, starts) for x in (text, first, single))
    return _Flags(
        text,
        first,
        single,
        np.minimum.reduceat(segment_of, starts) != np.maximum.reduceat(segment_of, starts),
    )


def _own(
    q_grid: TokenGrid,
    k_grid: TokenGrid,
    q_index: Index | None,
    k_index: Index | None,
    blocks: Blocks,
    offset: int | None,
) -> Flags:
    """Key blocks that hold a token of the query block. bool [M, N]."""
    own = np.zeros((-(-q_grid.tokens // blocks.q), -(-k_grid.tokens // blocks.k)), dtype=bool)
    if offset is None:
        return own
    q_slot = np.arange(q_grid.tokens)
    token = offset + (q_slot if q_index is None else q_index)
    k_slot = np.arange(k_grid.tokens)
    if k_index is not None:
        k_slot = np.empty_like(k_slot)
        k_slot[k_index] = np.arange(k_grid.tokens)
    own[q_slot // blocks.q, k_slot[token] // blocks.k] = True
    return own
