"""The pictures of docs/quality-per-work.md.

python -m docs.work_pictures measure  # one call of nano by every method, minutes on a CPU
python -m docs.work_pictures draw     # from benchmarks/results/nano-work.json

What is measured is one layer in one step of a dense clip: how far the output of a call is from that
of dense attention. Finished clips are measured by benchmarks/nano_quality.py.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.planning.curve import Curve

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import Tensor

    from jali import Method
    from jali.evaluation.inspection.capture import Capture

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
RESULT = HERE.parent / "benchmarks/results/nano-work.json"
INK, FAINT, LINE, PRICE = "#1d2433", "#8a93a6", "#c9cfda", "#b0413e"
PROMPT = "a large red striped ball moves right over a grey cloudy background"
SIZE = {"height": 128, "width": 128, "num_frames": 33}
STEPS, STEP, LAYER, HEAD, BLOCK = 6, 2, 3, 3, 64
BUDGETS = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.65, 0.8)
SHOWN = (0.3, 0.1)  # budgets of the maps; the price of the first one is drawn
LEVELS = ("in full", "means of 2", "means of 4", "means of 8", "one mean", "skipped")
STROKES = {
    "rd, all rows": ("#b0413e", "--"), "rd": ("#b0413e", "-"), "psa": ("#3a9d6e", "-"),
    "entropy, tail": ("#2f6fb3", "--"), "entropy": ("#2f6fb3", "-"), "ada_bsa": ("#7d5ba6", "-"),
    "rf_v2": ("#d98324", "-"), "random": ("#6b7385", ":"), "local": ("#a3abba", ":"),
}  # fmt: skip
CURVES = {
    "exponential": ("#b0413e", "-"), "linear": ("#d98324", "-"),
    "flat after a dense fifth and layer 0 (ESA)": ("#2f6fb3", "-"),
}  # fmt: skip
Point = tuple[float, float]
TOTAL, RUN_STEPS, RUN_LAYERS = 0.4, 30, 30


# Measuring


def captured() -> Capture:
    """One layer in the middle of a dense generation."""
    import torch

    from jali import load_pipeline
    from jali.evaluation.inspection.capture import capture
    from jali.generation.settings import Settings

    pipe = load_pipeline("nano", device="cpu", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    settings = Settings(model="nano", method="dense", steps=STEPS, seed=0, **SIZE).resolve()
    (call,) = capture(pipe, settings, PROMPT, layers=[LAYER], steps=[STEP])
    return call


def methods() -> dict[str, Method]:
    """All of them with the same blocks: a clip of 2,304 tokens has 36."""
    from jali.methods import METHODS, RateDistortion

    def sized(name: str) -> Method:
        kind = METHODS[name]
        known = {each.name for each in fields(kind)}  # type: ignore[arg-type]
        return kind(**dict.fromkeys(known & {"q_block", "k_block", "block_size"}, BLOCK))

    found = {name: sized(name.partition(",")[0]) for name in STROKES}
    rd, entropy = found["rd"], found["entropy, tail"]
    assert isinstance(rd, RateDistortion)
    found["rd"] = replace(rd, samples=8, levels=(2, 4, 8, "mean", "skip"), probes=0)
    found["rd, all rows"] = replace(found["rd"], samples=BLOCK)
    found["entropy, tail"] = replace(entropy, tail=True)  # type: ignore[call-arg]
    return found


def errors(call: Capture) -> Iterator[dict[str, Any]]:
    """What every method costs and errs by, at every budget."""
    import torch.nn.functional as F

    from jali import Tables, attend

    dense = F.scaled_dot_product_attention(call.q, call.k, call.v, scale=call.scale)
    for name, method in methods().items():
        tables = Tables()  # one for all budgets
        for budget in BUDGETS:
            found = attend(
                call.q, call.k, call.v, method=method.with_budget(budget), grid=call.grid,
                site=call.site, scale=call.scale, tables=tables,
            )  # fmt: skip
            assert found.plan is not None
            error = float((found.out - dense).norm() / dense.norm())
            yield {"method": name, "budget": budget, "cost": round(found.plan.cost, 4),
                   "error": round(error, 5)}  # fmt: skip


def head_maps(call: Capture) -> dict[str, Any]:
    """Of one head: the mass and the errors of every block pair, and its levels at some budgets.

    The price is shared with the layer's other heads. Errors are in units of that price.
    """
    from jali.evaluation.inspection.judge import prepared_call
    from jali.planning.tradeoff import choose_levels

    method = methods()["rd, all rows"]
    prepared = prepared_call(method, call)
    query, _ = prepared.query(call.q, call.k, call.v, call.site)
    table = method.table(query)  # type: ignore[attr-defined]
    plans = {
        budget: choose_levels(table, query.layout, budget)[0, HEAD].tolist() for budget in SHOWN
    }
    price = price_of(table, query.layout, SHOWN[0])
    logits = call.q[0, HEAD].float() @ call.k[0, HEAD].float().T * call.scale
    blocks = call.q.shape[2] // BLOCK
    mass = logits.softmax(-1).view(blocks, BLOCK, blocks, BLOCK).sum(3).mean(1)
    return {
        "head": HEAD, "mass": rounded(mass), "levels": [1, *table.levels], "price": price,
        "errors": rounded(table.errors()[0, HEAD] / price), "plans": plans,
    }  # fmt: skip


def price_of(table: Any, layout: Any, budget: float) -> float:
    """The price at which the levels of a given price cost the budget, by halving."""
    from jali.planning.plan import BlockPlan
    from jali.planning.tradeoff import choose_levels

    low, high = 1e-20, 1e20
    for _ in range(80):
        middle = (low * high) ** 0.5
        levels = choose_levels(table, layout, price=middle)
        ratios = (1, *(level for level in table.levels if level != 0))
        cost = BlockPlan(layout, ratios, map=levels).cost
        low, high = (middle, high) if cost > budget else (low, middle)
    return high


def rounded(values: Tensor) -> list[Any]:
    """Three figures of each."""
    if values.ndim > 1:
        return [rounded(each) for each in values]
    return [float(f"{value:.3g}") for value in values.tolist()]


def measure() -> None:
    import torch

    from benchmarks.nano_quality import weights_digest
    from jali import __version__
    from jali.nano import folder

    call = captured()
    result = {
        "jali": __version__, "torch": torch.__version__, "device": "cpu, float32",
        "weights": weights_digest(folder()), "prompt": PROMPT, "size": SIZE,
        "tokens": call.q.shape[2], "heads": call.q.shape[1],
        "step": STEP, "of_steps": STEPS, "layer": LAYER, "block": BLOCK,
        "rows": list(errors(call)), "one_head": head_maps(call),
    }  # fmt: skip
    RESULT.write_text(_plain(result), "utf-8")


def _plain(result: Mapping[str, Any]) -> str:
    """One line for every row of numbers."""
    import re

    text = json.dumps(result, indent=1)
    return re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found[0].split()), text) + "\n"


# Drawing


def errors_figure(told: Mapping[str, Any]) -> Figure:
    """Error over cost, a line for each method."""
    figure, (axis,) = _figure(7.2, 3.9, 1)
    for name, (colour, stroke) in STROKES.items():
        own = [row for row in told["rows"] if row["method"] == name]
        axis.plot(
            [row["cost"] for row in own], [row["error"] for row in own], color=colour, label=name,
            linestyle=stroke, linewidth=1.5, marker="o", markersize=2.5,
        )  # fmt: skip
    axis.set_yscale("log")
    axis.set_xlabel("cost of the call, share of dense attention", fontsize=8, color=FAINT)
    axis.set_ylabel("error of its output", fontsize=8, color=FAINT)
    axis.grid(color="#e6e9ef", linewidth=0.6)
    figure.legend(loc="outside right upper", fontsize=8, frameon=False, labelcolor=INK)
    return figure


def pairs(told: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """For each level the block pair (place of the level, m, n) among those that take it whose
    error, were it skipped, is nearest to the price of a whole block; own blocks have no choice."""
    head = told["one_head"]
    work = work_of(head["levels"], told["block"])
    found: dict[int, tuple[float, int, int]] = {}
    for m, row in enumerate(head["errors"]):
        for n, coarse in enumerate(row):
            if m == n:
                continue
            paid = [e + w for e, w in zip((0.0, *coarse), work, strict=True)]
            place = paid.index(min(paid))
            near = abs(coarse[-1] - 1), m, n
            found[place] = min(near, found.get(place, near))
    return [(place, m, n) for place, (_, m, n) in sorted(found.items())]


def price_figure(told: Mapping[str, Any]) -> Figure:
    """Work and error of every level of some block pairs, and the line that one price draws."""
    head, chosen = told["one_head"], pairs(told)
    work = work_of(head["levels"], told["block"])
    figure, axes = _figure(7.2, 4.3, 3, down=2, sharex=True, sharey=True)
    top = max(max(head["errors"][m][n]) for _, m, n in chosen)
    for axis in axes[len(chosen) :]:
        axis.remove()
    for axis, (place, m, n) in zip(axes, chosen, strict=False):
        error = [0.0, *head["errors"][m][n]]
        corners = hull(list(zip(work, error, strict=True)))
        axis.plot(*zip(*corners, strict=True), color=FAINT, linewidth=1.0)
        axis.scatter(work, error, s=14, color="#2f6fb3", zorder=3)
        axis.scatter(work[place], error[place], s=60, facecolor="none", edgecolor=PRICE, zorder=4)
        level = error[place] + work[place]  # in units of the price
        axis.axline((0, level), slope=-1, color=PRICE, linewidth=1.0)
        axis.set_title(LEVELS[_name(head["levels"][place])], fontsize=9, color=INK)
        axis.set_xlim(-0.06, 1.12)
        axis.set_ylim(-0.06, 1.08 * top)
        axis.set_xticks([0, 0.5, 1], ["0", "½", "1"])
    figure.supxlabel("work, in whole blocks", fontsize=8, color=FAINT)
    figure.supylabel("error, in units of λ", fontsize=8, color=FAINT)
    return figure


def maps_figure(told: Mapping[str, Any]) -> Figure:
    """Where a head looks, what skipping would change, and what is read at two budgets."""
    from matplotlib.colors import BoundaryNorm, ListedColormap, LogNorm

    head = told["one_head"]
    figure, axes = _figure(8.4, 2.3, 4)
    skipping = [[pair[-1] for pair in row] for row in head["errors"]]
    for axis, title, values in (
        (axes[0], "attention it receives", head["mass"]),
        (axes[1], "error if it were skipped", skipping),
    ):
        top = max(map(max, values))
        axis.imshow(
            [[max(value, top * 1e-4) for value in row] for row in values],
            norm=LogNorm(top * 1e-4, top), cmap="GnBu", interpolation="nearest",
        )  # fmt: skip
        axis.set_title(title, fontsize=9, color=INK)
    colours = ListedColormap(["#0b3c6f", "#2b7bba", "#5fb0c9", "#a6d8c8", "#dcefd9", "#ffffff"])
    bounds = BoundaryNorm([i - 0.5 for i in range(7)], 6)
    for axis, (budget, plan) in zip(axes[2:], head["plans"].items(), strict=True):
        shown = [[_name(level) for level in row] for row in plan]
        image = axis.imshow(shown, cmap=colours, norm=bounds, interpolation="nearest")
        axis.set_title(f"read at a budget of {budget}", fontsize=9, color=INK)
    for axis in axes:
        axis.set_xticks([])
        axis.set_yticks([])
    axes[0].set_ylabel("query blocks", fontsize=8, color=FAINT)
    axes[0].set_xlabel("key blocks", fontsize=8, color=FAINT)
    bar = figure.colorbar(image, ax=list(axes), ticks=range(6), shrink=0.75, aspect=13, pad=0.01)
    bar.minorticks_off()
    bar.ax.set_yticklabels(LEVELS, fontsize=7, color=INK)
    bar.ax.invert_yaxis()
    bar.ax.tick_params(length=0)
    bar.outline.set_edgecolor(LINE)  # type: ignore[operator]
    return figure


def curves_figure() -> Figure:
    """Budgets along a run that cost the same in all."""
    figure, (axis,) = _figure(7.2, 2.9, 1)
    for name, budgets in curve_budgets().items():
        colour, stroke = CURVES[name]
        axis.step(
            range(1, RUN_STEPS + 1), budgets, where="mid", color=colour, linestyle=stroke,
            linewidth=1.6, label=name,
        )  # fmt: skip
    axis.set_ylim(0, 1.05)
    axis.set_xlim(0.5, RUN_STEPS + 0.5)
    axis.set_xlabel("step", fontsize=8, color=FAINT)
    axis.set_ylabel("share of the work of a step", fontsize=8, color=FAINT)
    axis.grid(color="#e6e9ef", linewidth=0.6)
    axis.legend(fontsize=8, frameon=False, labelcolor=INK)
    return figure


def curve_budgets() -> dict[str, list[float]]:
    """The mean over the layers of every step."""

    def esa(step: int, layer: int) -> bool:
        return step < -(-RUN_STEPS // 5) or layer == 0

    tables = {
        name: Curve(TOTAL, shape).budgets(RUN_STEPS, RUN_LAYERS, dense)
        for name, (shape, dense) in zip(
            CURVES, (("exponential", None), ("linear", None), ("flat", esa)), strict=True
        )
    }
    return {name: [sum(row) / RUN_LAYERS for row in table] for name, table in tables.items()}


def work_of(levels: Sequence[int], block: int) -> list[float]:
    """What reading a block at these levels costs, in whole blocks."""
    from jali.kernels.lists import group_size

    return [0.0 if level == 0 else 1 / group_size(level, block) for level in levels]


def hull(points: Sequence[Point]) -> list[Point]:
    """The corners that some price makes the best, from the least work to the most."""
    corners: list[Point] = []
    for x, y in sorted(points):
        while len(corners) > 1 and _is_above(corners[-2], corners[-1], (x, y)):
            corners.pop()
        corners.append((x, y))
    return corners


def _is_above(left: Point, at: Point, right: Point) -> bool:
    """Whether the middle one of three points lies on or over the line between the others."""
    slope = (right[1] - left[1]) / (right[0] - left[0])
    return at[1] >= left[1] + slope * (at[0] - left[0])


def _name(level: int) -> int:
    """The place of a level in LEVELS."""
    from jali.planning.plan import LEVELS as CODES

    return CODES.index(level)


def _figure(
    width: float, height: float, across: int, down: int = 1, **shared: Any
) -> tuple[Figure, Sequence[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = list(figure.subplots(down, across, squeeze=False, **shared).flat)
    for axis in axes:
        axis.tick_params(length=2, labelsize=7, labelcolor=FAINT)
        for spine in axis.spines.values():
            spine.set_edgecolor(LINE)
            spine.set_linewidth(0.6)
    return figure, axes


def draw() -> None:
    import matplotlib

    told = json.loads(RESULT.read_text("utf-8"))
    found = {
        "work-errors": errors_figure(told), "work-price": price_figure(told),
        "work-maps": maps_figure(told), "work-curves": curves_figure(),
    }  # fmt: skip
    # Letters stay letters, and the same numbers give the same file.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "work"}):
        for name, figure in found.items():
            figure.savefig(ASSETS / f"{name}.svg", metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("measure", "draw"))
    if parser.parse_args().what == "measure":
        measure()
    else:
        draw()


if __name__ == "__main__":
    main()
