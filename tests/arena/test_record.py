"""`arena.json` from elsewhere: damaged, hostile, or of another kind, each refused in a sentence."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jali.error import InputError
from jali.evaluation.arena.leaderboard import Leaderboard
from jali.evaluation.arena.record import read_results
from jali.evaluation.arena.write import write_pages


@pytest.fixture
def told(made: Path) -> dict[str, Any]:
    return dict(json.loads((made / "arena.json").read_text(encoding="utf-8")))


def read(told: Any, folder: Path) -> Any:
    (folder / "arena.json").write_text(json.dumps(told), encoding="utf-8")
    return read_results(folder)


def test_what_was_written_is_read_back(made: Path, told: dict[str, Any], tmp_path: Path) -> None:
    assert read(told, tmp_path) == read_results(made)
    # What is derived is not believed.
    assert read(told | {"leaderboard": {"boards": "mine"}}, tmp_path) == read_results(made)


def put(*path: Any) -> Callable[[dict[str, Any]], None]:
    """Sets a value at a place of the file."""
    *way, last, value = path

    def change(told: dict[str, Any]) -> None:
        for step in way:
            told = told[step]
        told[last] = value

    return change


DAMAGE = {
    "a method nobody has": put("records", 0, "method", "nothing"),
    "a method that would run code": put("records", 0, "method", "rd:samples=__import__('os')"),
    "a schedule that is none": put("records", 0, "schedule", "grade"),
    "a total above 1": put("records", 0, "total", 1.4),
    "an achieved share below 0": put("records", 0, "achieved", -0.1),
    "seconds of 0": put("records", 0, "seconds", 0),
    "a metric nobody measures": put("records", 0, "metrics", {"psnr": [1, 2], "fun": [1, 2]}),
    "no psnr": put("records", 0, "metrics", {"ssim": [1, 2]}),
    "too few numbers": put("records", 0, "metrics", {"psnr": [30.0]}),
    "words for numbers": put("records", 0, "metrics", {"psnr": ["a", "b"]}),
    "a group that is none": put("records", 0, "first", 1),
    "a group below 0": put("records", 0, "first", -2),
    "a batch of 0": put("batch", 0),
    "dense without seconds": put("dense", 0, "seconds", []),
    "prompts that are a text": put("prompts", "a red ball"),
    "records that are a mapping": put("records", {}),
    "a key of a record nobody knows": put("records", 0, "place", 1),
    "another version": put("version", 2),
    "another kind": put("kind", "jali-run"),
}


@pytest.mark.parametrize("change", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_refused_in_a_sentence(
    change: Callable[[dict[str, Any]], None], told: dict[str, Any], tmp_path: Path
) -> None:
    changed = copy.deepcopy(told)
    change(changed)
    with pytest.raises(InputError) as caught:
        read(changed, tmp_path)
    assert str(tmp_path / "arena.json") in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700


def test_the_same_record_twice_is_refused(told: dict[str, Any], tmp_path: Path) -> None:
    told["records"].append(told["records"][0])
    with pytest.raises(InputError, match="two records of the same prompts"):
        read(told, tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"kind": 1}', '{"a": NaN}', "[" * 500])
def test_what_is_no_arena_is_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "arena.json").write_text(text, encoding="utf-8")
    with pytest.raises(InputError, match=r"arena\.json"):
        read_results(tmp_path)


def test_a_folder_without_one_says_so(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="holds no arena"):
        Leaderboard.read(tmp_path)


def test_words_of_a_file_are_words_on_the_page(told: dict[str, Any], tmp_path: Path) -> None:
    evil = "</script><script>alert(1)</script>"
    told["prompts"] = [evil, "b", "c"]
    told["machine"] = {"device": f"<img src=x onerror=alert(1)>{evil}"}
    told["failed"] = {"rd": evil}
    results = read(told, tmp_path)
    write_pages(tmp_path, Leaderboard.of(results))
    page = (tmp_path / "arena.html").read_text(encoding="utf-8")
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page
