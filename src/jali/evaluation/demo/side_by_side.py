"""Two clips of the same prompt in one picture: the first, the second, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from jali.clips.clip import Clip, write_mp4
from jali.generation.manifest import replaced

if TYPE_CHECKING:
    from PIL import Image

GAIN = 4  # small differences are easy to miss
GAP, HEADER, COLUMNS = 4, 26, 6
LEAST_WIDTH = 240  # of a panel; smaller clips are enlarged by whole factors
PAPER, INK = (255, 255, 255), (29, 36, 51)


@dataclass(frozen=True, slots=True)
class Panel:
    """A clip and the few words over it."""

    title: str
    frames: Tensor  # uint8 [F, H, W, 3]


def panels(first: Clip, second: Clip, titles: tuple[str, str]) -> tuple[Panel, Panel, Panel]:
    """Both clips, and their difference in grey, `GAIN` times as bright as it is."""
    if first.frames.shape != second.frames.shape:
        raise ValueError(
            f"clips side by side have one size, got {list(first.frames.shape)} and "
            f"{list(second.frames.shape)}"
        )
    apart = (first.frames.float() - second.frames.float()).abs().mean(-1, keepdim=True) * GAIN
    grey = apart.clamp(0, 255).round().to(torch.uint8).expand_as(first.frames)
    return (
        Panel(titles[0], first.frames),
        Panel(titles[1], second.frames),
        Panel(f"difference, {GAIN} times as bright", grey),
    )


def write_film(path: Path, shown: Sequence[Panel], fps: float) -> None:
    """An mp4 of the panels next to each other."""
    write_mp4(path, film(shown), fps)


def film(shown: Sequence[Panel]) -> Tensor:
    """uint8 frames: the panels from left to right, each under its title."""
    frames = [_enlarged(panel.frames) for panel in shown]
    count, height, width, _ = frames[0].shape
    paper = torch.tensor(PAPER, dtype=torch.uint8)
    whole = paper.repeat(count, HEADER + height, len(shown) * (width + GAP) - GAP, 1)
    for place, panel in enumerate(shown):
        left = place * (width + GAP)
        whole[:, :HEADER, left : left + width] = _title(panel.title, width)
        whole[:, HEADER:, left : left + width] = frames[place]
    return whole


def write_strip(path: Path, shown: Sequence[Panel]) -> None:
    """A png for people who cannot play films: some frames across, the panels below each other."""
    with replaced(path) as temporary:
        strip(shown).save(temporary, format="png", optimize=True)


def strip(shown: Sequence[Panel]) -> Image.Image:
    from PIL import Image

    count, height, width, _ = shown[0].frames.shape
    columns = min(COLUMNS, count)
    chosen = torch.linspace(0, count - 1, columns).round().long()
    across = columns * (width + GAP) - GAP
    whole = Image.new("RGB", (across, len(shown) * (HEADER + height)), PAPER)
    for place, panel in enumerate(shown):
        top = place * (HEADER + height)
        whole.paste(_picture(_title(panel.title, across)), (0, top))
        for column, frame in enumerate(chosen.tolist()):
            image = _picture(panel.frames[frame])
            whole.paste(image, (column * (width + GAP), top + HEADER))
    return whole


def _enlarged(frames: Tensor) -> Tensor:
    factor = max(1, round(LEAST_WIDTH / frames.shape[2]))
    return frames.repeat_interleave(factor, 1).repeat_interleave(factor, 2)


def _title(text: str, width: int) -> Tensor:
    """The text on paper, [HEADER, width, 3]; cut where it does not fit."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    image = Image.new("RGB", (width, HEADER), PAPER)
    draw, font = ImageDraw.Draw(image), ImageFont.load_default(14)
    while text and draw.textlength(text, font=font) > width - 8:
        text = text[:-1].rstrip()
    draw.text((4, HEADER / 2), text, fill=INK, font=font, anchor="lm")
    return torch.from_numpy(np.array(image))


def _picture(frame: Tensor) -> Any:
    from PIL import Image

    return Image.fromarray(frame.contiguous().numpy())
