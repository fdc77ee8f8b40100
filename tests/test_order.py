"""Orders: bijections, windows that are boxes, and the Gilbert curve's step lengths."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import oracle
from jali import Box, FrameWindows, Gilbert, Raster, Text, Tiled, TokenGrid
from jali.tokens.order import gilbert_curve

ORDERS = [
    Raster(), Gilbert(), FrameWindows(), Tiled(), Tiled((2, 8, 8), first_frame_last=True),
    Tiled((4, 4, 8)), Tiled((1, 1, 1)), Tiled((3, 5, 7), True),
]  # fmt: skip
SEGMENTS = st.one_of(
    st.builds(Text, st.integers(1, 300)),
    st.builds(Box, st.integers(1, 7), st.integers(1, 19), st.integers(1, 19)),
)


@pytest.mark.parametrize("order", ORDERS, ids=str)
@given(st.lists(SEGMENTS, min_size=1, max_size=4))
def test_every_order_is_a_bijection(order: object, segments: list[Text | Box]) -> None:
    grid = TokenGrid(tuple(segments))
    positions = order.positions(grid)  # type: ignore[attr-defined]
    if positions is None:
        assert isinstance(order, Raster)
        return
    assert positions.dtype == np.int64
    assert np.array_equal(np.sort(positions), np.arange(grid.tokens))


@pytest.mark.parametrize("order", [o for o in ORDERS if not isinstance(o, Raster)], ids=str)
def test_text_goes_to_the_end(order: object) -> None:
    grid = TokenGrid((Text(3), Box(2, 9, 9), Text(4), Box(1, 8, 8)))
    positions = order.positions(grid)  # type: ignore[attr-defined]
    assert positions[-7:].tolist() == [0, 1, 2, 165, 166, 167, 168]


def boxes_of(positions: np.ndarray, shape: tuple[int, int, int], size: int) -> list[int]:
    """Volume of the bounding box of every run of `size` positions."""
    t, rest = np.divmod(positions, shape[1] * shape[2])
    h, w = np.divmod(rest, shape[2])
    volumes = []
    for start in range(0, len(positions) - size + 1, size):
        part = slice(start, start + size)
        volumes.append(int(np.prod([np.ptp(x[part]) + 1 for x in (t, h, w)])))
    return volumes


@pytest.mark.parametrize("shape", [(21, 45, 80), (21, 30, 52), (13, 30, 45), (4, 16, 16)])
@pytest.mark.parametrize("window", [(2, 8, 8), (4, 4, 8)])
def test_whole_windows_are_boxes(shape: tuple[int, int, int], window: tuple[int, int, int]) -> None:
    positions = Tiled(window).positions(TokenGrid.of(shape))
    whole = int(np.prod([n // w for n, w in zip(shape, window, strict=True)]))
    volumes = boxes_of(positions, shape, 128)
    assert volumes[:whole] == [128] * whole
    t, h, w = (w * (n // w) for n, w in zip(shape, window, strict=True))
    inside = positions[: whole * 128]
    assert (inside // (shape[1] * shape[2]) < t).all()
    assert (inside // shape[2] % shape[1] < h).all()
    assert (inside % shape[2] < w).all()
    # Strips are tiled too: no block is a thin line through a whole frame.
    assert np.mean(volumes) < 260


def test_windows_follow_raster_order_inside_and_outside() -> None:
    positions = Tiled((1, 2, 2)).positions(TokenGrid.video(1, 4, 4))
    assert positions.tolist() == [0, 1, 4, 5, 2, 3, 6, 7, 8, 9, 12, 13, 10, 11, 14, 15]


def test_first_frame_lies_behind_the_windows() -> None:
    grid = TokenGrid((Text(5), Box(5, 8, 16)))
    positions = Tiled((2, 8, 8), first_frame_last=True).positions(grid)
    assert positions[-133:-5].tolist() == list(range(5, 133))
    assert min(positions[:-133]) == 133
    single = Tiled((2, 8, 8), first_frame_last=True).positions(TokenGrid.video(1, 8, 16))
    assert np.array_equal(single, Tiled((2, 8, 8)).positions(TokenGrid.video(1, 8, 16)))


def test_a_window_that_does_not_fit_keeps_its_volume() -> None:
    positions = Tiled((2, 8, 8)).positions(TokenGrid.video(1, 16, 32))
    assert boxes_of(positions, (1, 16, 32), 128) == [128] * 4


@pytest.mark.parametrize(
    ("w", "h", "f", "long", "longest"),
    [
        (80, 45, 18, 96, None), (80, 48, 18, 0, 1), (40, 22, 31, 56, None),
        (85, 48, 11, 395, 4), (45, 30, 13, 151, None),
    ],
)  # fmt: skip
def test_gilbert_step_lengths(w: int, h: int, f: int, long: int, longest: int | None) -> None:
    curve = gilbert_curve(Box(f, h, w))
    assert len(curve) == w * h * f
    place = np.stack(np.unravel_index(curve, (f, h, w)))
    steps = np.abs(np.diff(place, axis=1)).sum(0)
    assert int((steps != 1).sum()) == long
    if longest is not None:
        assert steps.max() == longest


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 12))
def test_gilbert_starts_at_the_corner_and_stays_near(f: int, h: int, w: int) -> None:
    curve = gilbert_curve(Box(f, h, w))
    assert curve[0] == 0
    place = np.stack(np.unravel_index(curve, (f, h, w)))
    steps = np.abs(np.diff(place, axis=1)).sum(0)
    assert steps.max(initial=0) <= 4
    assert steps.mean() <= 1.25 if len(steps) else True


@pytest.mark.parametrize(
    ("shape", "checksum"),
    [((3, 40, 80), 611097142), ((3, 30, 52), 46185982), ((4, 16, 16), 356816384)],
)
def test_rf_v2_order_checksums(shape: tuple[int, int, int], checksum: int) -> None:
    positions = FrameWindows().positions(TokenGrid.of(shape))
    found = sum(i * int(p) for i, p in enumerate(positions)) % 1000000007
    assert found == checksum
    if shape == (4, 16, 16):
        assert positions[64:67].tolist() == [8, 9, 10]


@pytest.mark.parametrize("shape", [(3, 24, 16), (2, 21, 32), (2, 24, 45), (3, 20, 20), (1, 9, 9)])
@pytest.mark.parametrize("text", [0, 13])
def test_rf_v2_order_against_its_definition(shape: tuple[int, int, int], text: int) -> None:
    grid = TokenGrid.video(*shape, text=text)
    assert FrameWindows().positions(grid).tolist() == oracle.rf_v2_order(*shape, text)


@pytest.mark.parametrize("window", [(2, 8), (0, 8, 8), (2, 8, 8.0), (1, 1, -1)])
def test_bad_windows(window: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="window must be three sizes"):
        Tiled(window)  # type: ignore[arg-type]
