"""What the page says, without a browser: numbers, notes, and what it is made of."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import example
import numpy as np
import pytest
from PIL import Image

from jali.error import InputError
from jali.evaluation.quality.interval import Interval
from jali.evaluation.report import (
    Comparison,
    compare_page,
    read_comparison,
    render_page,
)
from jali.evaluation.report.cost import read_sites
from jali.evaluation.report.film import read_film
from jali.evaluation.report.summary import RunSummary, headline


def report(*folders: Path, **options: Any) -> Comparison:
    return read_comparison(folders, **options)


def data_of(page: str) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert found
    return json.loads(found[1])


@pytest.fixture(scope="module")
def comparison(root: Path) -> Comparison:
    return read_comparison([root])


def test_a_folder_of_runs_stands_for_its_runs_dense_first(comparison: Comparison) -> None:
    assert [run.name for run in comparison.runs] == ["dense", "entropy 0.3", "psa 0.15"]
    assert not comparison.notes


def test_rows_are_means_of_what_manifests_and_metrics_say(
    comparison: Comparison, root: Path
) -> None:
    dense, entropy, _ = comparison.rows()
    assert dense.seconds is not None
    assert dense.seconds.mean == pytest.approx(np.mean([12.4, 12.4 * 1.03]), abs=1e-3)
    assert dense.speed_up is None
    assert entropy.speed_up is not None
    assert entropy.speed_up.mean == pytest.approx(12.4 / 7.3, abs=1e-3)
    assert entropy.budget == 0.3
    clips = json.loads((root / "entropy" / "manifest.json").read_text())["clips"]
    assert entropy.cost is not None
    assert entropy.cost.mean == pytest.approx(np.mean([clip["cost"] for clip in clips]))
    pairs = json.loads((root / "entropy" / "metrics.json").read_text())["pairs"]
    means = [pair["psnr"]["mean"] for pair in pairs]
    psnr = entropy.metrics["psnr"]
    assert psnr.mean == pytest.approx(np.mean(means))
    assert (psnr.low, psnr.high, psnr.n) == (None, None, 2)
    assert psnr.values == pytest.approx(means)


def test_a_run_asked_by_its_total_says_so(tmp_path: Path) -> None:
    """A budget is of sparse calls, a total of the whole run: each has a column of its own."""
    example.make_run(tmp_path / "dense", clips=1)
    example.make_run(tmp_path / "rd", clips=1, method="rd", total=0.4)
    example.make_run(tmp_path / "psa", clips=1, method="psa", budget=0.3)
    found = read_comparison([tmp_path / name for name in ("dense", "rd", "psa")], metrics=[])
    assert [(row.budget, row.total) for row in found.rows()] == [
        (None, None), (None, 0.4), (0.3, None)
    ]  # fmt: skip
    page = render_page(found)
    for column, share in (("asked", "0.3"), ("asked in total", "0.4")):
        assert f'<td data-label="{column}">{share}</td>' in page
        assert f"cost, {share} asked" in page


def test_two_clips_show_both_values(comparison: Comparison) -> None:
    page = render_page(comparison)
    values = comparison.rows()[1].metrics["psnr"].values
    assert f"<small>{values[0]:.2f}, {values[1]:.2f}</small>" in page
    assert "too few for an interval" in page


def test_three_clips_have_an_interval(tmp_path: Path) -> None:
    example.make_three(tmp_path, clips=3)
    found = report(tmp_path, metrics=["psnr"])
    psnr = found.rows()[1].metrics["psnr"]
    means = [found.metrics[1].clips[clip]["psnr"].mean for clip in found.clips]
    # Of three values Student's t is 4.3027.
    half = 4.3027 * np.std(means, ddof=1) / math.sqrt(3)
    assert (psnr.low, psnr.high) == pytest.approx((psnr.mean - half, psnr.mean + half), rel=1e-4)
    assert f"<small>{psnr.low:.2f} – {psnr.high:.2f}</small>" in render_page(found)
    told = found.to_dict()["rows"][1]["metrics"]["psnr"]
    assert told == {"value": psnr.mean, "low": psnr.low, "high": psnr.high, "n": 3, "values": []}


def test_the_headline_picks_no_run(comparison: Comparison) -> None:
    near = [row.metrics["psnr"].mean for row in comparison.rows()[1:]]
    assert comparison.headline() == (
        f"1.7× to 2.1× faster at {near[0]:.1f} dB to {near[1]:.1f} dB, entropy 0.3 to psa 0.15"
    )


@pytest.mark.parametrize(
    ("speeds", "said", "praise"),
    [
        ((1.7,), "1.7× faster", True),
        ((1 / 1.1,), "1.1× slower", False),
        ((1.02,), "As fast", False),
        ((1.7, 2.1), "1.7× to 2.1× faster, a to b", True),
        ((2.1, 0.8), "0.8× to 2.1× as fast, b to a", False),
        ((0.5, 0.8), "1.2× to 2.0× slower, a to b", False),
        ((None,), "2 clips side by side", False),
        ((None, 2.0), "3 runs side by side", False),
    ],
)
def test_the_headline_is_praise_only_of_what_is_faster(
    speeds: tuple[float | None, ...], said: str, praise: bool
) -> None:
    nothing = RunSummary("dense", 2, None, None, None, None, None, None, None, {})
    rows = [
        replace(nothing, name=name, speed_up=speed and Interval(speed, None, None, 2))
        for name, speed in zip("ab", speeds, strict=False)
    ]
    found = headline([nothing, *rows])
    assert (found.loud + found.quiet, found.praise) == (said, praise)


def test_slower_is_not_in_the_colour_of_praise(root: Path) -> None:
    slower = render_page(report(root / "psa", root / "dense", metrics=[]))
    assert "<h1><b>2.1× slower</b>" in slower
    assert '<h1><b class="praise">' in render_page(report(root / "dense", root / "psa"))


def test_two_runs_need_no_name_in_the_headline(root: Path) -> None:
    said = report(root / "dense", root / "entropy").headline()
    assert re.fullmatch(r"1\.7× faster at \d+\.\d dB", said)
    assert (
        report(root / "entropy", root / "dense", metrics=["ssim"])
        .headline()
        .startswith("1.7× slower")
    )


def test_every_number_of_the_table_is_on_the_page(comparison: Comparison) -> None:
    page = render_page(comparison)
    for row in comparison.rows():
        for mean, digits in ((row.seconds, 2), (row.cost, 3), (row.metrics.get("psnr"), 2)):
            if mean is not None:
                assert f">{mean.mean:.{digits}f}<" in page
    assert "Not measured: vmaf: no ffmpeg with libvmaf" in page


def test_calls_weigh_by_their_dense_work(root: Path, tmp_path: Path) -> None:
    """As in the manifest; files of earlier versions say nothing of it, and weigh alike."""
    file = next((root / "psa").glob("*.sites.json"))
    sites = json.loads(file.read_text())
    assert set(read_sites(file)["weights"]) == {1.0}
    for at, row in enumerate(sites["rows"]):
        row["dense_work"] = 4e9 if at % 2 else 1e9
    (tmp_path / "a.json").write_text(json.dumps(sites))
    assert read_sites(tmp_path / "a.json")["weights"][:2] == [0.25, 1.0]
    sites["rows"][0]["dense_work"] = -1
    (tmp_path / "a.json").write_text(json.dumps(sites))
    with pytest.raises(InputError, match="dense_work"):
        read_sites(tmp_path / "a.json")


def test_the_page_carries_films_curves_sites_and_plans(comparison: Comparison, root: Path) -> None:
    page = render_page(comparison)
    data = data_of(page)
    assert len(re.findall(r'id="film-\d-\d">data:video/mp4;base64,', page)) == 6
    assert len(re.findall(r'id="difference-\d-[12]">data:video/mp4;base64,', page)) == 4
    clip = data["clips"][1]
    assert (clip["prompt"], clip["frames"]) == (example.PROMPTS[1], 13)
    pairs = json.loads((root / "psa" / "metrics.json").read_text())["pairs"]
    assert clip["runs"][2]["curves"]["ssim"] == pairs[1]["ssim"]["per_frame"]
    sites = json.loads((root / "psa" / f"{clip['name']}.sites.json").read_text())
    packed = clip["runs"][2]["sites"]
    assert len(packed["rows"]) == len(sites["rows"])
    layer, step, branch, cost, reason, _, heads = packed["rows"][-1]
    last = sites["rows"][-1]
    assert (layer, step, packed["branches"][branch]) == (7, 9, last["branch"])
    assert reason == -1
    assert cost == pytest.approx(last["cost"], abs=1e-3)
    assert heads == pytest.approx(last["heads"], abs=1e-3)
    assert packed["plans"][0]["levels"] == sites["plans"][0]["levels"]


def test_the_page_is_one_small_file_that_fetches_nothing(comparison: Comparison) -> None:
    own = sum(
        len(files("jali.evaluation.report").joinpath(name).read_bytes())
        for name in ("page.html", "page.css", "page.js")
    )
    assert own < 80_000
    page = render_page(comparison)
    addresses = set(re.findall(r"(?:https?:)?//[\w.-]+\.\w+[^\s'\"]*", page))
    assert addresses <= {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<(?:link|iframe|object)\b|\bsrc=|@import", page)
    assert not re.search(r"\{\{\w+\}\}", page)


def test_metrics_are_measured_where_there_are_none(runs: Path) -> None:
    (runs / "entropy" / "metrics.json").unlink()
    found = report(runs / "dense", runs / "entropy", metrics=["psnr"], limit=1)
    a, b = (example.film(0, example.SMALL, noise).astype(float) for noise in (0, 0.035))
    error = ((a - b) ** 2).mean((1, 2, 3)) / 255**2
    # From the lossless files, so equal up to rounding.
    assert found.rows()[1].metrics["psnr"].mean == pytest.approx(
        (-10 * np.log10(error)).mean(), abs=1e-3
    )
    assert list(found.rows()[1].metrics) == ["psnr"]
    assert found.notes == ("The first 1 of 2 clips are shown and counted.",)


def test_only_the_clips_that_are_shown_are_measured(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jali.evaluation.quality import evaluation

    seen: list[Path] = []
    real = evaluation.open_source
    monkeypatch.setattr(evaluation, "open_source", lambda path: seen.append(path) or real(path))
    report(runs / "dense", runs / "entropy", metrics=["psnr"], limit=1)
    assert {path.name for path in seen} == {f"{example.clip_name(0)}.mkv"}
    # What is not shown is not read either, be it damaged.
    (runs / "entropy" / f"{example.clip_name(1)}.mkv").write_bytes(b"x")
    report(runs / "dense", runs / "entropy", metrics=["psnr"], limit=1)


def test_a_poster_beside_the_videos_is_no_clip(root: Path, tmp_path: Path) -> None:
    for run in ("dense", "psa"):
        (tmp_path / run).mkdir()
        shutil.copy(root / run / f"{example.clip_name(0)}.mp4", tmp_path / run / "a.mp4")
        Image.new("RGB", (8, 8)).save(tmp_path / run / "poster.png")
    found = report(tmp_path / "dense", tmp_path / "psa", metrics=["psnr"])
    assert found.rows()[1].metrics["psnr"].n == 1


def test_the_usual_metrics_where_no_one_asks(runs: Path) -> None:
    (runs / "entropy" / "metrics.json").unlink()
    found = report(runs / "dense", runs / "entropy")
    assert {"psnr", "ssim", "flicker"} <= set(found.rows()[1].metrics)
    assert not (runs / "entropy" / "metrics.json").exists(), "a run folder is not ours to write to"


@pytest.fixture
def quick_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """PSNR stands for the usual metrics, which another test measures."""
    from jali.evaluation.quality import evaluation

    monkeypatch.setattr(evaluation, "DEFAULT", ("psnr",))


@pytest.mark.usefixtures("quick_metrics")
def test_metrics_against_another_reference_are_not_believed(runs: Path) -> None:
    found = report(runs / "psa", runs / "entropy")
    assert "was measured against" in found.notes[0]
    old = json.loads((runs / "entropy" / "metrics.json").read_text())["pairs"][0]["psnr"]["mean"]
    assert found.metrics[1].clips[example.clip_name(0)]["psnr"].mean != old


@pytest.mark.usefixtures("quick_metrics")
def test_metrics_that_miss_a_clip_are_not_believed(runs: Path) -> None:
    path = runs / "entropy" / "metrics.json"
    found = json.loads(path.read_text())
    del found["pairs"][1]
    path.write_text(json.dumps(found))
    again = report(runs / "dense", runs / "entropy")
    assert f"says nothing of {example.clip_name(1)}" in again.notes[0]
    assert again.rows()[1].metrics["psnr"].n == 2


def test_equal_clips_are_said_to_be_equal(runs: Path) -> None:
    same = Path(shutil.copytree(runs / "dense", runs / "same"))
    found = report(runs / "dense", same, metrics=["psnr", "ssim"])
    assert found.headline() == "As fast at no difference at all"
    assert [run.name for run in found.runs] == ["dense", "same"]
    assert ">∞<" in render_page(found)
    assert data_of(render_page(found))["clips"][0]["runs"][1]["curves"]["psnr"] == ["inf"] * 13
    assert found.to_dict()["rows"][1]["metrics"]["psnr"]["value"] == "inf"


def test_the_same_folder_twice_gets_two_names(root: Path) -> None:
    found = report(root / "dense", root / "dense", metrics=[])
    assert [run.name for run in found.runs] == ["dense (1)", "dense (2)"]


def test_times_of_two_machines_are_not_divided(runs: Path) -> None:
    path = runs / "entropy" / "manifest.json"
    path.write_text(path.read_text().replace("an example machine", "another machine"))
    found = report(runs / "dense", runs / "entropy")
    assert found.rows()[1].speed_up is None
    assert "different machines" in found.notes[0]
    assert re.fullmatch(r"\d+\.\d dB over 2 clips", found.headline())


def test_what_differs_besides_the_method_is_said(tmp_path: Path) -> None:
    example.make_run(tmp_path / "a", clips=1)
    example.make_run(tmp_path / "b", clips=1, method="entropy", seed=5)
    found = report(tmp_path / "a", tmp_path / "b", metrics=[])
    assert found.notes == ("Besides the method, these differ between the runs: seed (0, 5).",)


def test_clips_without_partner_are_named(tmp_path: Path) -> None:
    example.make_run(tmp_path / "a", clips=1)
    example.make_run(tmp_path / "b", clips=3, method="entropy")
    found = report(tmp_path / "a", tmp_path / "b", metrics=["psnr"])
    assert list(found.clips) == [example.clip_name(0)]
    assert f"{example.clip_name(1)} and 1 more" in found.notes[0]


def test_faults_of_a_clip_are_named(runs: Path) -> None:
    path = runs / "psa" / "metrics.json"
    found = json.loads(path.read_text())
    found["pairs"][0]["checks"]["black"] = 3
    found["pairs"][0]["reference_checks"]["black"] = 1
    path.write_text(json.dumps(found))
    notes = report(runs / "dense", runs / "psa").notes
    assert notes == (f"psa 0.15, {example.clip_name(0)}: 2 more black frames.",)


def test_plain_folders_need_no_manifest(root: Path, tmp_path: Path) -> None:
    for run in ("dense", "psa"):
        (tmp_path / run).mkdir()
        for kind in ("mp4", "mkv"):
            name = f"{example.clip_name(0)}.{kind}"
            shutil.copy(root / run / name, tmp_path / run / f"a.{kind}")
    found = report(tmp_path / "dense", tmp_path / "psa", metrics=["psnr"])
    film = found.films["a"][0]
    assert film.data == (root / "dense" / f"{example.clip_name(0)}.mp4").read_bytes()
    assert re.fullmatch(r"\d+\.\d dB over 1 clip", found.headline())
    assert (
        report(tmp_path / "dense", tmp_path / "psa", metrics=[]).headline() == "1 clip side by side"
    )


def test_a_film_that_browsers_cannot_play_is_encoded_again(root: Path) -> None:
    film = read_film(root / "dense" / f"{example.clip_name(0)}.mkv")
    assert film.kind == "video/mp4"
    assert (film.frames, film.height, film.width, film.fps) == (13, 96, 160, 12)
    assert film.data[4:8] == b"ftyp"


def test_names_are_taken_as_given(root: Path) -> None:
    found = report(root / "dense", root / "psa", names=["<before>", "after"], metrics=[])
    page = render_page(found)
    assert "after against &lt;before&gt;" in page
    with pytest.raises(InputError, match="2 runs, and 1 names"):
        report(root / "dense", root / "psa", names=["one"])
    with pytest.raises(InputError, match="must differ"):
        report(root / "dense", root / "psa", names=["one", "one"])


def test_the_same_input_gives_the_same_page(root: Path) -> None:
    assert compare_page([root], []) == compare_page([root], [])


def test_seconds_of_first_clips_are_apart(tmp_path: Path) -> None:
    """The sparse run's first clip took a minute: it compiled."""
    example.make_run(tmp_path / "dense", clips=3, pace=10.0, cold=(0,))
    example.make_run(
        tmp_path / "psa", clips=3, pace=5.0, method="psa", budget=0.3, cold=(0, 2)
    )  # fmt: skip
    found = report(tmp_path / "dense", tmp_path / "psa", metrics=[])
    dense, psa = found.rows()
    assert dense.seconds is not None
    assert dense.seconds.mean == pytest.approx(np.mean([10.3, 10.6]))
    assert psa.seconds is not None
    assert psa.seconds.mean == pytest.approx(5.15)
    assert psa.speed_up is not None
    assert (psa.speed_up.mean, psa.speed_up.n) == (pytest.approx(2), 1)
    assert found.rows([found.clips[0]])[1].speed_up is None
    assert found.notes == (
        "A first clip takes its seconds with loading and compilation, so they are in no mean and "
        "no speed-up (here: dense, psa 0.3).",
    )


def test_first_clips_alone_give_no_speed_up(tmp_path: Path) -> None:
    example.make_run(tmp_path / "dense", clips=1, pace=10.0, cold=(0,))
    example.make_run(tmp_path / "psa", clips=1, pace=5.0, method="psa", budget=0.3)
    found = report(tmp_path / "dense", tmp_path / "psa", metrics=[])
    dense, psa = found.rows()
    assert dense.seconds is not None
    assert dense.seconds.mean == 10  # named, not hidden
    assert (psa.speed_up, psa.speed_up_transformer) == (None, None)
    assert "All seconds of dense are those of a first clip" in found.notes[0]
    assert "faster" not in found.headline()
