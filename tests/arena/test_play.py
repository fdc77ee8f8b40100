"""The arena end to end on a tiny model: equal totals, what it keeps, and going on after a cut."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_arena import BLOCKS, METHODS, PROMPTS, THRESHOLD

from jali.error import InputError
from jali.evaluation.arena.leaderboard import Leaderboard
from jali.evaluation.arena.record import Results, read_results
from jali.evaluation.arena.studio import Studio
from jali.generation import read_run

Play = Callable[..., Any]


@pytest.fixture(autouse=True)
def no_weights(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("JALI_WEIGHTS", str(tmp_path))  # no LPIPS: it takes longer than all


def facts(results: Results) -> list[tuple[Any, ...]]:
    """Everything that does not depend on the clock."""
    return [(r.row, r.first, r.asked, r.achieved, r.planning, r.metrics) for r in results.records]


def test_every_row_has_the_same_achieved_total(made: Path) -> None:
    results = read_results(made)
    rows = {str(row): results.of(row) for row in results.rows()}
    assert len(rows) == 5  # four at the total, one as published
    for name, records in rows.items():
        assert sorted(records) == [0, 2], name  # a group of two prompts, and the last one
        assert [len(records[first].metrics["psnr"]) for first in (0, 2)] == [2, 1]
        # What was learned on the first prompts is asked of the later ones.
        assert records[0].asked == records[2].asked
    scheduled = [r for r in results.records if r.total is not None]
    assert {r.total for r in scheduled} == {0.71}
    for record in scheduled:
        assert record.achieved == pytest.approx(0.71, abs=0.005), record
    # Groups are the outer loop.
    assert [r.first for r in results.records] == sorted(r.first for r in results.records)


def test_a_method_without_a_budget_has_one_more_row_as_published(made: Path) -> None:
    board = Leaderboard.read(made)
    (published,) = [one for one in board.boards if one.total is None]
    (standing,) = published.standings
    assert standing.row.label == THRESHOLD
    assert standing.place == 0
    assert standing.behind is None
    assert 0 < standing.achieved < 1
    run = read_run(made / "runs" / standing.row.folder)
    schedule = run.settings.attention["schedule"]
    assert (schedule["dense_steps"], schedule["dense_layers"]) == (0, [])
    assert run.settings.attention["options"]["budget"] is None


def test_what_it_leaves_is_whole(made: Path) -> None:
    names = {path.name for path in made.iterdir()}
    assert {"arena.json", "arena.html", "runs"} <= names <= {
        "arena.json", "arena.html", "runs", "pareto.svg",
    }  # fmt: skip
    told = json.loads((made / "arena.json").read_text())
    assert told["leaderboard"]["complete"]
    assert told["unavailable"].keys() == {"lpips"}
    for folder in (made / "runs").iterdir():
        run = read_run(folder)
        assert run.complete
        assert [clip.prompt for clip in run.clips] == list(PROMPTS)
    dense = read_run(made / "runs" / "dense")
    assert all(clip.cost == 1 for clip in dense.clips)
    assert not list(made.rglob(".*"))


def test_times_are_those_of_the_same_session_between_two_dense_runs(made: Path) -> None:
    results = read_results(made)
    assert {times.session for times in results.dense} == {0}
    assert all(len(times.seconds) == 2 for times in results.dense)
    for board in Leaderboard.read(made).boards:
        for standing in board.standings:
            found = standing.speed_up
            assert found is not None
            assert len(found.values) == 4  # of two groups, to each of their dense runs
            assert found.mean == pytest.approx(sum(found.values) / 4)


def test_one_that_is_finished_makes_nothing_again(
    made: Path, play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "again"))
    monkeypatch.setattr(Studio, "make", lambda *_: 1 / 0)
    board = play(folder)
    assert board.is_complete
    assert facts(board.results) == facts(read_results(made))


def test_a_cut_run_goes_on_and_ends_the_same(
    made: Path, play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Cut between two rows, then in the middle of one whose clips nobody has noted yet."""
    folder, kept = tmp_path / "cut", []
    keep = Studio.keep

    def cut(self: Studio, name: str, *rest: Any) -> None:
        if len(kept) == 3:
            kept.append("a cut")
            raise KeyboardInterrupt
        keep(self, name, *rest)
        kept.append(name)
        if len(kept) == 6:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Studio, "keep", cut)
        for records in (2, 3):
            with pytest.raises(KeyboardInterrupt):
                play(folder)
            assert len(read_results(folder).records) == records
            # What there is compares its rows on the same prompts.
            (board,) = Leaderboard.read(folder).boards
            assert (board.prompts, len(board.standings)) == (2, records)
    board = play(folder)
    assert board.is_complete
    assert facts(board.results) == facts(read_results(made))
    assert {record.session for record in board.results.records} == {0, 1, 2}
    for run in (folder / "runs").iterdir():
        assert read_run(run).complete


def test_more_methods_and_totals_join_what_is_there(made: Path, play: Play, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "more"))
    board = play(folder, totals=[0.85], methods=[f"entropy{BLOCKS},samples=2", *METHODS[2:]])
    assert [one.total for one in board.boards] == [0.85, 0.71, None]
    names = [s.row.method.name for s in board.boards[0].standings]
    assert sorted(names) == ["entropy", "local", "random"]
    assert facts(board.results)[: len(facts(read_results(made)))] == facts(read_results(made))


def test_time_that_is_over_ends_it_with_what_is_there(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from jali.evaluation.arena import run

    made: list[str] = []
    make = run.Game._row

    def slow(self: Any, row: Any, *rest: Any) -> None:
        make(self, row, *rest)
        made.append(str(row))
        self.stop = run.time.monotonic() if len(made) == 2 else self.stop

    monkeypatch.setattr(run.Game, "_row", slow)
    board = play(tmp_path / "short", minutes=60)
    assert len(made) == 2
    assert not board.is_complete
    assert len(board.missing) == 3
    assert "Not made yet: " in str(board)
    assert (tmp_path / "short" / "arena.html").exists()
    assert not play(tmp_path / "none", minutes=0).boards
    assert not (tmp_path / "none").exists()


def test_a_row_that_fails_is_told_and_the_others_are_made(
    play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from jali.methods import Entropy

    folder, few = tmp_path / "fails", {"prompts": PROMPTS[:1], "methods": METHODS[::2]}
    with monkeypatch.context() as patched:
        patched.setattr(Entropy, "score", lambda *_: 1 / 0)
        board = play(folder, **few)
    (failed,) = board.results.failed.items()
    assert failed == (f"{board.missing[0]}", "ZeroDivisionError: division by zero")
    assert [s.row.method.name for s in board.boards[0].standings] != []
    assert any("failed and is left out" in sentence for sentence in board.sentences())
    board = play(folder, **few)
    assert not board.results.failed
    assert board.is_complete


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"size": {"steps": 4}}, "is another arena: steps is 3, not 4"),
        ({"size": {"seed": 1}}, "is another arena: seed is 0, not 1"),
        ({"prompts": PROMPTS[:2]}, "it has 3 prompts, and here are 2"),
        ({"prompts": ("a red ball", "a dog", "x")}, "prompt 1 is 'a blue cube', not 'a dog'"),
        ({"batch": 3}, "batch is 2, not 3"),
    ],
)
def test_another_arena_is_refused(
    changes: dict[str, Any], said: str, made: Path, play: Play
) -> None:
    before = (made / "arena.json").read_bytes()
    with pytest.raises(InputError, match="Choose another folder") as caught:
        play(made, **changes)
    assert said in str(caught.value)
    assert (made / "arena.json").read_bytes() == before


def test_other_versions_go_on_and_say_so(
    made: Path, play: Play, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "old"))
    told = json.loads((folder / "arena.json").read_text())
    told["versions"]["torch"] = "1.0"
    (folder / "arena.json").write_text(json.dumps(told))
    assert play(folder).is_complete
    assert "goes on with another torch than before" in caplog.text


def test_clips_that_were_taken_away_leave_the_numbers(
    made: Path, play: Play, tmp_path: Path
) -> None:
    """An arena goes on from its `arena.json` alone."""
    folder = tmp_path / "numbers"
    folder.mkdir()
    shutil.copy(made / "arena.json", folder)
    board = play(folder, methods=[*METHODS, f"entropy{BLOCKS},samples=2"])
    assert board.is_complete
    assert facts(board.results)[: len(facts(read_results(made)))] == facts(read_results(made))
    new = [row for row in board.results.rows() if row not in read_results(made).rows()]
    assert sorted(path.name for path in (folder / "runs").iterdir()) == sorted(
        ["dense", *(row.folder for row in new)]
    )


def test_a_folder_of_something_else_is_refused(play: Play, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match=r"holds notes\.txt and no arena\.json, so it is no arena"):
        play(tmp_path)
    with pytest.raises(InputError, match="is a file, and an arena needs a folder"):
        play(tmp_path / "notes.txt")
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": "entrpy"}, "unknown method 'entrpy'; did you mean 'entropy'?"),
        ({"methods": "dense"}, "unknown method 'dense'"),
        ({"methods": ""}, "name at least one"),
        ({"methods": "rd:sample=4"}, "no key 'sample'; did you mean 'samples'?"),
        ({"schedule": "grade"}, "a schedule is one of"),
        ({"totals": [0.1], "schedule": "esa"}, "a total of 0.1 cannot be reached in 3 steps"),
        # Layer 0 counts too, but how many there are only the model says.
        ({"totals": [0.62], "schedule": "esa"}, "a total of 0.62 cannot be reached in 3 steps"),
        ({"totals": []}, "at least one total"),
        ({"totals": [1.5]}, "total must be in [0, 1], got 1.5"),
        ({"prompts": []}, "at least one prompt"),
        ({"prompts": [" "]}, "a prompt is empty"),
        ({"batch": 0}, "batch must be at least 1, got 0"),
    ],
)
def test_what_cannot_be_is_said_before_anything_slow(
    changes: dict[str, Any], said: str, play: Play, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(Studio, "make", lambda *_: 1 / 0)
    with pytest.raises((ValueError, TypeError)) as caught:
        play(tmp_path / "a", **changes)
    assert said in str(caught.value)
    assert not (tmp_path / "a").exists()
