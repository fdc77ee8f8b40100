"""Two clips side by side: every pixel where it belongs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("PIL")
pytest.importorskip("av")

from jali.clips.clip import Clip, read_clip, write_mp4
from jali.evaluation.demo.side_by_side import (
    GAIN,
    GAP,
    HEADER,
    film,
    panels,
    strip,
    write_strip,
)


def clips(height: int, width: int, frames: int = 9) -> tuple[Clip, Clip]:
    dice = torch.Generator().manual_seed(0)
    first = torch.randint(0, 256, (frames, height, width, 3), generator=dice, dtype=torch.uint8)
    return Clip(first, 12), Clip((first.int() + 10).clamp(0, 255).to(torch.uint8), 12)


def test_panels_from_left_to_right() -> None:
    first, second = clips(192, 320)
    shown = panels(first, second, ("dense · 2.0 s", "entropy 0.3 · 1.0 s"))
    whole = film(shown)
    assert whole.shape == (9, HEADER + 192, 3 * 320 + 2 * GAP, 3)
    body = whole[:, HEADER:]
    assert torch.equal(body[:, :, :320], first.frames)
    assert torch.equal(body[:, :, 320 + GAP : 640 + GAP], second.frames)
    assert (body[:, :, 320 : 320 + GAP] == 255).all()
    # Titles are dark on white, and every panel has one.
    for left in (0, 320 + GAP, 640 + 2 * GAP):
        assert whole[0, :HEADER, left : left + 320].min() < 80


def test_the_difference_is_as_large_as_it_says() -> None:
    first, second = clips(16, 16)
    apart = panels(first, second, ("a", "b"))[2].frames
    inside = (first.frames < 246).all(-1)
    assert (apart[inside] == 10 * GAIN).all()
    same = panels(first, first, ("a", "b"))[2].frames
    assert int(same.max()) == 0


def test_small_clips_are_enlarged() -> None:
    first, second = clips(128, 128)
    whole = film(panels(first, second, ("a", "a title that is far too long for so small a clip")))
    assert whole.shape[1:3] == (HEADER + 256, 3 * 256 + 2 * GAP)
    assert torch.equal(whole[:, HEADER::2, :256:2], first.frames)


@pytest.mark.parametrize("frames", [1, 2, 9])
def test_a_strip_has_the_first_frame_and_the_last(frames: int) -> None:
    first, second = clips(24, 32, frames)
    image = strip(panels(first, second, ("a", "b")))
    assert image.shape[0] == 3 * (HEADER + 24)
    assert torch.equal(image[HEADER : HEADER + 24, :32], first.frames[0])
    assert torch.equal(image[HEADER : HEADER + 24, -32:], first.frames[-1])
    below = 2 * HEADER + 24
    assert torch.equal(image[below : below + 24, -32:], second.frames[-1])


def test_files(tmp_path: Path) -> None:
    from PIL import Image

    shown = panels(*clips(32, 48), ("a", "b"))
    write_mp4(tmp_path / "film.mp4", film(shown), 12)
    write_strip(tmp_path / "strip.png", shown)
    assert read_clip(tmp_path / "film.mp4").frames.shape == film(shown).shape
    height, width, _ = strip(shown).shape
    assert Image.open(tmp_path / "strip.png").size == (width, height)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["film.mp4", "strip.png"]


def test_clips_of_two_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="clips side by side have one size"):
        panels(clips(16, 16)[0], clips(16, 24)[0], ("a", "b"))
