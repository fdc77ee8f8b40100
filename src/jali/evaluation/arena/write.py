"""What an arena leaves for people and machines: page, plot, and the numbers in `arena.json`."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from jali.clips.source import video_library
from jali.evaluation.arena.leaderboard import Leaderboard, Standing
from jali.evaluation.arena.page import PAGE, render_page
from jali.evaluation.arena.pareto import Line, draw_pareto, is_on_front
from jali.evaluation.report.template import check_installed
from jali.files import write_text

PLOT = "pareto.svg"


def check_pages() -> None:
    """Refuse, before any work, where clips or pages could not be written."""
    video_library()
    check_installed()


def write_pages(folder: Path, board: Leaderboard) -> None:
    """Nothing where nothing was measured."""
    if not board.boards:
        return
    board.results.write(folder, leaderboard=board.to_dict())
    if importlib.util.find_spec("matplotlib") is not None:
        plot(board, folder / PLOT)
    picture = folder / PLOT
    write_text(folder / PAGE, render_page(board, folder, picture if picture.is_file() else None))


def plot(board: Leaderboard, path: Path) -> None:
    """PSNR over all work, attention and planning: a line for every method on every schedule."""
    own = [s for one in board.boards for s in one.standings]
    scheduled = [s for s in own if s.row.total is not None]
    several = len({s.row.spread for s in scheduled}) > 1
    by_name: dict[str, list[Standing]] = {}
    for s in scheduled:
        name = f"{s.row.label}, {s.row.spread}" if several else s.row.label
        by_name.setdefault(name, []).append(s)
    lines = []
    for name, these in sorted(by_name.items(), key=lambda one: -max(s.psnr for s in one[1])):
        these.sort(key=_work)
        points = [(_work(s), s.psnr) for s in these]
        words = [f"{s.row.total:g}" for s in these]
        lines.append(Line(name, points, words, control=these[0].row.is_control))
    for s in own:
        if s.row.total is None:
            words = [s.row.label]
            lines.append(Line(s.row.label, [(_work(s), s.psnr)], words, alone=True))
    # Less work is better.
    points = [(-_work(s), s.psnr) for s in own]
    front = [(-x, y) for x, y in points if is_on_front((x, y), points)]
    settings, clips = board.results.settings, max((s.clips for s in own), default=0)
    prompts = f"{clips} prompt{'' if clips == 1 else 's'}"
    title = f"{settings.get('model')}, {settings.get('steps')} steps, {prompts}"
    across = "work of a run, attention and planning, as a share of dense; labels are totals"
    draw_pareto(lines, front, path, title, (across, "PSNR against dense, dB"))


def _work(standing: Standing) -> float:
    return standing.achieved + standing.planning
