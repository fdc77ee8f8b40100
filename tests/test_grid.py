"""Grids: sizes, order of segments, and what they refuse."""

from __future__ import annotations

import pytest

from jali import Box, Text, TokenGrid


def test_tokens_and_spans() -> None:
    grid = TokenGrid((Text(3), Box(2, 4, 5), Box(1, 2, 2)))
    assert grid.tokens == 3 + 40 + 4
    assert [(start, str(s)) for start, s in grid.spans()] == [
        (0, "3 text"), (3, "2×4×5"), (43, "1×2×2"),
    ]  # fmt: skip
    assert str(grid) == "3 text + 2×4×5 + 1×2×2"


def test_video_with_text_on_either_side() -> None:
    assert TokenGrid.video(5, 9, 10, text=7).segments == (Text(7), Box(5, 9, 10))
    back = TokenGrid.video(5, 9, 10, text=7, text_side="back")
    assert back.segments == (Box(5, 9, 10), Text(7))
    assert TokenGrid.video(5, 9, 10).segments == (Box(5, 9, 10),)


def test_grids_are_values() -> None:
    assert TokenGrid.of((1, 2, 3)) == TokenGrid.of([1, 2, 3]) == TokenGrid.video(1, 2, 3)
    assert hash(TokenGrid([Text(1), Box(1, 1, 1)])) == hash(TokenGrid((Text(1), Box(1, 1, 1))))


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (lambda: Box(0, 1, 1), ValueError, "frames must be at least 1, got 0"),
        (lambda: Box(1, -2, 1), ValueError, "height must be at least 1, got -2"),
        (lambda: Box(1, 1, 2.0), TypeError, "width must be an int, got 2.0"),
        (lambda: Box(True, 1, 1), TypeError, "frames must be an int"),
        (lambda: Text(0), ValueError, "text tokens must be at least 1"),
        (lambda: TokenGrid(()), ValueError, "at least one segment"),
        (lambda: TokenGrid(((1, 2, 3),)), TypeError, "Text or Box"),
        (lambda: TokenGrid.of((1, 2)), ValueError, "triple"),
        (lambda: TokenGrid.of("abc"), TypeError, "frames must be an int, got 'a'"),
        (lambda: TokenGrid.video(1, 1, 1, text=-1), ValueError, "text"),
        (lambda: TokenGrid.video(1, 1, 1, text_side="left"), ValueError, "'front' or 'back'"),
        (lambda: TokenGrid.video(2, 2, 2).check(9, "grid"), ValueError, "2×2×2 has 8.*has 9"),
    ],
)
def test_refuses(make: object, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        make()  # type: ignore[operator]
