"""Where tokens lie in the video."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from jali.tokens.grid import Box, TokenGrid
from jali.tokens.layout import BlockLayout

Places = NDArray[np.float64]


def coordinates(grid: TokenGrid) -> Places:
    """(segment, t, h, w) of every token; text has no place. [S, 4]."""
    parts = []
    for number, (_, segment) in enumerate(grid.spans()):
        shape = segment.shape if isinstance(segment, Box) else (1, 1, segment.tokens)
        place = np.indices(shape).reshape(3, -1).T.astype(float)
        parts.append(np.column_stack([np.full(len(place), float(number)), place]))
    return np.concatenate(parts)


def places(layout: BlockLayout) -> tuple[Places, Places]:
    """The coordinates of every query and every key, in the layout's order. [Sq, 4] and [Sk, 4].

    Queries that are a chunk of the keys lie where they lie among them.
    """
    keys = coordinates(layout.k_grid)
    if layout.offset is None:
        queries = coordinates(layout.q_grid)
    else:
        queries = keys[layout.offset : layout.offset + layout.q.tokens]
    order = layout.order  # asked again: the layout's own copy lies on the device
    q_index, k_index = order.positions(layout.q_grid), order.positions(layout.k_grid)
    return (
        queries if q_index is None else queries[q_index],
        keys if k_index is None else keys[k_index],
    )


def middles(tokens: Places, block: int) -> Places:
    """The mean place of every block. [S, C] -> [blocks, C]."""
    starts = np.arange(0, len(tokens), block)
    size = np.diff(np.append(starts, len(tokens)))
    return np.asarray(np.add.reduceat(tokens, starts, axis=0) / size[:, None])


class FrameParts(NamedTuple):
    """What single frames have in blocks: a run of tokens each, in the caller's order.

    `box` and `t` are the frame, of `size` tokens; the run goes from the place `first` in it to
    `last`. [P] each. `blocks` are the first run of every block.
    """

    box: Places
    size: Places
    t: Places
    first: Places
    last: Places
    blocks: NDArray[np.intp]


def frame_parts(layout: BlockLayout) -> tuple[FrameParts, FrameParts]:
    """Of queries and keys in the caller's own order."""
    keys = _frames(layout.k_grid)
    if layout.offset is None:
        queries = _frames(layout.q_grid)
    else:
        queries = keys[layout.offset : layout.offset + layout.q.tokens]
    return _parts(queries, layout.blocks.q), _parts(keys, layout.blocks.k)


def _frames(grid: TokenGrid) -> Places:
    """(segment, tokens in a frame, t, place in the frame) of every token. [S, 4]."""
    found = []
    for number, segment in enumerate(grid.segments):
        size = segment.height * segment.width if isinstance(segment, Box) else segment.tokens
        t, place = np.divmod(np.arange(segment.tokens), size)
        found.append(np.column_stack([np.full_like(t, number), np.full_like(t, size), t, place]))
    return np.concatenate(found).astype(float)


def _parts(tokens: Places, block: int) -> FrameParts:
    new = np.r_[True, (np.diff(tokens[:, [0, 2]], axis=0) != 0).any(1)]
    runs = np.flatnonzero(new | (np.arange(len(tokens)) % block == 0))
    box, size, t, first = tokens[runs].T
    last = tokens[np.r_[runs[1:], len(tokens)] - 1, 3]
    blocks = np.searchsorted(runs, np.arange(0, len(tokens), block))
    return FrameParts(box, size, t, first, last, blocks)


def place_by_place(grid: TokenGrid) -> NDArray[np.intp]:
    """Slots of `PerHead` with all frames of a place together, box by box; text stays at the end."""
    found, start = [], 0
    for segment in grid.segments:
        if isinstance(segment, Box):
            slots = np.arange(start, start + segment.tokens).reshape(segment.frames, -1)
            found.append(slots.T.ravel())
            start += segment.tokens
    return np.concatenate([*found, np.arange(start, grid.tokens)])


def inverse(order: NDArray[np.intp]) -> NDArray[np.intp]:
    """Where each entry went."""
    found = np.empty_like(order)
    found[order] = np.arange(len(order))
    return found
