"""The attention shapes of the models people run."""

from __future__ import annotations

from dataclasses import dataclass

from jali.tokens.grid import TokenGrid


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer's self-attention: heads × head dim over a grid."""

    name: str
    heads: int
    head_dim: int
    grid: TokenGrid

    @property
    def tokens(self) -> int:
        return self.grid.tokens

    @property
    def flops(self) -> float:
        """Of dense attention, one sample: two products of 2·S²·D each."""
        return 4.0 * self.heads * self.tokens**2 * self.head_dim


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("wan-480p", 12, 128, TokenGrid.video(21, 30, 52)),
        Shape("wan-720p", 12, 128, TokenGrid.video(21, 45, 80)),
        Shape("cogvideox-5b", 48, 64, TokenGrid.video(13, 30, 45, text=226)),
        Shape("hunyuan-540p", 24, 128, TokenGrid.video(33, 34, 60, text=256, text_side="back")),
        Shape("psa-32k", 12, 128, TokenGrid.flat(32_768)),
        Shape("tiny", 4, 64, TokenGrid.video(4, 16, 16)),
    )
}
