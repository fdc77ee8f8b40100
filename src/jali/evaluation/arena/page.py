"""The page of an arena: boards, the plot, and the clips of every row side by side."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from importlib import resources
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
from jali.evaluation.arena.record import DENSE
from jali.evaluation.arena.studio import film_of
from jali.evaluation.quality.measure import describe
from jali.evaluation.report.film import read_film
from jali.evaluation.report.template import render

PAGE = "arena.html"
# All films together: a page that a browser opens at once.
MOST_FILMS = 24 * 2**20


def render_page(board: Leaderboard, folder: Path, picture: Path | None = None) -> str:
    """One self-contained HTML page; films of the first prompts, as many as it has room for."""
    films, shown = _films(board, folder)
    results = board.results
    style = resources.files("jali.evaluation.report") / "page.css"
    return render(
        "jali.evaluation.arena",
        "page.html",
        style=_Raw(style.read_text("utf-8")),
        board=board,
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


class _Raw(str):
    """Text that is HTML already: our own style."""

    __slots__ = ()

    def __html__(self) -> str:
        return self


def _headline(board: Leaderboard) -> tuple[str, str]:
    """What is said loudly, and the rest: who is first at the least total."""
    scored = [one for one in board.boards if one.total is not None]
    if not scored:
        return f"{len(board.results.rows())} rows", " side by side"
    least = min(scored, key=lambda one: one.total or 0)
    first = least.standings[0]
    return f"{first.psnr:.1f} dB", f" at {least.total:g} of the work, by {first.row.label}"


def _films(board: Leaderboard, folder: Path) -> tuple[dict[str, str], list[int]]:
    """Films by RUN/NUMBER as data, and the numbers of the prompts that are shown."""
    runs = [DENSE, *(s.row.folder for one in board.boards for s in one.standings)]
    found: dict[str, str] = {}
    shown: list[int] = []
    room = MOST_FILMS
    for number, prompt in enumerate(board.results.prompts):
        paths = {run: film_of(folder, run, number, prompt) for run in runs}
        there = {run: path for run, path in paths.items() if path is not None}
        room -= sum(path.stat().st_size for path in there.values())
        if DENSE not in there or (shown and room < 0):
            break
        found |= {f"{run}/{number}": read_film(path).uri for run, path in there.items()}
        shown.append(number)
    return found, shown


def _data(board: Leaderboard, shown: list[int], films: Mapping[str, str]) -> dict[str, Any]:
    """What the script needs: for every board its runs in their order, with each clip's PSNR."""
    ids = {name: f"film-{number}" for number, name in enumerate(films)}
    return {
        "clips": [{"prompt": board.results.prompts[number]} for number in shown],
        "boards": [
            {
                "title": one.title,
                "runs": [
                    {"name": DENSE, "films": [ids.get(f"{DENSE}/{n}") for n in shown], "psnr": []},
                    *(_run_data(board, s, shown, ids) for s in one.standings),
                ],
            }
            for one in board.boards
        ],
    }


def _run_data(
    board: Leaderboard, standing: Standing, shown: list[int], ids: Mapping[str, str]
) -> dict[str, Any]:
    row = standing.row
    by_clip: dict[int, float] = {}
    for first, record in board.results.of(row).items():
        by_clip |= dict(zip(board.results.group(first), record.metrics["psnr"], strict=True))
    return {
        "name": row.label,
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
