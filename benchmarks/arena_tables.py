"""Tables from results/arena-*.json: what `jali arena` has measured (its `arena.json`, renamed); and
from results/layers-*.json, what layers.py has.

Whatever rows there are is shown; nothing is said of rows that are not.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from jali.evaluation.arena.leaderboard import (
    DIGITS,
    Board,
    Leaderboard,
    Standing,
    differs,
    plus_minus,
)
from jali.evaluation.arena.match import CLOSE
from jali.evaluation.arena.record import Results
from jali.evaluation.arena.row import Row
from jali.evaluation.quality.interval import POSITIVE, Interval, interval
from jali.name import CONTROLS

PATTERN = "arena-*.json"
TITLES = {"psnr": "PSNR", "ssim": "SSIM", "lpips": "LPIPS"}
NEAR = 0.03  # a cost of layers and a total of clips that are compared
LayerRow = Mapping[str, Any]  # of one method at one cost


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


# Single layers


class LayerCost:
    """All rows of layers.py at one cost, the least error first."""

    def __init__(self, rows: Iterable[LayerRow], cost: float) -> None:
        self.cost = cost
        here = [row for row in rows if row["cost"] == cost]
        # With blocks of its own, as clips are made, where there is such a row: it comes later.
        self.own = {row["method"]: row for row in here}
        self.rows = sorted(here, key=lambda row: float(row["error"]))
        self.control = next(row for row in self.rows if row["method"] in CONTROLS)

    def cells(self, name: str) -> list[str]:
        """The error of a row, and how far it is from the better control."""
        row = next(row for row in self.rows if layer_name(row) == name)
        text = plus_minus(interval([100 * error for error in row["errors"]], POSITIVE), 1)
        if is_tied(row, self.rows[0]):
            text = f"**{text}**"
        elif self.loses(row):
            text = f"*{text}*"
        if abs(row["achieved"] - self.cost) > CLOSE:
            text += f" at {row['achieved']:.3f}"
        return [text, "" if row["method"] in CONTROLS else differs(more(row, self.control))]

    def loses(self, row: LayerRow) -> bool:
        """Whether a method errs more than the better control, and not by chance."""
        above = row["error"] > self.control["error"] and row["method"] not in CONTROLS
        return above and not is_tied(row, self.control)

    def sentences(self) -> Iterator[str]:
        """Who errs least, and who no less than a control."""
        first, *others = self.rows
        at, control = f"At {self.cost:g}", self.control
        tied = ", ".join(layer_name(row) for row in others if is_tied(row, first))
        beside = f"; not told apart from it: {tied}" if tied else ", alone"
        yield f"{at} {layer_name(first)} errs least, by {first['error']:.1%} of dense{beside}."
        methods = [row for row in self.rows if row["method"] not in CONTROLS]
        for words, some in (
            ("err more than", [row for row in methods if self.loses(row)]),
            ("are not told apart from", [row for row in methods if is_tied(row, control)]),
        ):
            names = ", ".join(f"{layer_name(row)} ({differs(more(row, control))})" for row in some)
            if some:
                yield f"{at} these {words} the control {control['method']}: {names}."

    def against(self, board: Board, results: Results) -> str:
        """Of the pairs that both layers and clips tell apart, those that they order otherwise."""
        clips = {s.row.label: psnr_of_clips(results, s.row) for s in board.standings}
        names = [label for label in clips if label in self.own]  # the best clips first
        told, turned = 0, []
        for one, other in itertools.combinations(names, 2):
            shared = clips[one].keys() & clips[other].keys()
            ahead = interval([clips[one][clip] - clips[other][clip] for clip in sorted(shared)])
            behind = more(self.own[one], self.own[other])
            if holds_zero(ahead) or holds_zero(behind):
                continue
            told += 1
            if behind.mean is not None and behind.mean > 0:
                by = f"{differs(ahead)} dB in clips, {differs(behind)} % in layers"
                turned.append(f"`{one}` over `{other}` ({by})")
        return (
            f"Layers at {self.cost:g} and clips at {board.total:g} both tell {told} pairs apart, "
            f"and {len(turned)} of them in opposite order: {', '.join(turned) or 'none'}."
        )


def layer_name(row: LayerRow) -> str:
    return f"`{row['method']}` {row['blocks']}"


def more(row: LayerRow, other: LayerRow) -> Interval:
    """By how many percent of dense a row errs more than another, call by call."""
    pairs = zip(row["errors"], other["errors"], strict=True)
    return interval([100 * (own - others) for own, others in pairs])


def is_tied(row: LayerRow, other: LayerRow) -> bool:
    return holds_zero(more(row, other))


def holds_zero(found: Interval) -> bool:
    """Whether a difference may be none; of too few values it always may."""
    return found.low is None or found.high is None or found.low <= 0 <= found.high


def psnr_of_clips(results: Results, row: Row) -> dict[tuple[int, int], float]:
    """By the first prompt of its group and the place in it."""
    return {
        (first, place): value
        for first, record in results.of(row).items()
        for place, value in enumerate(record.metrics["psnr"])
    }


def layers_page(result: Mapping[str, Any], arena: Leaderboard | None = None) -> str:
    """Every row of layers.py, and where an arena of clips orders methods otherwise."""
    rows = result["rows"]
    costs = [LayerCost(rows, cost) for cost in dict.fromkeys(row["cost"] for row in rows)]
    head = ["method", "planning"]
    head += [title for one in costs for title in (f"% at {one.cost:g}", "to the control")]
    body = [
        [layer_name(row), f"{row['planning']:.3f}"]
        + [cell for one in costs for cell in one.cells(layer_name(row))]
        for row in costs[0].rows
    ]
    said = [sentence for one in costs for sentence in one.sentences()]
    if arena is not None:
        near = [
            (one, board)
            for one, board in itertools.product(costs, arena.boards)
            if board.total is not None and abs(board.total - one.cost) < NEAR
        ]
        said += [one.against(board, arena.results) for one, board in near]
    note = "**Bold** errs least, with all not told apart from it; *italics* lose to a control."
    return "\n\n".join(
        [layers_caption(result), table(head, body), note, "\n".join(f"- {x}" for x in said)]
    )


def layers_caption(result: Mapping[str, Any]) -> str:
    layers, steps = (", ".join(map(str, result[name])) for name in ("layers", "steps"))
    machine = result["machine"]
    return (
        f"**nano, single layers**: {result['tokens']:,} tokens, {result['heads']} heads × "
        f"{result['head_dim']}, layers {layers} at steps {steps} of {result['of_steps']}, "
        f"{len(result['prompts'])} prompts: {result['calls']} calls, float32, on a CPU, "
        f"{machine['date']}, jali {machine['versions']['jali']}. Errors in % of dense, means over "
        f"calls ± half of their 95 % interval; differences are paired, call by call. What was "
        f"achieved is within {CLOSE:g} of the cost, or stands behind *at*."
    )
