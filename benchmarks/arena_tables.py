"""Tables from results/arena-*.json: what `jali arena` has measured (its `arena.json`, renamed).

Whatever rows there are is shown; nothing is said of rows that are not.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from jali.evaluation.arena.leaderboard import (
    DIGITS,
    Board,
    Leaderboard,
    Standing,
    differs,
    plus_minus,
)

PATTERN = "arena-*.json"
TITLES = {"psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS"}


def read_all(folder: Path) -> list[Leaderboard]:
    """Arenas with results, few steps first."""
    found = [Leaderboard.read(path) for path in sorted(folder.glob(PATTERN))]
    return sorted((one for one in found if one.boards), key=_size)


def _size(board: Leaderboard) -> tuple[str, int]:
    settings = board.results.settings
    return str(settings["model"]), int(settings["steps"])


def picture_of(board: Leaderboard) -> str:
    """Where docs have its plot."""
    model, steps = _size(board)
    return f"assets/arena-{model}-{steps}.svg"


def page(arenas: Sequence[Leaderboard], docs: Path) -> str | None:
    """All of it, for the page of the arena; plots that are there are shown."""
    parts: list[str] = []
    for board in arenas:
        parts.append(caption(board))
        if (docs / picture_of(board)).exists():
            parts.append(f"![PSNR over all work of a run, by method]({picture_of(board)})")
        parts += [summary(board), sentences(board)]
        parts += [part for one in board.boards for part in (f"**{one.title}**", rows(board, one))]
    return "\n\n".join(part for part in parts if part) or None


def caption(board: Leaderboard) -> str:
    results = board.results
    settings, model = results.settings, results.settings["model"]
    size = f"{settings['num_frames']} frames at {settings['height']}×{settings['width']}"
    return (
        f"**{model}, {settings['steps']} steps**: {len(results.prompts)} prompts, {size}, "
        f"{settings['dtype']}, on {results.machine.get('device')}, {results.date}, jali "
        f"{results.jali}. PSNR in dB against the dense run, means over clips ± half of their 95 % "
        f"interval; differences are paired, clip by clip."
    )


def summary(board: Leaderboard) -> str:
    """PSNR of every method at every total, of each schedule."""
    scored = [one for one in board.boards if one.total is not None]
    parts = []
    for schedule in dict.fromkeys(one.schedule for one in scored):
        own = sorted((o for o in scored if o.schedule == schedule), key=lambda o: -(o.total or 0))
        labels = dict.fromkeys(s.row.label for one in own for s in one.standings)
        body = [[f"`{label}`", *(_cell(one, label) for one in own)] for label in labels]
        parts.append(table([f"PSNR, {schedule}", *(f"{one.total:g}" for one in own)], body))
    note = (
        "**Bold** is first, with all that are not told apart from it; *italics* lose to a control."
    )
    return "\n\n".join([*parts, note] if parts else [])


def _cell(one: Board, label: str) -> str:
    found = next((s for s in one.standings if s.row.label == label), None)
    if found is None:
        return ""
    text = plus_minus(found.metrics["psnr"], 1)
    if not found.place:
        return f"{text} at {found.achieved:.3f}"
    if found.loses:
        return f"*{text}*"
    return f"**{text}**" if found.place == 1 or found.is_tied else text


def sentences(board: Leaderboard) -> str:
    return "\n".join(f"- {sentence}" for sentence in board.sentences())


def rows(board: Leaderboard, one: Board) -> str:
    """Every number of a board."""
    metrics = board.metrics
    head = ["", "method", *(TITLES[name] for name in metrics)]
    if one.total is not None:
        head += ["to the first", "to the control"]
    head += ["achieved", "planning", "clip ×", "calls ×"]
    return table(head, (_row(s, metrics) for s in one.standings), left=2)


def _row(standing: Standing, metrics: Sequence[str]) -> list[str]:
    place = f"{standing.place}{'=' if standing.is_tied else ''}" if standing.place else ""
    cells = [place, f"`{standing.row.label}`"]
    cells += [plus_minus(standing.metrics.get(name), DIGITS[name]) for name in metrics]
    if standing.row.total is not None:
        cells += [differs(standing.behind), differs(standing.ahead)]
    cells += [f"{standing.achieved:.3f}", f"{standing.planning:.3f}"]
    return [*cells, *(plus_minus(x, 2) for x in (standing.speed_up, standing.speed_up_transformer))]


def table(head: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    def lines() -> Iterator[str]:
        yield f"| {' | '.join(head)} |"
        yield "|" + "---|" * left + "---:|" * (len(head) - left)
        for row in rows:
            yield f"| {' | '.join(row)} |"

    return "\n".join(lines())
