"""What the tokens of a sequence are: text, or a frames × height × width box of patches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from jali.value import check_choice, check_count

# Frames and pixels behind a token in the models people run, for a guess in an error.
PIXELS = ((4, 16), (4, 8), (4, 32), (8, 32), (8, 16), (1, 16))


@dataclass(frozen=True, slots=True)
class Text:
    """`tokens` text tokens, in reading order."""

    tokens: int

    def __post_init__(self) -> None:
        check_count("text tokens", self.tokens)

    def __str__(self) -> str:
        return f"{self.tokens} text"


@dataclass(frozen=True, slots=True)
class Box:
    """A video, an image (one frame), a reference image or cached frames: t-major, then h, w."""

    frames: int
    height: int
    width: int

    def __post_init__(self) -> None:
        for name in ("frames", "height", "width"):
            check_count(name, getattr(self, name))

    @property
    def tokens(self) -> int:
        return self.frames * self.height * self.width

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.frames, self.height, self.width

    def __str__(self) -> str:
        return f"{self.frames}×{self.height}×{self.width}"


Segment = Text | Box


@dataclass(frozen=True, slots=True)
class TokenGrid:
    """A sequence of tokens as ordered segments, each `Text` or a frames × height × width `Box`.

    `tokens` is their sum, and must be the length of the tensors. Sizes are in tokens (patches of
    the latent video), not pixels. Raises TypeError or ValueError for sizes that are no ints >= 1.

    >>> grid = TokenGrid((Text(7), Box(5, 9, 10)))
    >>> grid == TokenGrid.video(5, 9, 10, text=7)
    True
    >>> grid.tokens, str(grid)
    (457, '7 text + 5×9×10')
    """

    segments: tuple[Segment, ...]
    tokens: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))  # a list cannot be remembered
        if not self.segments:
            raise ValueError("a TokenGrid needs at least one segment")
        for segment in self.segments:
            if not isinstance(segment, Text | Box):
                raise TypeError(f"a segment is Text or Box, got {segment!r}")
        object.__setattr__(self, "tokens", sum(segment.tokens for segment in self.segments))

    @property
    def placed(self) -> int:
        """How many tokens are not text."""
        return sum(segment.tokens for segment in self.segments if isinstance(segment, Box))

    @classmethod
    def video(
        cls,
        frames: int,
        height: int,
        width: int,
        *,
        text: int = 0,
        text_side: str = "front",
    ) -> TokenGrid:
        """One video or image, with `text` tokens in front of it or behind it."""
        check_choice("text_side", text_side, ("front", "back"))
        check_count("text", text, least=0)
        box = Box(frames, height, width)
        if text == 0:
            return cls((box,))
        return cls((Text(text), box) if text_side == "front" else (box, Text(text)))

    @classmethod
    def flat(cls, tokens: int) -> TokenGrid:
        """A sequence of unknown geometry: one frame of one row."""
        return cls((Box(1, 1, tokens),))

    @classmethod
    def of(cls, shape: TokenGrid | Sequence[int]) -> TokenGrid:
        """Accept a grid as it is, or a (frames, height, width) triple."""
        if isinstance(shape, TokenGrid):
            return shape
        if not isinstance(shape, Sequence) or len(shape) != 3:
            raise ValueError(
                f"a grid is a TokenGrid or a (frames, height, width) triple, got {shape!r}"
            )
        return cls((Box(*shape),))

    def spans(self) -> Iterator[tuple[int, Segment]]:
        """Each segment with the index of its first token."""
        start = 0
        for segment in self.segments:
            yield start, segment
            start += segment.tokens

    def check(self, tokens: int, name: str) -> None:
        if self.tokens != tokens:
            raise ValueError(
                f"{name} {self} has {self.tokens} tokens, but the tensor has {tokens}; "
                f"pass the grid of this call (frames × height × width, plus its text)"
                f"{self._what_would_fit(tokens)}"
            )

    def _what_would_fit(self, tokens: int) -> str:
        """A guess, where one box was given: pixels, another length, or text that was forgotten."""
        (box, *others) = self.segments
        if others or not isinstance(box, Box):
            return ""
        for deep, wide in PIXELS:
            frames, height, width = -(-box.frames // deep), box.height // wide, box.width // wide
            if frames * height * width == tokens:
                return f": sizes are in tokens, so {frames}×{height}×{width} for these pixels"
        row = box.height * box.width
        if tokens % row == 0:
            return f": {tokens // row}×{box.height}×{box.width} would fit"
        if tokens > self.tokens:
            return (
                f": TokenGrid.video({box.frames}, {box.height}, {box.width}, "
                f"text={tokens - self.tokens}) would fit"
            )
        return ""

    def __str__(self) -> str:
        return " + ".join(str(segment) for segment in self.segments)
