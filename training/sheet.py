"""A contact sheet: a prompt a row, time from left to right, and what the judge reads otherwise.

    python -m training.sheet evidence.json STRIP… --output sheet.png

draws one from strips that `training.evidence --strips` left, in the order of the file's rows;
`training.evidence --sheet` draws the same while it is at it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from training.adherence import wrong
from training.judge.colour import spread, unit

SHOWN = 6  # frames of a clip
ROWS = 12
INK, RIGHT, WRONG = "#1d2433", "#3a9d6e", "#b0413e"
LETTER, LINE, GAP = 11, 14, 6  # pixels


def strip(clip: Tensor) -> Image.Image:
    """Some frames of a clip [F, H, W, 3], uint8 or 0…1, side by side."""
    picked = unit(clip[spread(len(clip), SHOWN).to(clip.device)].cpu())
    wide = torch.cat(list(picked), 1)
    return Image.fromarray(wide.clamp(0, 1).mul(255).round().byte().numpy())


def sheet(rows: Sequence[dict[str, Any]], strips: Sequence[Image.Image]) -> Image.Image:
    """Rows of `training.adherence.scores`, and a strip for each."""
    font = ImageFont.load_default(LETTER)
    width = max(picture.width for picture in strips)
    parts = []
    for row, picture in zip(rows, strips, strict=True):
        otherwise = "; ".join(wrong(row))
        lines = [(text, INK) for text in _wrapped(row["prompt"], font, width)]
        told = otherwise or "all that is named is as asked"
        lines += [(text, WRONG if otherwise else RIGHT) for text in _wrapped(told, font, width)]
        parts.append((lines, picture))
    height = sum(LINE * len(lines) + picture.height + GAP for lines, picture in parts)
    made = Image.new("RGB", (width, height), "white")
    draw, y = ImageDraw.Draw(made), 0
    for lines, picture in parts:
        for text, colour in lines:
            draw.text((2, y), text, fill=colour, font=font)
            y += LINE
        made.paste(picture, (0, y))
        y += picture.height + GAP
    return made


def _wrapped(text: str, font: Any, width: int) -> list[str]:
    lines = [""]
    for word in text.split():
        longer = f"{lines[-1]} {word}".lstrip()
        if lines[-1] and font.getlength(longer) > width - 4:
            lines.append(word)
        else:
            lines[-1] = longer
    return lines


def save_strips(clips: Sequence[Tensor], folder: Path) -> None:
    """01.png, 02.png, …"""
    folder.mkdir(parents=True, exist_ok=True)
    for i, clip in enumerate(clips, 1):
        strip(clip).save(folder / f"{i:02d}.png")


def read_rows(file: Path, part: str | None) -> list[dict[str, Any]]:
    """Verdicts of a file of `training.evidence`, or of one part of a file that has several."""
    told = json.loads(file.read_text(encoding="utf-8"))
    if part is not None:
        if part not in told:
            raise ValueError(f"{file} has no part {part!r}, but {', '.join(told)}")
        told = told[part]
    if "rows" not in told:
        parts = [name for name, some in told.items() if isinstance(some, dict) and "rows" in some]
        hint = f"; give --part, one of {', '.join(parts)}" if parts else ""
        raise ValueError(f"{file} holds no verdicts (rows){hint}")
    rows: list[dict[str, Any]] = told["rows"]
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("evidence", type=Path, help="the file that training.evidence left")
    parser.add_argument("strips", type=Path, nargs="+", help="pictures, in the order of its rows")
    parser.add_argument("--part", help="of a file that holds the evidence of several sizes")
    parser.add_argument("--output", type=Path, required=True)
    asked = parser.parse_args()
    try:
        rows = read_rows(asked.evidence, asked.part)
        if len(asked.strips) > len(rows):
            raise ValueError(f"{len(asked.strips)} strips, but {len(rows)} rows in the evidence")
        pictures = [Image.open(file).convert("RGB") for file in asked.strips]
    except (OSError, ValueError) as error:
        parser.error(str(error))
    sheet(rows[: len(pictures)], pictures).save(asked.output)


if __name__ == "__main__":
    main()
