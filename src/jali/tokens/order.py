"""Orders: in which sequence the tokens of a grid are cut into blocks.

Every order is a small frozen value whose `positions(grid)` lists, for each slot of the arranged
sequence, the token that goes there. `None` means the caller's own order: nothing is moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from jali.tokens.grid import Box, Text, TokenGrid

Index = NDArray[np.int64]


@runtime_checkable
class Order(Protocol):
    """What any order is: a hashable value with `positions`. Your own may be a frozen dataclass.

    >>> Gilbert().positions(TokenGrid.video(1, 2, 2))
    array([0, 2, 3, 1])
    """

    def __hash__(self) -> int: ...

    def positions(self, grid: TokenGrid) -> Index | None:
        """Token index for every arranged slot, a bijection; None for the caller's order."""
        ...


@dataclass(frozen=True, slots=True)
class Raster:
    """The caller's own order, text included: tokens are not moved at all.

    >>> Raster().positions(TokenGrid.video(2, 4, 4)) is None
    True
    """

    def positions(self, grid: TokenGrid) -> None:  # noqa: ARG002
        return None


@dataclass(frozen=True, slots=True)
class PerHead:
    """Every head has an order of its own: what lies in a slot is known with q and k only.

    Until then, the video in the caller's order and text behind it, where it stays.

    >>> PerHead().positions(TokenGrid.video(1, 2, 2, text=1))
    array([1, 2, 3, 4, 0])
    """

    def positions(self, grid: TokenGrid) -> Index:
        return Tiled((1, 1, 1)).positions(grid)


@dataclass(frozen=True, slots=True)
class Tiled:
    """Windows of t×h×w tokens, so that a block is a compact box of the video.

    Whole windows of every box come first, then the strips that do not fill one (tiled themselves),
    then the first frames where `first_frame_last` asks for it, then the text: whatever is always
    read lies together at the end and does not push the windows off the block grid. Raises
    ValueError for a window that is not three sizes >= 1.

    >>> Tiled((1, 2, 2)).positions(TokenGrid.video(1, 2, 4))
    array([0, 1, 4, 5, 2, 3, 6, 7])
    """

    window: tuple[int, int, int] = (2, 8, 8)
    first_frame_last: bool = False

    def __post_init__(self) -> None:
        if len(self.window) != 3 or any(not isinstance(n, int) or n < 1 for n in self.window):
            raise ValueError(f"window must be three sizes >= 1 (t, h, w), got {self.window!r}")
        object.__setattr__(self, "window", tuple(self.window))

    def positions(self, grid: TokenGrid) -> Index:
        whole: list[Index] = []
        strips: list[Index] = []
        first: list[Index] = []
        text: list[Index] = []
        for start, segment in grid.spans():
            if isinstance(segment, Text):
                text.append(np.arange(start, start + segment.tokens))
                continue
            tokens = np.arange(start, start + segment.tokens).reshape(segment.shape)
            if self.first_frame_last and segment.frames > 1:
                first.append(tokens[0].ravel())
                tokens = tokens[1:]
            head, *rest = _tile(tokens, self.window)
            whole.append(head)
            strips.extend(rest)
        return np.concatenate(whole + strips + first + text)


@dataclass(frozen=True, slots=True)
class Gilbert:
    """A Hilbert-like curve through each box, of any size: neighbours in the sequence are neighbours
    in the video. Text comes at the end.

    >>> Gilbert().positions(TokenGrid.video(1, 2, 2, text=1))
    array([1, 3, 4, 2, 0])
    """

    def positions(self, grid: TokenGrid) -> Index:
        boxes: list[Index] = []
        text: list[Index] = []
        for start, segment in grid.spans():
            if isinstance(segment, Text):
                text.append(np.arange(start, start + segment.tokens))
            else:
                boxes.append(start + gilbert_curve(segment))
        return np.concatenate(boxes + text)


@dataclass(frozen=True, slots=True)
class FrameWindows:
    """The order of the original rf_v2: 8×8 windows inside each frame, text behind the video.

    Where height or width is not a multiple of 8, frame 0 stays in raster order and each later
    frame emits its windows, then its bottom rows, then its right columns.
    """

    side: int = 8

    def positions(self, grid: TokenGrid) -> Index:
        boxes: list[Index] = []
        text: list[Index] = []
        for start, segment in grid.spans():
            tokens = np.arange(start, start + segment.tokens)
            if isinstance(segment, Text):
                text.append(tokens)
            else:
                boxes.append(self._frames(tokens.reshape(segment.shape)))
        return np.concatenate(boxes + text)

    def _frames(self, tokens: Index) -> Index:
        frames, height, width = tokens.shape
        h8, w8 = height - height % self.side, width - width % self.side
        aligned = (h8, w8) == (height, width)
        parts = []
        for frame in range(frames):
            if frame == 0 and not aligned:
                parts.append(tokens[0].ravel())
                continue
            grid = tokens[frame, :h8, :w8]
            windows = grid.reshape(h8 // self.side, self.side, w8 // self.side, self.side)
            parts.append(windows.swapaxes(1, 2).ravel())
            parts.append(tokens[frame, h8:].ravel())
            parts.append(tokens[frame, :h8, w8:].ravel())
        return np.concatenate(parts)


def _tile(tokens: Index, window: tuple[int, int, int]) -> list[Index]:
    """Whole windows first, then each strip tiled with a window of the same volume that fits it."""
    window = _fit(tokens.shape, window)
    whole = tuple(n - n % w for n, w in zip(tokens.shape, window, strict=True))
    t, h, w = whole
    body = tokens[:t, :h, :w].reshape(
        t // window[0], window[0], h // window[1], window[1], w // window[2], window[2]
    )
    parts = [body.transpose(0, 2, 4, 1, 3, 5).ravel()]
    for strip in (tokens[t:], tokens[:t, h:], tokens[:t, :h, w:]):
        if strip.size:
            parts.extend(_tile(strip, window))
    return parts


def _fit(shape: tuple[int, ...], window: tuple[int, int, int]) -> tuple[int, int, int]:
    """Shrink the window to the box; what it loses along one axis it gains along w, then h, t."""
    size = [min(n, w) for n, w in zip(shape, window, strict=True)]
    volume = window[0] * window[1] * window[2]
    for axis in (2, 1, 0):
        others = size[0] * size[1] * size[2] // size[axis]
        size[axis] = min(shape[axis], max(size[axis], volume // others))
    return size[0], size[1], size[2]


Side = tuple[int, int]  # an axis (0 t, 1 h, 2 w) and a signed length along it


def gilbert_curve(box: Box) -> Index:
    """Raster index of every position along a generalised Hilbert curve through the box.

    The curve (J. Červený's generalisation to boxes of any size) runs along the longest axis,
    width before height before time on ties, and splits a box into two, three or five smaller
    ones whose ends meet. Odd sizes cost a few steps longer than one.
    """
    strides = (box.height * box.width, box.width, 1)
    sides = {2: box.width, 1: box.height, 0: box.frames}
    major = max(sides, key=lambda axis: sides[axis])  # the first of equals: width, height, time
    order = [major, *(axis for axis in (2, 1, 0) if axis != major)]
    out = np.empty(box.tokens, dtype=np.int64)
    filled = 0

    def sign(side: Side) -> int:
        return 1 if side[1] > 0 else -1

    def half(side: Side) -> Side:
        axis, length = side
        part = length // 2
        # Even parts keep the ends of neighbouring pieces one step apart.
        if part % 2 and abs(length) > 2:
            part += sign(side)
        return axis, part

    def step(side: Side) -> int:
        return side[1] * strides[side[0]]

    def last(side: Side) -> int:
        return (side[1] - sign(side)) * strides[side[0]]

    def back(side: Side) -> Side:
        return side[0], -side[1]

    def rest(side: Side, part: Side) -> Side:
        return side[0], side[1] - part[1]

    def walk(at: int, a: Side, b: Side, c: Side) -> None:
        nonlocal filled
        w, h, d = abs(a[1]), abs(b[1]), abs(c[1])
        if (w == 1) + (h == 1) + (d == 1) >= 2:
            line = a if h == d == 1 else b if w == d == 1 else c
            length = abs(line[1])
            stride = sign(line) * strides[line[0]]
            out[filled : filled + length] = at + stride * np.arange(length)
            filled += length
            return
        a2, b2, c2 = half(a), half(b), half(c)
        if 2 * w > 3 * h and 2 * w > 3 * d:
            walk(at, a2, b, c)
            walk(at + step(a2), rest(a, a2), b, c)
        elif 3 * h > 4 * d:
            walk(at, b2, c, a2)
            walk(at + step(b2), a, rest(b, b2), c)
            walk(at + last(a) + last(b2), back(b2), c, back(rest(a, a2)))
        elif 3 * d > 4 * h:
            walk(at, c2, a2, b)
            walk(at + step(c2), a, b, rest(c, c2))
            walk(at + last(a) + last(c2), back(c2), back(rest(a, a2)), b)
        else:
            walk(at, b2, c2, a2)
            walk(at + step(b2), c, a2, rest(b, b2))
            walk(at + last(b2) + last(c), a, back(b2), back(rest(c, c2)))
            walk(at + last(a) + step(b2) + last(c), back(c), back(rest(a, a2)), rest(b, b2))
            walk(at + last(a) + last(b2), back(b2), c2, back(rest(a, a2)))

    first, second, third = ((axis, sides[axis]) for axis in order)
    walk(0, first, second, third)
    return out
