"""Which points nothing else beats in two things at once, and a picture of lines with that front."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.files import make_folder, whole_file

COLOURS = ("#0b7285", "#e8590c", "#5f3dc4", "#2b8a3e", "#c2255c", "#1971c2", "#868e96", "#f08c00")
MARKERS = "os^vP"  # another sign where colours come round again
FRONT = "#ffd43b"

Point = tuple[float, float]


def is_on_front(own: Point, others: Collection[Point]) -> bool:
    """Whether no other point is as good in both and better in one; more is better."""
    return not any(o != own and o[0] >= own[0] and o[1] >= own[1] for o in others)


@dataclass(frozen=True)
class Line:
    """Points of one name, each with a word beside it. A control is faint; points that belong to no
    line are `alone`, in the colour of the line of their name."""

    name: str
    points: Sequence[Point]
    words: Sequence[str]
    control: bool = False
    alone: bool = False


def draw_pareto(
    lines: Sequence[Line],
    front: Sequence[Point],
    path: Path,
    title: str,
    axes_words: tuple[str, str],
    mark: float | None = None,
) -> None:
    """Lines, the front through its points, and a thin line at `mark` across. The file's ending
    decides its format."""
    from matplotlib.figure import Figure

    from jali.evaluation.inspection.plan_picture import FAINT, INK

    many = len({line.name for line in lines}) > len(COLOURS)
    figure = Figure(figsize=(9.2 if many else 7.2, 5.2 if many else 4.6), layout="constrained")
    axes: Any = figure.add_subplot()
    names = list(dict.fromkeys(line.name for line in lines))
    for line in lines:
        number = names.index(line.name)
        colour = FAINT if line.control else COLOURS[number % len(COLOURS)]
        sign = "D" if line.alone else MARKERS[number // len(COLOURS) % len(MARKERS)]
        axes.plot(
            [x for x, _ in line.points], [y for _, y in line.points], marker=sign, markersize=5,
            linestyle="none" if line.alone else ":" if line.control else "-", color=colour,
            markerfacecolor="none" if line.alone else colour,
            label=None if line.alone else line.name,
        )  # fmt: skip
    if len(front) > 1:
        at = sorted(front)
        axes.plot(
            [x for x, _ in at], [y for _, y in at], color=FRONT, linewidth=7, alpha=0.45,
            zorder=0, label="best", solid_capstyle="round",
        )  # fmt: skip
    if mark is not None:
        axes.axvline(mark, color="#dee2e6", linewidth=1, zorder=0)
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(axes_words[0])
    axes.set_ylabel(axes_words[1])
    if lines:
        place = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if many else {}
        axes.legend(frameon=False, fontsize=8, **place)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    words = [word for line in lines for word in line.words]
    _label(axes, words, [point for line in lines for point in line.points], FAINT)
    save(figure, path)


# Around a point, in points: upwards right, down, left; the first that is free.
_PLACES = (((5, 3), "left"), ((5, -9), "left"), ((-5, 3), "right"), ((-5, -9), "right"))


def _label(axes: Any, names: Sequence[str], points: Sequence[Point], colour: str) -> None:
    """Words beside points; a word that would lie over another one is left out."""
    axes.figure.draw_without_rendering()  # only then is it known where things are
    legend = axes.get_legend()
    taken = [] if legend is None else [legend.get_window_extent()]
    for name, point in zip(names, points, strict=True):
        for offset, side in _PLACES:
            word = axes.annotate(
                name, point, offset, textcoords="offset points", fontsize=7, color=colour, ha=side,
            )  # fmt: skip
            box = word.get_window_extent()
            if not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            word.remove()


def save(figure: Any, path: Path) -> None:
    make_folder(path.parent)
    kind = path.suffix[1:] or "png"
    more = {"metadata": {"Date": None}} if kind == "svg" else {}  # the same plot, the same file
    with whole_file(path) as temporary:
        figure.savefig(temporary, format=kind, dpi=150, **more)
