"""The page of an arena: boards, the plot, and the clips of every row side by side."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jali.evaluation.arena.leaderboard import (
    DIGITS,
    Board,
    Leaderboard,
    Standing,
    differs,
    spread,
)
from jali.evaluation.arena.record import DENSE, Results
from jali.evaluation.arena.row import Row
from jali.evaluation.arena.studio import film_of
from jali.evaluation.quality.measure import describe
from jali.evaluation.report.film import read_film
from jali.evaluation.report.template import render

PAGE = "arena.html"
# All films together: a page that a browser opens at once.
MOST_FILMS = 24 * 2**20


def render_page(board: Leaderboard, folder: Path, picture: Path | None = None) -> str:
    """One self-contained HTML page; films of the first prompts, as many as it has room for."""
    results = board.results
    films, shown = films_of(results, [s.row for one in board.boards for s in one.standings], folder)
    return render(
        "jali.evaluation.arena",
        "page.html",
        board=board,
        results=results,
        settings=results.settings,
        device=str(results.machine.get("device") or "an unknown machine"),
        metrics=[(name, describe(name)) for name in board.metrics],
        headline=_headline(board),
        picture=None if picture is None else base64.b64encode(picture.read_bytes()).decode(),
        films=films,
        data=_data(board, shown, films),
        spread=spread,
        digits=DIGITS,
        differs=differs,
        marks=marks,
    )


def _headline(board: Leaderboard) -> tuple[str, str]:
    """What is said loudly, and the rest: who is first at the least total."""
    scored = [one for one in board.boards if one.total is not None]
    if not scored:
        return f"{len(board.results.rows())} rows", " side by side"
    least = min(scored, key=lambda one: one.total or 0)
    first = least.standings[0]
    return f"{first.psnr:.1f} dB", f" at {least.total:g} of the work, by {first.row.label}"


def films_of(
    results: Results, rows: Sequence[Row], folder: Path
) -> tuple[dict[str, str], list[int]]:
    """Films by RUN/NUMBER as data, and the numbers of the prompts that are shown."""
    runs = [DENSE, *(row.folder for row in rows)]
    found: dict[str, str] = {}
    shown: list[int] = []
    room = MOST_FILMS
    for number, prompt in enumerate(results.prompts):
        paths = {run: film_of(folder, run, number, prompt) for run in runs}
        there = {run: path for run, path in paths.items() if path is not None}
        room -= sum(path.stat().st_size for path in there.values())
        if DENSE not in there or (shown and room < 0):
            break
        found |= {f"{run}/{number}": read_film(path).uri for run, path in there.items()}
        shown.append(number)
    return found, shown


def _data(board: Leaderboard, shown: list[int], films: Mapping[str, str]) -> dict[str, Any]:
    own = {one.title: [s.row for s in one.standings] for one in board.boards}
    return page_data(board.results, own, shown, films)


def page_data(
    results: Results,
    boards: Mapping[str, Sequence[Row]],
    shown: Sequence[int],
    films: Mapping[str, str],
    label: Callable[[Row], str] = lambda row: row.label,
) -> dict[str, Any]:
    """What the script needs: for every board its runs in their order, with each clip's PSNR."""
    ids = {name: f"film-{number}" for number, name in enumerate(films)}
    dense = {"name": DENSE, "films": [ids.get(f"{DENSE}/{n}") for n in shown], "psnr": []}
    return {
        "clips": [{"prompt": results.prompts[number]} for number in shown],
        "boards": [
            {
                "title": title,
                "runs": [dense, *(_run_data(results, row, shown, ids, label) for row in rows)],
            }
            for title, rows in boards.items()
        ],
    }


def _run_data(
    results: Results,
    row: Row,
    shown: Sequence[int],
    ids: Mapping[str, str],
    label: Callable[[Row], str],
) -> dict[str, Any]:
    by_clip: dict[int, float] = {}
    for first, record in results.of(row).items():
        by_clip |= dict(zip(results.group(first), record.metrics["psnr"], strict=True))
    return {
        "name": label(row),
        "films": [ids.get(f"{row.folder}/{number}") for number in shown],
        "psnr": [by_clip.get(number) for number in shown],
    }


def marks(board: Board, standing: Standing) -> list[str]:
    """In words, what to know of a row beside its numbers."""
    said = []
    if standing.is_off:
        said.append(f"cost {standing.achieved:.3f}, not {board.total:g}")
    if standing.loses and board.control is not None:
        said.append(f"loses to {board.control.row.label}")
    if standing.is_open and board.control is not None:
        said.append(f"not told apart from {board.control.row.label}")
    if standing.is_tied and board.tells_apart:
        said.append("not told apart from the first")
    if standing.row.is_control:
        said.append("control")
    return said
