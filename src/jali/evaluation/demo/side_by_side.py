"""Two clips of the same prompt in one picture: the first, the second, and what differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from jali.clips.clip import Clip
from jali.files import whole_file

GAIN = 4  # small differences are easy to miss
GAP, HEADER, COLUMNS = 4, 26, 6
LEAST_WIDTH = 240  # of a panel; smaller clips are enlarged by whole factors
PAPER, INK = (255, 255, 255), (29, 36, 51)


@dataclass(frozen=True, slots=True)
class Panel:
    """A clip and the few words over it."""

    title: str
    frames: Tensor  # uint8 [F, H, W, 3]


def panels(first: Clip, second: Clip, titles: Sequence[str]) -> tuple[Panel, Panel, Panel]:
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


def film(shown: Sequence[Panel]) -> Tensor:
    """uint8 frames: the panels from left to right, each under its title."""
    factor = max(1, round(LEAST_WIDTH / shown[0].frames.shape[2]))
    columns = []
    for panel in shown:
        frames = panel.frames.repeat_interleave(factor, 1).repeat_interleave(factor, 2)
        title = _title(panel.title, frames.shape[2]).expand(len(frames), -1, -1, -1)
        columns.append(torch.cat([title, frames], 1))
    return _in_a_row(columns)


def strip(shown: Sequence[Panel]) -> Tensor:
    """uint8 [H, W, 3]: some frames from left to right, the panels below each other."""
    count = len(shown[0].frames)
    chosen = torch.linspace(0, count - 1, min(COLUMNS, count)).round().long()
    rows = []
    for panel in shown:
        frames = _in_a_row(list(panel.frames[chosen]))
        rows += [_title(panel.title, frames.shape[1]), frames]
    return torch.cat(rows)


def write_strip(path: Path, shown: Sequence[Panel]) -> None:
    """A png for people who cannot play films."""
    from PIL import Image

    with whole_file(path) as temporary:
        Image.fromarray(strip(shown).numpy()).save(temporary, format="png", optimize=True)


def _in_a_row(parts: Sequence[Tensor]) -> Tensor:
    """Pictures [..., H, W, 3] next to each other, paper between them."""
    paper = parts[0].new_tensor(PAPER).expand(*parts[0].shape[:-2], GAP, 3)
    return torch.cat([each for part in parts for each in (paper, part)][1:], dim=-2)


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
