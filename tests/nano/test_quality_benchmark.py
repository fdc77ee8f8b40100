"""The benchmark of quality per total work, end to end on a tiny clip, and how its rows are told."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from benchmarks import nano_quality
from benchmarks.nano_quality import in_time, main
from benchmarks.row_spec import parse_rows, read_rows
from jali.error import InputError
from jali.planning.curve import FLOOR

TINY = ("--device", "cpu", "--prompts", "2", "--batch", "1", "--width", "64", "--frames", "9")
ROWS = ("entropy:q_block=32,k_block=32 exponential .7 2", "entropy:q_block=32,k_block=32 esa .2 2")


def run(output: Path, *more: str, height: int = 64) -> int:
    return main(["--output", str(output), *TINY, "--height", str(height), *more])


@pytest.fixture(scope="module")
def lpips() -> tuple[str, ...]:
    from jali.evaluation.quality import weights

    try:
        weights.find("alex")
    except InputError:
        return ("--without-lpips",)
    return ()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, lpips: tuple[str, ...]) -> Path:
    output = tmp_path_factory.mktemp("quality") / "rows.json"
    plan = output.with_name("plan.txt")
    plan.write_text("\n".join(("# what matters most comes first", *ROWS)), encoding="utf-8")
    assert run(output, *lpips, "--from-file", str(plan)) == 0
    return output


def rows(path: Path) -> list[dict[str, Any]]:
    return list(json.loads(path.read_text(encoding="utf-8"))["rows"])


def test_a_row_has_all_that_a_table_needs(made: Path, lpips: tuple[str, ...]) -> None:
    row, _ = rows(made)
    assert (row["method"], row["schedule"]) == ("entropy:k_block=32,q_block=32", "exponential")
    assert (row["total"], row["steps"], row["backends"]) == (0.7, 2, ["torch"])
    # Of all tries the nearest; a clip of 6 × 6 blocks cannot be had nearer.
    assert row["achieved"] == row["tries"][0][1] == pytest.approx(0.7, abs=0.02)
    assert 1 < len(row["tries"]) <= 3
    assert min(abs(got - 0.7) for _, got in row["tries"]) == abs(row["achieved"] - 0.7)
    # Four samples of 32 rows look at all keys, in one of two steps: half of the product alone.
    assert row["planning"] == pytest.approx(0.5 * 4 / 32 / 2)
    metrics = ["psnr", "ssim"] + ([] if lpips else ["lpips"])
    for name in metrics:
        assert row[name] == pytest.approx(sum(row["clips"][name]) / 2)
    assert 20 < row["psnr"] < 90
    assert set(row["judge"]) == {"colour", "shape", "motion", "no_more", "no_less"}
    about = json.loads(made.read_text(encoding="utf-8"))
    assert about["tokens"] == 3 * 8 * 8
    assert set(about["dense"]) == {"2"}
    assert about["dense"]["2"]["by_jali"]["psnr"] > row["psnr"]


def test_a_total_that_cannot_be_is_a_row_that_says_so(made: Path) -> None:
    _, row = rows(made)
    assert row["total"] == 0.2
    assert "cannot be reached in 2 steps" in row["unreachable"]


def test_rows_that_are_there_are_not_made_again(
    made: Path, lpips: tuple[str, ...], monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    def never(*_: object) -> None:
        raise AssertionError("a row was made again")

    before = rows(made)
    with monkeypatch.context() as patched:
        patched.setattr(nano_quality.Studio, "make", never)
        assert run(made, *lpips, *ROWS) == 0
        assert rows(made) == before
        assert "0 of 2 rows to make" in capsys.readouterr().out
        # A row that fails is told and left out, and the others are still made.
        assert run(made, *lpips, "psa exponential .7 2", *ROWS) == 1
    assert "psa exponential 0.7 2: AssertionError" in capsys.readouterr().err
    assert rows(made) == before


@pytest.mark.parametrize(
    ("more", "height", "said"),
    [
        ((), 128, "other size: {'height': 64, 'width': 64, 'num_frames': 9} there"),
        (("--prompts", "3"), 64, "other prompts: 2 of them there, 3"),
        (("--world", "first"), 64, "other world: second there, first here"),
        (("--prompts", "0"), 64, "--prompts must be above 0, got 0"),
        (("cached esa .5 2",), 64, "'cached esa 0.5 2' replays a book: give --book"),
        (("cached:of=rd esa .5 2",), 64, "replays a book: give --rd-book"),
        (("--from-file", "nowhere.txt"), 64, "nowhere.txt cannot be read"),
    ],
)
def test_what_does_not_go_with_a_file_is_refused(
    made: Path, more: tuple[str, ...], height: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = made.read_bytes()
    assert run(made, *more, height=height) == 2
    assert said in capsys.readouterr().err
    assert made.read_bytes() == before


def test_other_weights_and_files_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = json.loads(made.read_text(encoding="utf-8")) | {"weights": "0123"}
    for told, said in ((other, "other weights: 0123 there"), ({"rows": 3}, "is no file of this")):
        path = tmp_path / "other.json"
        path.write_text(json.dumps(told), encoding="utf-8")
        assert run(path) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rd exponential .4 12", "rd exponential 0.4 12"),
        ("rd:samples=4,keep=0.25 esa .40 12", "rd:keep=0.25,samples=4 esa 0.4 12"),
        ("entropy:tail=true linear@.05 .3 30", "entropy:tail=True linear@0.05 0.3 30"),
        ("rd:levels=(8,'mean','skip') 1,.5,.2 .3 30",
         "rd:levels=(8,'mean','skip') 1,0.5,0.2 0.3 30"),
        ("rd:estimate=statistics esa .4 12", "rd:estimate='statistics' esa 0.4 12"),
        (f"psa flat@{FLOOR} 1 2", "psa flat 1 2"),
    ],
)  # fmt: skip
def test_rows_are_written_in_one_way(text: str, said: str) -> None:
    (row,) = parse_rows(text)
    assert str(row) == said
    assert parse_rows(said) == [row]


def test_a_line_may_have_many_rows_and_a_file_remarks() -> None:
    lines = ["# first of all", "rd esa .4,.3 12,30  # the most important", "", "rd esa .3 12"]
    assert [str(row) for row in read_rows(lines)] == [
        "rd esa 0.4 12", "rd esa 0.4 30", "rd esa 0.3 12", "rd esa 0.3 30",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("rd esa .4", "METHOD SCHEDULE TOTAL STEPS"),
        ("rdd esa .4 12", "unknown method 'rdd'; did you mean 'rd'"),
        ("dense esa .4 12", "unknown method 'dense'"),
        ("rd:sample=4 esa .4 12", "no key 'sample'; did you mean 'samples'"),
        ("rd:4 esa .4 12", "options are name=value"),
        ("rd:samples=open() esa .4 12", "options are name=value"),
        ("rd:samples=0 esa .4 12", "samples"),
        ("cached:x=1 esa .4 12", "cached:of=rd one of rd, got 'cached:x=1'"),
        ("rd exponentially .4 12", "a schedule is one of"),
        ("rd exponential@x .4 12", "a schedule is one of"),
        ("rd exponential@2 .4 12", "floor"),
        ("rd 1,0 .4 12", "above 0"),
        ("rd esa 1.4 12", "total must be"),
        ("rd esa nan 12", "total must be"),
        ("rd esa .4 0", "steps are a number above 0"),
        ("rd esa .4 many", "'many' is no number"),
    ],
)
def test_a_row_that_cannot_be_is_refused_in_a_sentence(text: str, said: str) -> None:
    with pytest.raises(InputError, match=re.escape(said)):
        parse_rows(text)


def test_no_row_is_begun_that_would_end_too_late(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = [0.0]
    monkeypatch.setattr(nano_quality, "START", 0.0)
    monkeypatch.setattr(nano_quality.time, "monotonic", lambda: clock[0])
    many = read_rows(["rd esa .5,.4,.3,.2 12", "psa esa .5 30"])
    begun = []
    for row in in_time(many, 60):
        begun.append(str(row))
        clock[0] += 0 if row.total == 0.4 else 12.0  # one that cannot be reached takes no time
    # 36 s are over before the last row, which would take 30.
    assert len(begun) == 4
    assert "1 rows are left" in capsys.readouterr().out
