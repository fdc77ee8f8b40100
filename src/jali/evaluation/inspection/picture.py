"""The answer as a picture: errors at equal cost, and what each method reads where heads look."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jali.evaluation.inspection.judge import JudgedCall, exact_map, ranking, too_costly
from jali.evaluation.inspection.plan_picture import FAINT, INK, LINE, bare, draw_block_map
from jali.name import CONTROLS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

GOOD, WEAK = "#0b7285", "#adb5bd"


def figure(judged: Sequence[JudgedCall], title: str, heads: int = 4) -> Figure:
    """A line for every method: its errors on all calls, and, for the middle one of the calls,
    what it reads for a few heads. Above, where those heads look."""
    from matplotlib.figure import Figure

    shown = judged[len(judged) // 2]
    names = [name for name, _, _ in ranking(judged)]
    picked = _heads(shown, heads)
    size = (4.4 + 1.3 * len(picked), 1.15 * (len(names) + 1) + 0.8)
    drawn: Any = Figure(figsize=size, layout="constrained")
    grid = drawn.add_gridspec(len(names) + 1, len(picked) + 1, width_ratios=[3, *[1] * len(picked)])
    site = shown.capture.site
    drawn.suptitle(
        f"{title} at cost {shown.cost:g}; maps of layer {site.layer}, step {site.step}",
        fontsize=10, color=INK, x=0.02, ha="left",
    )  # fmt: skip
    _errors(drawn.add_subplot(grid[1:, 0]), judged, names)
    _maps(drawn, grid, shown, names, picked)
    return drawn


def _errors(axes: Any, judged: Sequence[JudgedCall], names: Sequence[str]) -> None:
    dear = too_costly(judged)
    for place, name in enumerate(names):
        errors = [v.error for j in judged for v in j.scores if v.method == name]
        colour = WEAK if name in CONTROLS or name in dear else GOOD
        axes.plot(errors, [place] * len(errors), "o", color=colour, alpha=0.55, markersize=6)
        axes.plot(sum(errors) / len(errors), place, "|", color=colour, markersize=22, mew=2.5)
    _reachable(axes, judged)
    labels = [f"{name}\n(costs more)" if name in dear else name for name in names]
    axes.set_yticks(range(len(names)), labels, fontsize=9, color=INK)
    axes.set(xlim=(0, None), ylim=(len(names) - 0.5, -0.5))  # level with the maps
    axes.set_xlabel(
        "error ‖out − dense‖ / ‖dense‖\na dot for every call, a bar for their mean",
        fontsize=8,
        color=FAINT,
    )
    axes.grid(axis="x", color=LINE, linewidth=0.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _reachable(axes: Any, judged: Sequence[JudgedCall]) -> None:
    """A line at what could be had at this cost."""
    found = [call.reachable for call in judged if call.reachable is not None]
    if found:
        error = sum(each.score.error for each in found) / len(found)
        axes.axvline(error, color=INK, linewidth=0.8, linestyle=":")
        axes.annotate(
            str(found[0]), (error, 1), xycoords=("data", "axes fraction"), xytext=(0, 2),
            textcoords="offset points", ha="center", fontsize=7, color=FAINT,
        )  # fmt: skip


def _maps(
    drawn: Any, grid: Any, shown: JudgedCall, names: Sequence[str], picked: Sequence[int]
) -> None:
    first = shown.plans[names[0]]
    for column, head in enumerate(picked, 1):
        top = drawn.add_subplot(grid[0, column])
        # The square root lets weak blocks be seen beside strong ones.
        look = exact_map(shown.capture, head, first).sqrt()
        top.imshow(look.numpy(), cmap="magma_r", aspect="auto", interpolation="nearest")
        top.set_title(f"head {head}\nspread {shown.spread[head]:.0%}", fontsize=8, color=INK)
        if column == 1:
            top.set_ylabel("attention", fontsize=8, color=INK)
        bare(top)
        for row, name in enumerate(names, 1):
            draw_block_map(drawn.add_subplot(grid[row, column]), shown.plans[name], head)


def _heads(shown: JudgedCall, count: int) -> list[int]:
    """Heads from the narrowest look to the widest."""
    order = sorted(range(len(shown.spread)), key=lambda head: shown.spread[head])
    if len(order) <= count:
        return order
    return [order[round(i * (len(order) - 1) / (count - 1))] for i in range(count)]
