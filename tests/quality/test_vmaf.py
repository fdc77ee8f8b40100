"""VMAF through ffmpeg, on files as they are and on tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from made_clips import disc, noisy

from jali.clips.clip import read_clip, write_lossless
from jali.clips.source import open_source
from jali.error import InputError, JobError
from jali.evaluation.quality import vmaf as module
from jali.evaluation.quality.vmaf import SMALLEST_SIDE, Ffmpeg, find_ffmpeg, vmaf


@pytest.fixture(scope="module")
def ffmpeg() -> Ffmpeg:
    return find_ffmpeg()


def test_the_known_pair(carphone: tuple[Path, Path], ffmpeg: Ffmpeg) -> None:
    values = vmaf(ffmpeg, *(open_source(path) for path in carphone))
    assert len(values) == 120
    assert values[0] == pytest.approx(38.57, abs=0.01)
    assert sum(values) / 120 == pytest.approx(34.69, abs=0.01)


def test_tensors_get_nearly_the_same(
    carphone: tuple[Path, Path], ffmpeg: Ffmpeg, tmp_path: Path
) -> None:
    """The way through RGB rounds luma once more, which this metric notices a little."""
    for name, path in zip(("a", "b"), carphone, strict=True):
        torch.save(read_clip(path).frames[:8], tmp_path / f"{name}.pt")
    values = vmaf(ffmpeg, open_source(tmp_path / "a.pt"), open_source(tmp_path / "b.pt"))
    assert values[0] == pytest.approx(38.57, abs=0.5)


def test_the_least_side(tmp_path: Path, ffmpeg: Ffmpeg) -> None:
    clean = disc(3, SMALLEST_SIDE, SMALLEST_SIDE)
    write_lossless(tmp_path / "a.mkv", clean, 12)
    write_lossless(tmp_path / "b.mkv", noisy(clean, 60), 12)
    a, b = open_source(tmp_path / "a.mkv"), open_source(tmp_path / "b.mkv")
    same, worse = vmaf(ffmpeg, a, a), vmaf(ffmpeg, a, b)
    assert min(same) > max(worse)


def test_an_ffmpeg_without_it_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "ffmpeg"
    bare.write_text("#!/bin/sh\necho ' .. scale  V->V  Scale'\n")
    bare.chmod(0o755)
    own = find_ffmpeg()
    not_a_program = tmp_path / "text"
    not_a_program.write_text("x")
    monkeypatch.setattr(module, "_candidates", lambda: [not_a_program, bare, own.path])
    assert find_ffmpeg() == own
    monkeypatch.setattr(module, "_candidates", lambda: [bare])
    with pytest.raises(InputError, match=r"no ffmpeg with libvmaf .*have none"):
        find_ffmpeg()
    monkeypatch.setattr(module, "_candidates", list)
    with pytest.raises(InputError, match=r"pip install 'jali\[quality\]'"):
        find_ffmpeg()


def test_a_failing_ffmpeg_is_a_failed_job(tmp_path: Path) -> None:
    broken = tmp_path / "ffmpeg"
    broken.write_text("#!/bin/sh\necho 'out of cheese' >&2\nexit 1\n")
    broken.chmod(0o755)
    write_lossless(tmp_path / "a.mkv", disc(2, 48, 48), 12)
    source = open_source(tmp_path / "a.mkv")
    with pytest.raises(JobError, match=r"VMAF of .*a\.mkv: out of cheese"):
        vmaf(Ffmpeg(broken, "0"), source, source)
