"""One table from many results: the same bytes every time, nothing twice, nothing silently gone."""

from __future__ import annotations

import csv
import io
import json
import shutil
import sys
import types
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fake
import pytest

from jali.cli.experiment.table import show_table
from jali.experiments.collect import collect, write
from jali.experiments.experiment import Experiment
from jali.experiments.job import run_experiment
from jali.experiments.page import pareto
from jali.experiments.results import Results
from jali.experiments.track import check_tracker

E = Experiment(tag="b", model="nano", height=128, width=128, num_frames=33, steps=4, budget=0.5)
TAGS = ("b", "a", "c")


@pytest.fixture
def done(results: Results) -> Results:
    for tag, budget in zip(TAGS, (0.5, 0.3, 0.7), strict=True):
        run_experiment(replace(E, tag=tag, budget=budget), results, fake.stages())
    return results


def test_the_same_files_give_the_same_bytes(done: Results, tmp_path: Path) -> None:
    first = [path.read_bytes() for path in write(collect(done, TAGS), tmp_path / "one")]
    again = [path.read_bytes() for path in write(collect(done, reversed(TAGS)), tmp_path / "two")]
    assert first == again
    moved = Results(tmp_path / "elsewhere", tmp_path / "logs")
    shutil.copytree(done.root, moved.root)
    assert [p.read_bytes() for p in write(collect(moved, TAGS), tmp_path / "three")] == first


def test_rows_are_sorted_and_complete(done: Results) -> None:
    table = collect(done, [*TAGS, "a"])
    assert [row["tag"] for row in table.rows] == ["a", "b", "c"]
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    assert [float(row["quality.psnr.mean"]) for row in rows] == [23.0, 25.0, 27.0]
    assert [float(row["speedup"]) for row in rows] == [2 / 1.3, 2 / 1.5, 2 / 1.7]
    assert json.loads(table.to_json())["rows"][1]["budget"] == 0.5


def test_a_speed_up_stands_beside_the_cost_of_the_same_run(
    done: Results, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was timed has fewer steps than the clips that are judged, and may cost another share."""
    table = collect(done, ["b"])
    (row,) = table.rows
    assert (row["steps"], row["cost"]) == (4, 0.5)
    assert (row["bench_steps"], row["bench_cost"]) == (2, 0.75)
    assert "<th>timed steps</th><th>timed cost</th>" in table.to_html()
    monkeypatch.setenv("COLUMNS", "200")
    show_table(table)
    head = capsys.readouterr().out.splitlines()[1].split("  ")
    assert [h.strip() for h in head if h.strip()][2:6] == [
        "asked", "cost", "timed steps", "timed cost",
    ]  # fmt: skip


@pytest.mark.parametrize("damage", ["", "{", '{"rows": [{"variant": "entropy"}]}', "\x00"])
def test_a_damaged_result_is_left_out_and_said(done: Results, damage: str) -> None:
    done.quality("b").write_text(damage)
    table = collect(done, TAGS)
    assert [row["tag"] for row in table.rows] == ["a", "c"]
    assert "quality.json" in table.left_out["b"]
    assert str(done.root) not in table.to_json()


def test_what_is_not_done_is_left_out_and_said(done: Results) -> None:
    fake.trouble(done.root, "d", "quality-1", "raise")
    with pytest.raises(RuntimeError):
        run_experiment(replace(E, tag="d"), done, fake.stages())
    table = collect(done, [*TAGS, "d"])
    assert len(table.rows) == 3
    assert "missing" in table.left_out["d"]


def test_the_front_is_what_nothing_beats() -> None:
    def row(speedup: float | None, psnr: float | None, model: str = "m") -> dict[str, Any]:
        return {"model": model, "speedup": speedup, "quality.psnr.mean": psnr}

    rows = [row(1.5, 30), row(1.4, 29), row(1.2, 35), row(1.5, 30), row(9, 99, "n"), row(None, 1)]
    assert pareto(rows) == {0, 2, 3, 4}


class Page(HTMLParser):
    """Checks that every tag is closed, and remembers what there is."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:  # noqa: ARG002
        self.seen.append(tag)
        if tag not in ("meta", "line", "circle", "polyline"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in ("meta", "line", "circle", "polyline"):
            assert self.open.pop() == tag


def test_the_page_stands_alone(done: Results) -> None:
    text = collect(done, [*TAGS, "nothing"]).to_html()
    page = Page()
    page.feed(text)
    assert page.open == []
    assert page.seen.count("svg") == 1
    assert page.seen.count("tr") == 4
    assert page.seen.count("circle") == 3
    assert page.seen.count("li") == 1 + 1  # one variant, and what was left out
    assert text.count('class="point" tabindex="0"') == 3
    assert "http" not in text
    assert "<script" not in text
    assert "nothing: there is no such experiment" in text


def test_names_are_text_and_not_markup(done: Results) -> None:
    table = collect(done, TAGS)
    rows = tuple({**row, "variant": "<b>x</b>"} for row in table.rows)
    text = replace(table, rows=rows, left_out={"a": "<i>"}).to_html()
    assert "<b>" not in text
    assert "<i>" not in text


def test_an_empty_table_is_a_table() -> None:
    table = collect(Results(Path("/nonexistent"), Path("/nonexistent")), [])
    assert table.rows == ()
    assert table.to_csv().startswith("tag,model,")
    assert "0 sparse runs" in table.to_html()


# Tracking


class Tracker(types.ModuleType):
    def __init__(self, fails: bool = False) -> None:
        super().__init__("trackio")
        self.__spec__ = types.SimpleNamespace(name="trackio")  # type: ignore[assignment]
        self.calls: list[tuple[str, Any]] = []
        self.fails = fails

    def init(self, **facts: Any) -> None:
        self.calls.append(("init", facts))

    def log(self, row: dict[str, Any]) -> None:
        if self.fails:
            raise ConnectionError("nobody there")
        self.calls.append(("log", row))

    def finish(self) -> None:
        self.calls.append(("finish", None))


def test_rows_also_go_to_a_tracker(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Tracker()
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    check_tracker("trackio")
    run_experiment(E, results, fake.stages(), track="trackio")
    (first, facts), (second, row), (third, _) = tracker.calls
    assert (first, second, third) == ("init", "log", "finish")
    assert facts["name"] == "b"
    assert facts["config"]["budget"] == 0.5
    assert row["quality.psnr.mean"] == 25.0


def test_a_tracker_that_fails_costs_no_results(
    results: Results, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tracker = Tracker(fails=True)
    monkeypatch.setitem(sys.modules, "trackio", tracker)
    run_experiment(E, results, fake.stages(), track="trackio")
    assert "did not reach trackio: nobody there" in caplog.text
    assert tracker.calls[-1][0] == "finish"
    assert collect(results, ["b"]).left_out == {}


def test_a_tracker_that_is_not_there_is_refused_first() -> None:
    with pytest.raises(ValueError, match="--track is trackio or wandb, got 'mlflow'"):
        check_tracker("mlflow")
    with pytest.raises(ValueError, match="pip install wandb"):
        check_tracker("wandb")
