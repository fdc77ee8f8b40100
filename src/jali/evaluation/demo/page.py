"""One self-contained page that shows what came of a comparison."""

from __future__ import annotations

import base64
import html
import io
from collections.abc import Mapping
from typing import TYPE_CHECKING

from jali.evaluation.demo.compare import Comparison, Row
from jali.evaluation.demo.heads import MadeUpHeads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.55 system-ui, sans-serif; color: #1d2433; background: #fbfbf9;
       max-width: 60rem; margin: 3rem auto; padding: 0 1.2rem; }
h1 { font-size: 1.7rem; margin-bottom: .2rem; } h2 { font-size: 1.1rem; margin-top: 2.4rem; }
p.lead { color: #566077; margin-top: 0; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .38rem .6rem; border-bottom: 1px solid #e3e6ec; }
th { font-weight: 600; color: #566077; font-size: .86rem; }
th:first-child, td:first-child { text-align: left; }
tr.control td { color: #8a93a6; }
img { width: 100%; height: auto; background: white; border: 1px solid #e3e6ec;
      border-radius: 6px; }
.scroll { overflow-x: auto; }
small { color: #566077; }
"""

HEADINGS = ("method", "budget", "cost", "density", "error", "call ms", "plan ms", "speed-up")
CONTROLS = ("random", "local")


def cells(row: Row) -> tuple[str, ...]:
    """A row in words, in the order of HEADINGS."""
    return (
        row.method,
        f"{row.budget:.2f}",
        f"{row.cost:.3f}",
        f"{row.density:.3f}",
        f"{row.error:.1%}",
        f"{row.seconds * 1e3:,.0f}",
        f"{row.planning * 1e3:,.0f}",
        f"{row.speed_up:.2f}×",
    )


def render(made: MadeUpHeads, comparison: Comparison, figures: Mapping[str, Figure]) -> str:
    """The page as HTML; `figures` by caption, put inside it."""
    tokens, heads, dim = made.q.shape[2], made.q.shape[1], made.q.shape[3]
    rows = "\n".join(_table_row(row) for row in comparison.rows)
    head = "".join(f"<th>{name}</th>" for name in HEADINGS)
    pictures = "\n".join(
        f'<h2>{html.escape(caption)}</h2>\n<img alt="{html.escape(caption)}" '
        f'src="data:image/png;base64,{base64.b64encode(png(figure)).decode()}">'
        for caption, figure in figures.items()
    )
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>jali demo</title>
<meta name="viewport" content="width=device-width, initial-scale=1">
<style>{STYLE}</style></head><body>
<h1>One layer of attention, seven ways</h1>
<p class="lead">{made.grid} = {tokens:,} tokens, {heads} heads × {dim}
({", ".join(made.kinds)}); made-up tensors, no model. Dense attention on this machine takes
{comparison.dense_seconds * 1e3:,.0f} ms.</p>
<div class="scroll"><table><thead><tr>{head}</tr></thead>
<tbody>
{rows}
</tbody></table></div>
<p><small>Budget is the share of dense attention's work that was asked for, cost the share that was
spent, density the share of block pairs touched (more than the cost where blocks are read pooled).
Error is ‖out − dense‖ / ‖dense‖. Grey rows are controls that look at neither queries nor keys: a
method earns its place by beating them at equal cost. Planning is part of the call.</small></p>
{pictures}
</body></html>
"""


def png(figure: Figure) -> bytes:
    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=110, metadata={"Software": None})
    return file.getvalue()


def _table_row(row: Row) -> str:
    kind = ' class="control"' if row.method in CONTROLS else ""
    return f"<tr{kind}>" + "".join(f"<td>{html.escape(c)}</td>" for c in cells(row)) + "</tr>"
