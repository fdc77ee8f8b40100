"""Whole folders: pairs, what is found about them, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from made_clips import disc, noisy
from torch import Tensor

from jali.clips.clip import read_clip, write_lossless, write_mp4
from jali.clips.source import Batch, TensorSource
from jali.error import InputError
from jali.evaluation.quality import evaluation, metric
from jali.evaluation.quality.evaluation import DEFAULT, METRICS, evaluate
from jali.evaluation.quality.result import (
    Evaluation,
    check_output,
    read_evaluation,
    write_evaluation,
)

FAST = ("psnr", "ssim", "flicker")


def folder_of(place: Path, clips: dict[str, Tensor]) -> Path:
    place.mkdir(parents=True)
    for name, frames in clips.items():
        torch.save(frames, place / f"{name}.pt")
    return place


def run_of(place: Path, clips: dict[str, Tensor], **changes: Any) -> Path:
    """A run folder as `jali generate` leaves it; `changes` go into every clip's entry."""
    place.mkdir(parents=True)
    entries = []
    for name, frames in clips.items():
        write_mp4(place / f"{name}.mp4", frames, 12)
        write_lossless(place / f"{name}.mkv", frames, 12)
        entries.append(
            {"name": name, "prompt": name, "fps": 12, "frames": len(frames), "video": f"{name}.mp4",
             "lossless": f"{name}.mkv", **changes}
        )  # fmt: skip
    manifest = {"kind": "jali-run", "version": 1, "clips": entries}
    (place / "manifest.json").write_text(json.dumps(manifest))
    return place


@pytest.fixture
def clips() -> dict[str, Tensor]:
    return {name: disc(6, 48, 64, seed) for seed, name in enumerate(("a", "b", "c"))}


def worse(clips: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: noisy(frames, 20 + 10 * i) for i, (name, frames) in enumerate(clips.items())}


def test_the_known_pair(known: Evaluation) -> None:
    """The values that this project is held to."""
    found, summary = known, known.summary
    assert summary["psnr"].mean == pytest.approx(23.07, abs=0.005)
    assert summary["ssim"].mean == pytest.approx(0.707, abs=0.0005)
    assert summary["lpips"].mean == pytest.approx(0.250, abs=0.0005)
    assert summary["ms_ssim"].mean is None
    assert found.unavailable == {"ms_ssim": "n/a: needs sides of at least 176 pixels"}
    assert found.pairs[0].frames == 120
    assert found.pairs[0].lossy == (True, True)
    assert "read from a lossy file" in found.notes[0]


def test_values_are_those_of_whole_clips_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read two frames at a time, so that everything that needs neighbours crosses a border."""
    a = disc(7, 192, 192)
    b = noisy(a, 30)
    write_lossless(tmp_path / "a.mkv", a, 12)
    write_lossless(tmp_path / "b.mkv", b, 12)
    monkeypatch.setitem(evaluation._PIXELS, "cpu", 2 * 192 * 192)
    found = evaluate(tmp_path / "a.mkv", tmp_path / "b.mkv", ("psnr", "ssim", "ms_ssim", "flicker"))
    series = found.pairs[0].series
    for name in ("psnr", "ssim", "ms_ssim"):
        expected = getattr(metric, name)(a, b).tolist()
        assert series[name].per_frame == pytest.approx(expected, rel=1e-5)
        assert series[name].mean == pytest.approx(sum(expected) / 7, rel=1e-5)
    expected = metric.flicker(b)[1:-1].tolist()
    assert series["flicker"].per_frame[1:-1] == pytest.approx(expected, rel=1e-5)
    assert series["flicker"].per_frame[0] is series["flicker"].per_frame[-1] is None
    ratio = (metric.flicker(b).nanmean() / metric.flicker(a).nanmean()).item()
    assert series["flicker"].extra["ratio"] == pytest.approx(ratio, rel=1e-4)


def test_clips_pair_by_name_and_the_interval_is_over_clips(
    tmp_path: Path, clips: dict[str, Tensor]
) -> None:
    reference = folder_of(tmp_path / "dense", clips)
    generated = folder_of(tmp_path / "sparse", dict(reversed(worse(clips).items())))
    found = evaluate(reference, generated, FAST)
    assert [pair.name for pair in found.pairs] == ["a", "b", "c"]
    means = [metric.psnr(clips[n], worse(clips)[n]).double().mean().item() for n in clips]
    assert means[0] > means[1] > means[2]
    assert [pair.series["psnr"].mean for pair in found.pairs] == pytest.approx(means, rel=1e-5)
    summary = found.summary["psnr"]
    spread = torch.tensor(means).std().item() * 4.3027 / math.sqrt(3)
    assert summary.n == 3
    assert summary.mean == pytest.approx(sum(means) / 3, rel=1e-5)
    assert summary.high - summary.mean == pytest.approx(spread, rel=1e-3)
    assert found.notes == ()


def test_a_run_is_read_from_its_lossless_files(tmp_path: Path, clips: dict[str, Tensor]) -> None:
    dense = run_of(tmp_path / "dense", clips)
    same = run_of(tmp_path / "same", clips)
    for place in (dense, dense / "manifest.json"):
        found = evaluate(place, same, FAST)
        assert all(pair.identical for pair in found.pairs)
        assert all(Path(file).suffix == ".mkv" for pair in found.pairs for file in pair.files)
        assert not any("lossy" in note for note in found.notes)
    lossy = run_of(tmp_path / "lossy", clips, lossless=None)
    found = evaluate(dense, lossy, FAST)
    assert not found.pairs[0].identical
    assert found.notes == (
        "generated: a.mp4 and 2 more read from a lossy file, "
        "so the codec's own losses are in the numbers",
    )


def test_a_plain_folder_prefers_its_lossless_files_too(
    tmp_path: Path, clips: dict[str, Tensor]
) -> None:
    for place in ("one", "two"):
        run_of(tmp_path / place, clips)
        (tmp_path / place / "manifest.json").unlink()
    assert all(pair.identical for pair in evaluate(tmp_path / "one", tmp_path / "two", FAST).pairs)


def test_identical_clips_stay_valid_json(tmp_path: Path, clips: dict[str, Tensor]) -> None:
    half = {name: frames.clone() for name, frames in clips.items()}
    half["b"][3:] = noisy(half["b"][3:], 30)
    reference, generated = folder_of(tmp_path / "1", clips), folder_of(tmp_path / "2", half)
    found = evaluate(reference, generated, FAST)
    text = json.dumps(found.to_dict(), allow_nan=False)
    a, b, _ = json.loads(text)["pairs"]
    assert a["identical"] is True
    assert a["psnr"] == {"mean": None, "per_frame": [None] * 6, "identical": 6}
    assert a["ssim"]["mean"] == pytest.approx(1)
    assert b["identical"] is False
    assert b["psnr"]["identical"] == 3
    assert b["psnr"]["per_frame"][:3] == [None] * 3
    expected = metric.psnr(clips["b"][3:], half["b"][3:]).mean().item()
    assert b["psnr"]["mean"] == pytest.approx(expected, rel=1e-5)
    assert found.summary["psnr"].n == 1
    assert any("identical" in note for note in found.notes)


def test_faults_are_counted(tmp_path: Path) -> None:
    clean = disc(8, 48, 64)
    bad = clean.float() / 255
    bad[2] = 0.02  # black
    bad[4] = bad[3]  # frozen
    bad[5] = bad[3] + 1 / 255  # still frozen: one level off, as after a codec
    bad[6, 0, 0, 0] = torch.nan
    torch.save(clean, tmp_path / "clean.pt")
    torch.save(bad.clamp(max=1), tmp_path / "bad.pt")
    pair = evaluate(tmp_path / "clean.pt", tmp_path / "bad.pt", FAST).pairs[0].to_dict()
    assert pair["checks"] == {"black": 1, "frozen": 2, "nan": 1}
    assert pair["reference_checks"] == {"black": 0, "frozen": 0, "nan": 0}


def test_a_small_thing_that_moves_is_not_frozen(tmp_path: Path) -> None:
    frames = torch.full((4, 192, 320, 3), 90, dtype=torch.uint8)
    for t in range(4):
        frames[t, 100:104, 50 + t : 54 + t] = 200
    torch.save(frames, tmp_path / "clip.pt")
    pair = evaluate(tmp_path / "clip.pt", tmp_path / "clip.pt", ("psnr",)).pairs[0]
    assert pair.checks.frozen == 0


def test_one_image_has_no_flicker(tmp_path: Path) -> None:
    torch.save(disc(1, 48, 64), tmp_path / "one.pt")
    found = evaluate(tmp_path / "one.pt", tmp_path / "one.pt", FAST)
    assert found.summary["flicker"].mean is None
    json.dumps(found.to_dict(), allow_nan=False)


def test_two_folders_of_frames_are_one_pair(tmp_path: Path, frames: Tensor) -> None:
    from test_clip import write_png

    for place in ("dense", "sparse"):
        (tmp_path / place).mkdir()
        for index, frame in enumerate(frames):
            write_png(tmp_path / place / f"{index}.png", frame)
    assert evaluate(tmp_path / "dense", tmp_path / "sparse", FAST).pairs[0].identical


def refused(reference: Path, generated: Path, match: str, **options: Any) -> None:
    with pytest.raises(InputError, match=match) as caught:
        evaluate(reference, generated, options.pop("metrics", FAST), **options)
    assert "\n" not in str(caught.value)


def test_clips_without_a_partner_are_named(tmp_path: Path, clips: dict[str, Tensor]) -> None:
    dense = folder_of(tmp_path / "dense", clips)
    some = folder_of(tmp_path / "some", {"a": clips["a"], "z": clips["b"]})
    other = folder_of(tmp_path / "other", {"x": clips["a"]})
    refused(dense, some, r"2 only in .*dense \(b, c\); 1 only in .*some \(z\) \(--partial")
    found = evaluate(dense, some, FAST, partial=True)
    assert [pair.name for pair in found.pairs] == ["a"]
    assert found.to_dict()["unmatched"] == {"reference": ["b", "c"], "generated": ["z"]}
    refused(dense, other, "no clip of .* has the name of a clip", partial=True)


def test_clips_that_differ_are_named(tmp_path: Path, clips: dict[str, Tensor]) -> None:
    dense = run_of(tmp_path / "dense", clips)
    small = run_of(tmp_path / "small", {n: c[:, :40] for n, c in clips.items()})
    short = run_of(tmp_path / "short", {n: c[:4] for n, c in clips.items()})
    refused(dense, small, r"a: the clips differ in size, 64×48 .* and 64×40")
    refused(dense, short, r"a: the clips differ in length, 6 frames .* and 4")
    torch.save(clips["a"], tmp_path / "long.pt")
    refused(tmp_path / "long.pt", short / "a.mkv", "differ in length, 6 frames .* and 4")
    wrong = run_of(tmp_path / "wrong", clips, frames=7)
    refused(dense, wrong, r"a\.mkv has 6 frames, but its manifest says 7")


def test_places_that_hold_nothing_are_named(tmp_path: Path, clips: dict[str, Tensor]) -> None:
    dense = run_of(tmp_path / "out" / "dense", clips)
    (tmp_path / "empty").mkdir()
    refused(dense, tmp_path / "gone", "gone does not exist")
    refused(dense, tmp_path / "empty", "empty holds no clips$")
    refused(dense, tmp_path / "out", "holds no clips; it holds the runs dense: name one of them")
    (dense / "b.mkv").unlink()
    refused(dense, dense, r"manifest\.json names b\.mkv, which is not there")
    for text, match in (
        ("{", r"manifest\.json is not JSON"),
        ("[]", "holds a list, not an object"),
        ('{"kind": "other"}', 'its "kind" is not "jali-run"'),
        ('{"kind": "jali-run", "clips": []}', "has no clips yet"),
        ('{"kind": "jali-run", "clips": [3]}', "a clip without a name"),
        ('{"kind": "jali-run", "clips": [{"name": "a"}]}', "no file for the clip a"),
    ):
        (dense / "manifest.json").write_text(text)
        refused(dense, dense, match)


def test_a_damaged_clip_is_named(tmp_path: Path, clips: dict[str, Tensor]) -> None:
    dense, bad = run_of(tmp_path / "dense", clips), run_of(tmp_path / "bad", clips)
    whole = (bad / "c.mkv").read_bytes()
    (bad / "c.mkv").write_bytes(whole[: len(whole) // 2])
    refused(dense, bad, r"bad/c\.mkv")


def test_metrics_that_cannot_run(
    tmp_path: Path, frames: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jali.evaluation.quality import vmaf

    monkeypatch.setattr(vmaf, "_candidates", list)
    monkeypatch.setenv("JALI_WEIGHTS", str(tmp_path))
    clip = tmp_path / "clip.pt"
    torch.save(frames, clip)
    found = evaluate(clip, clip)  # of the default ones, they are listed
    assert set(found.metrics) == set(DEFAULT) - {"lpips", "vmaf"}
    assert found.to_dict()["unavailable"].keys() == {"lpips", "vmaf", "ms_ssim"}
    refused(clip, clip, "holds no weights of LPIPS", metrics=("psnr", "lpips"))
    refused(clip, clip, "no ffmpeg with libvmaf", metrics=("vmaf",))
    refused(clip, clip, f"metrics are {', '.join(METRICS)}; got fid", metrics=("fid",))
    refused(clip, clip, "got none", metrics=())
    refused(clip, clip, "device must be cpu, cuda", device="gpu")
    refused(clip, clip, "there is no cuda:99", device="cuda:99")


def test_all_metrics_at_once(tmp_path: Path, fetched: Path) -> None:
    clean = disc(3, 176, 176)
    write_lossless(tmp_path / "a.mkv", clean, 12)
    write_mp4(tmp_path / "b.mp4", clean, 12)
    found = evaluate(tmp_path / "a.mkv", tmp_path / "b.mp4", METRICS, weights=fetched)
    assert found.unavailable == {}
    assert all(value.n == 1 and value.mean is not None for value in found.summary.values())


def test_only_metrics_are_replaced(tmp_path: Path, frames: Tensor) -> None:
    torch.save(frames, tmp_path / "clip.pt")
    found = evaluate(tmp_path / "clip.pt", tmp_path / "clip.pt", FAST)
    path = tmp_path / "deep" / "metrics.json"
    write_evaluation(found, path)
    write_evaluation(found, path)
    assert read_evaluation(path) == json.loads(json.dumps(found.to_dict()))
    other = tmp_path / "notes.json"
    other.write_text("my notes")
    with pytest.raises(InputError, match=r"notes\.json exists and is not a file of metrics"):
        write_evaluation(found, other)
    assert other.read_text() == "my notes"
    with pytest.raises(InputError, match="is a folder; name a file"):
        check_output(tmp_path)
    assert sorted(p.name for p in tmp_path.rglob("*.part")) == []


def test_a_newer_version_of_metrics_is_refused(tmp_path: Path) -> None:
    (tmp_path / "m.json").write_text('{"kind": "jali-metrics", "version": 2}')
    with pytest.raises(InputError, match="is not a jali-metrics file of version 1"):
        read_evaluation(tmp_path / "m.json")


MEMORY = """
import resource, sys, torch
from pathlib import Path
from jali.evaluation.quality.evaluation import evaluate
folder, metrics = Path(sys.argv[1]), sys.argv[2].split(",")
evaluate(folder / "a.mkv", folder / "b.mkv", metrics)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20)
"""


def peak_gib(folder: Path, frames: int, metrics: str) -> float:
    still = disc(1, 720, 1280)
    for name in ("a", "b"):
        write_lossless(folder / f"{name}.mkv", (still for _ in range(frames)), 24)
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(folder), metrics], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


def test_no_more_than_a_few_frames_are_held_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = disc(40, 16, 16)
    torch.save(frames, tmp_path / "a.pt")
    monkeypatch.setitem(evaluation._PIXELS, "cpu", 4 * 16 * 16)
    given: list[weakref.ref[Tensor]] = []
    most = 0
    batches = TensorSource.batches

    def watched(self: TensorSource, size: int) -> Iterator[Batch]:
        nonlocal most
        for batch in batches(self, size):
            given.append(weakref.ref(batch.frames))
            most = max(most, sum(ref() is not None for ref in given))
            yield batch

    monkeypatch.setattr(TensorSource, "batches", watched)
    evaluate(tmp_path / "a.pt", tmp_path / "a.pt", FAST)
    assert len(given) == 20  # ten of each clip
    assert most <= 4  # a new one while the one before is still in hand, of each clip


@pytest.mark.slow
@pytest.mark.usefixtures("fetched")
@pytest.mark.parametrize(
    ("frames", "metrics"), [(129, "psnr,flicker"), (5, "ssim,ms_ssim,lpips"), (1, "lpips_vgg")]
)
def test_720p_fits_in_2_gb(tmp_path: Path, frames: int, metrics: str) -> None:
    """The number of frames matters to nothing but the reading, the size to every metric."""
    assert peak_gib(tmp_path, frames, metrics) < 1.86


@pytest.mark.gpu
@pytest.mark.usefixtures("fetched")
def test_a_gpu_finds_the_same(tmp_path: Path, clips: dict[str, Tensor]) -> None:
    a, b = folder_of(tmp_path / "a", clips), folder_of(tmp_path / "b", worse(clips))
    names = ("psnr", "ssim", "lpips", "flicker")
    here, there = evaluate(a, b, names), evaluate(a, b, names, device="cuda")
    for name in names:
        assert there.summary[name].mean == pytest.approx(here.summary[name].mean, rel=1e-3)
    assert [pair.checks for pair in here.pairs] == [pair.checks for pair in there.pairs]


def test_a_clip_can_be_compared_with_what_was_written_of_it(tmp_path: Path) -> None:
    frames = disc(4, 64, 64)
    write_mp4(tmp_path / "clip.mp4", frames, 12)
    torch.save(frames, tmp_path / "clip.pt")
    found = evaluate(tmp_path / "clip.pt", tmp_path / "clip.mp4", ("psnr",)).summary["psnr"].mean
    expected = metric.psnr(frames, read_clip(tmp_path / "clip.mp4").frames).mean().item()
    assert found == pytest.approx(expected, rel=1e-5)
