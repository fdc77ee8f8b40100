"""The page: everything inside one file, every row on it, and clips of the total that is chosen."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_arena import THRESHOLD

from jali.evaluation.arena.leaderboard import Leaderboard
from jali.evaluation.arena.page import render_page
from jali.evaluation.arena.pareto import is_on_front

CHROMIUM = "/usr/bin/chromium"


def test_it_says_all_and_needs_nothing_else(made: Path) -> None:
    page, board = (made / "arena.html").read_text(encoding="utf-8"), Leaderboard.read(made)
    for one in board.boards:
        assert one.title in page
        for standing in one.standings:
            assert standing.row.label.replace("'", "&#39;") in page
            assert f"{standing.achieved:.3f}" in page
    for sentence in board.sentences():
        assert sentence.replace("'", "&#39;").replace('"', "&#34;") in page
    # Five rows and dense, three prompts; nothing is loaded from anywhere.
    assert page.count("data:video/mp4;base64,") == 18
    assert not re.findall(r"(?:src|href)=\"(?!data:|#)", page)
    assert "http" not in re.sub(r"data:[^\"<]*|http://www.w3.org/2000/svg", "", page)


def test_films_beyond_the_room_of_a_page_stay_in_their_folder(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jali.evaluation.arena import page

    monkeypatch.setattr(page, "MOST_FILMS", 1)
    text = render_page(Leaderboard.read(made), made)
    assert text.count("data:video/mp4;base64,") == 6
    assert "The first 1 of 3 prompts" in text


def test_an_arena_whose_clips_are_gone_still_has_its_numbers(made: Path, tmp_path: Path) -> None:
    text = render_page(Leaderboard.read(made), tmp_path)
    assert "data:video" not in text
    assert "0.71 of all work" in text


def test_the_plot_has_a_line_for_every_method(made: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (made / "pareto.svg").stat().st_size > 5000
    assert "data:image/svg+xml;base64," in (made / "arena.html").read_text(encoding="utf-8")


def test_what_is_on_the_front() -> None:
    points = [(1.0, 5.0), (2.0, 4.0), (1.5, 4.0), (2.0, 4.0), (0.5, 5.0)]
    assert [is_on_front(point, points) for point in points] == [True, True, False, True, False]


@pytest.fixture(scope="module")
def tab(made: Path) -> Iterator[Any]:
    if not Path(CHROMIUM).exists() or "playwright" not in sys.modules:
        pytest.importorskip("playwright")
    if not Path(CHROMIUM).exists():
        pytest.skip(f"there is no {CHROMIUM}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.complaints = []
        page.on("pageerror", lambda error: page.complaints.append(str(error)))
        page.on("console", lambda said: page.complaints.append(said.text))
        page.goto(f"file://{made / 'arena.html'}")
        yield page
        assert page.complaints == []
        browser.close()


def test_clips_follow_the_chosen_total_and_prompt(tab: Any) -> None:
    def names() -> list[str]:
        return [found.inner_text() for found in tab.query_selector_all("#stage .who")]

    assert len(names()) == 5
    assert names()[0] == "dense"
    tab.wait_for_function(
        "[...document.querySelectorAll('#stage video')].every(v => v.readyState >= 2)"
    )
    tab.click("#totals button:nth-child(2)")
    assert names() == ["dense", THRESHOLD]
    tab.click("#next")
    assert tab.inner_text("#prompt-text") == "a blue cube"
    assert "clip 2 of 3" in tab.inner_text("#clip-name")
    tab.click("#play")
    assert tab.get_attribute("#play", "aria-label") == "Pause"
    assert tab.evaluate("document.documentElement.scrollWidth <= innerWidth")
