"""Contact sheets: from clips, and again from the strips that were kept of them."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from training import sheet

ROWS = [
    {"prompt": "a red ball spins", "asked_shape": "ball", "seen_shape": "ball"},
    {"prompt": "a small blue star " + "moves left " * 9, "asked_shape": "star", "seen_shape": None},
]
CLIPS = [torch.full((9, 24, 32, 3), share) for share in (0.25, 0.75)]


def test_a_row_has_its_prompt_its_verdict_and_six_moments() -> None:
    strips = [sheet.strip(clip) for clip in CLIPS]
    assert [s.size for s in strips] == [(6 * 32, 24)] * 2
    made = np.asarray(sheet.sheet(ROWS, strips))
    seen = [int((made == value).all((1, 2)).sum()) for value in (64, 191)]
    assert seen == [24, 24]
    colours = {tuple(c) for c in made.reshape(-1, 3).tolist()}
    for name in (sheet.RIGHT, sheet.WRONG):  # the first is as asked, the second is not
        assert tuple(bytes.fromhex(name[1:])) in colours


def test_frames_are_picked_in_order_and_a_short_clip_has_fewer() -> None:
    clip = (torch.arange(11) * 20).byte().view(-1, 1, 1, 1).expand(-1, 2, 2, 3)
    assert np.asarray(sheet.strip(clip))[0, ::2, 0].tolist() == [0, 40, 80, 120, 160, 200]
    assert sheet.strip(clip[:3]).size == (6, 2)


def test_saved_strips_make_the_same_sheet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sheet.save_strips(CLIPS, tmp_path / "strips")
    files = sorted(map(str, (tmp_path / "strips").iterdir()))
    evidence, made = tmp_path / "evidence.json", tmp_path / "sheet.png"
    evidence.write_text(json.dumps({"rows": ROWS}), "utf-8")
    monkeypatch.setattr(sys, "argv", ["sheet", str(evidence), *files, "--output", str(made)])
    sheet.main()
    expected = sheet.sheet(ROWS, [sheet.strip(clip) for clip in CLIPS])
    assert np.array_equal(np.asarray(Image.open(made)), np.asarray(expected))


def test_what_cannot_be_drawn_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sheet.save_strips(CLIPS, tmp_path)
    several, one, made = tmp_path / "several.json", tmp_path / "one.json", tmp_path / "made.png"
    several.write_text(json.dumps({"wide": {"rows": ROWS}}), "utf-8")
    one.write_text(json.dumps({"rows": ROWS[:1]}), "utf-8")
    strips = [str(tmp_path / "01.png"), str(tmp_path / "02.png")]
    for given, said in (
        ([several, *strips], "give --part, one of wide"),
        ([several, *strips, "--part", "small"], "no part 'small', but wide"),
        ([one, *strips], "2 strips, but 1 rows"),
        ([one, tmp_path / "03.png"], "03.png"),
        ([one, one], "one.json"),
    ):
        arguments = ["sheet", *map(str, given), "--output", str(made)]
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="2"):
            sheet.main()
        assert said in capsys.readouterr().err
        assert not made.exists()
