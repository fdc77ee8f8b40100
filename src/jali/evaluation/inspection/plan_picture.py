"""Pictures of plans: what heads keep, as block maps and as footprints on the frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from jali.planning.plan import BlockPlan
from jali.tokens.grid import Box

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INK, FAINT, LINE, QUERY = "#1d2433", "#8a93a6", "#c9cfda", "#d1495b"
SHADE = "GnBu"


def maps_figure(plans: Mapping[str, BlockPlan], heads: Sequence[str]) -> Figure:
    """One block map for every method (down) and head (across); darker is finer."""
    figure = _figure(1.55 * len(heads) + 0.9, 1.5 * len(plans) + 0.75)
    grid: Any = figure.subplots(len(plans), len(heads), squeeze=False)
    for row, (method, plan) in enumerate(plans.items()):
        for column, head in enumerate(heads):
            axes = grid[row, column]
            draw_block_map(axes, plan, column)
            if row == 0:
                axes.set_title(head, fontsize=9, color=INK)
            if column == 0:
                axes.set_ylabel(method, fontsize=9, color=INK)
    figure.supxlabel("key blocks", fontsize=8, color=FAINT)
    figure.supylabel("query blocks", fontsize=8, color=FAINT)
    return figure


def heads_figure(
    plan: BlockPlan, heads: Sequence[int], names: Sequence[str], query: int, frames: int = 5
) -> Figure:
    """A column per head: its block map above, and on the frames what one query block reads."""
    box = _box(plan)
    frames = min(frames, box.frames)
    figure = _figure(2.1 * len(heads), 1.9 + 0.78 * frames)
    grid: Any = figure.subplots(
        frames + 1, len(heads), squeeze=False, height_ratios=[2.5, *[1] * frames]
    )
    costs = plan.costs.expand(1, plan.levels.shape[1])[0]
    shown = np.linspace(0, box.frames - 1, frames).round().astype(int)
    for column, head in enumerate(heads):
        top = grid[0, column]
        draw_block_map(top, plan, head)
        top.axhline(query, color=QUERY, linewidth=1.2)
        top.set_title(f"{names[head]}\ncost {float(costs[head]):.2f}", fontsize=9, color=INK)
        read, own = footprint(plan, head, query)
        for i, frame in enumerate(shown):
            axes = grid[i + 1, column]
            _shade(axes, read[frame])
            if own[frame].any():
                axes.contour(own[frame], levels=[0.5], colors=QUERY, linewidths=1.2)
            bare(axes)
            if column == 0:
                axes.set_ylabel(f"frame {frame}", fontsize=7, color=FAINT)
    return figure


def footprint(plan: BlockPlan, head: int, query: int) -> tuple[np.ndarray, np.ndarray]:
    """How finely one query block reads every token of the video, and which tokens are its own.

    Two arrays [frames, height, width]: work in 0..1, and bool.
    """
    layout = plan.layout
    shape = _box(plan).shape
    read = plan.work(head=head)[query].repeat_interleave(plan.blocks.k)[: layout.k.tokens]
    own = torch.arange(layout.q.tokens) // plan.blocks.q == query
    return (
        read[plan.key_tokens(head).argsort().cpu()].view(shape).numpy(),
        own[plan.query_tokens(head).argsort().cpu()].view(shape).numpy(),
    )


def _box(plan: BlockPlan) -> Box:
    segments = plan.layout.k_grid.segments
    if len(segments) != 1 or not isinstance(segments[0], Box):
        raise ValueError(f"a footprint needs a grid of one video, got {plan.layout.k_grid}")
    return segments[0]


def _figure(width: float, height: float) -> Figure:
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("pictures need matplotlib: pip install 'jali[report]'") from error
    return Figure(figsize=(width, height), layout="constrained")


def draw_block_map(axes: Any, plan: BlockPlan, head: int) -> None:
    """What one head keeps: query blocks down, key blocks across, darker where read more finely."""
    _shade(axes, plan.work(head=head).numpy())
    bare(axes)


def _shade(axes: Any, work: np.ndarray) -> None:
    axes.imshow(work, vmin=0, vmax=1.25, cmap=SHADE, aspect="auto", interpolation="nearest")


def bare(axes: Any) -> None:
    """No ticks, and a thin frame."""
    axes.set_xticks([])
    axes.set_yticks([])
    for spine in axes.spines.values():
        spine.set_edgecolor(LINE)
        spine.set_linewidth(0.6)
