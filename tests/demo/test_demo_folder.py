"""Where a demo goes: nothing that others wrote is touched, and nothing is there by halves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jali.evaluation.demo.folder import check_folder, replace_demo, write_facts


def write(folder: Path, **files: str) -> None:
    with replace_demo(folder) as part:
        for name, text in files.items():
            (part / name).write_text(text)
        (part / "run").mkdir()
        (part / "run" / "clip").write_text("film")
        write_facts(part, {"found": 1})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_folder_an_empty_one_and_an_earlier_demo(tmp_path: Path) -> None:
    write(tmp_path / "a" / "b", one="1")
    assert names(tmp_path / "a" / "b") == ["demo.json", "one", "run"]
    assert json.loads((tmp_path / "a" / "b" / "demo.json").read_text()) == {
        "kind": "jali-demo", "version": 1, "found": 1, "files": ["demo.json", "one", "run"],
    }  # fmt: skip
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", one="1")
    write(tmp_path / "empty", two="2")
    assert names(tmp_path / "empty") == ["demo.json", "run", "two"]


@pytest.mark.parametrize(
    "text",
    [
        None,
        "not json",
        "[]",
        '{"files": ["demo.json", "thesis.txt"]}',
        '{"kind": "jali-demo", "files": ["demo.json", "../thesis.txt"]}',
    ],
)
def test_folders_of_others_are_left_alone(text: str | None, tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "thesis.txt").write_text("mine")
    if text is not None:
        (folder / "demo.json").write_text(text)
    before = names(folder)
    with pytest.raises(ValueError, match=r"thesis\.txt, which no demo wrote"):
        write(folder, one="1")
    assert names(folder) == before


def test_what_people_put_into_a_demo_is_not_replaced(tmp_path: Path) -> None:
    write(tmp_path / "out", one="1")
    (tmp_path / "out" / "notes").write_text("mine")
    with pytest.raises(ValueError, match="holds notes, which no demo wrote"):
        write(tmp_path / "out", two="2")
    assert names(tmp_path / "out") == ["demo.json", "notes", "one", "run"]


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(ValueError, match="is a file, and the demo needs a folder"):
        check_folder(tmp_path / "out")


@pytest.mark.parametrize("error", [KeyboardInterrupt, OSError, ValueError])
def test_any_way_out_leaves_nothing_new(error: type[BaseException], tmp_path: Path) -> None:
    def fail(folder: Path) -> None:
        with replace_demo(folder) as part:
            (part / "two").write_text("2")
            raise error

    write(tmp_path / "old", one="1")
    for folder in (tmp_path / "new" / "deep", tmp_path / "old"):
        with pytest.raises(error):
            fail(folder)
    assert names(tmp_path) == ["old"]
    assert names(tmp_path / "old") == ["demo.json", "one", "run"]


def test_the_rest_of_a_killed_process_is_cleared(tmp_path: Path) -> None:
    (tmp_path / "out" / ".part" / "dense").mkdir(parents=True)
    (tmp_path / "out" / ".part" / "dense" / "half").write_text("")
    write(tmp_path / "out", one="1")
    assert names(tmp_path / "out") == ["demo.json", "one", "run"]


def test_two_at_once_are_refused(tmp_path: Path) -> None:
    with replace_demo(tmp_path / "out") as part:
        (part / "one").write_text("1")
        with pytest.raises(ValueError, match="another process is writing"):
            write(tmp_path / "out", two="2")
        write_facts(part, {})
    assert names(tmp_path / "out") == ["demo.json", "one"]
