"""The page of a comparison: what its template says, and what the script inside it draws."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.evaluation.quality.interval import Interval
from jali.evaluation.quality.measure import describe
from jali.evaluation.report.comparison import Comparison, Progress, read_comparison
from jali.evaluation.report.summary import RunSummary, headline
from jali.evaluation.report.template import check_installed, render

BRIEF = ("seconds", "speed-up", "cost")  # columns of the table that goes clip by clip


def compare_page(
    folders: Sequence[Path],
    metrics: Sequence[str] | None = None,
    *,
    names: Sequence[str] = (),
    limit: int | None = None,
    progress: Progress = lambda _: None,
) -> str:
    """One self-contained HTML page about the runs in `folders`, the reference first.

    Args:
        folders: run folders or folders of videos; a single one stands for the runs inside it.
        metrics: None takes each folder's metrics.json, and measures where there is none; names are
            measured now; an empty sequence shows none.
        names: what to call the runs, one for each.
        limit: only the first clips.
        progress: hears what is being read.

    Raises:
        InputError: folders or files in them that cannot be compared.
        ImportError: jinja2 is not installed.

    Example:
        >>> page = compare_page([Path("runs/dense"), Path("runs/psa")], metrics=["psnr"])
    """
    check_installed()
    return render_page(read_comparison(folders, names, metrics, limit, progress))


def render_page(comparison: Comparison) -> str:
    """The whole page as HTML."""
    rows, runs, metrics = comparison.rows(), comparison.runs, comparison.metric_names
    by_clip = [row for clip in comparison.clips for row in comparison.rows([clip])]
    return render(
        "jali.evaluation.report",
        "page.html",
        comparison=comparison,
        headline=headline(rows),
        rows=rows,
        columns=_columns(rows, metrics),
        columns_by_clip=_columns(by_clip, metrics, brief=True),
        missing=list(dict.fromkeys(i for m in comparison.metrics for i in m.unavailable.items())),
        folds={
            "Settings": _fold([run.settings for run in runs]),
            "Versions": _fold([run.versions for run in runs]),
            "Machine": _fold([run.machine for run in runs]),
        },
        data=_data(comparison),
        number=_number,
        spread=_spread,
    )


@dataclass(frozen=True, slots=True)
class Column:
    """Of a table: a number for every row that has one, and the best of them if there is a best."""

    title: str
    means: Sequence[Interval | None]
    digits: int | None
    unit: str = ""
    higher_is_better: bool | None = None

    @property
    def best(self) -> float | None:
        """Where more than one row has a number, and one end of it is good."""
        values = [own.mean for own in self.means if own and own.mean is not None]
        if len(values) < 2 or self.higher_is_better is None:
            return None
        return max(values) if self.higher_is_better else min(values)


def _columns(
    rows: Sequence[RunSummary], metrics: Sequence[str], brief: bool = False
) -> list[Column]:
    """Columns that nobody fills are left out; the brief ones are for many rows."""

    def asked(shares: Iterable[float | None]) -> list[Interval | None]:
        return [None if share is None else Interval(share, None, None, 1) for share in shares]

    columns = [
        Column("seconds", [row.seconds for row in rows], 2),
        Column("in the transformer", [row.seconds_transformer for row in rows], 2),
        Column("speed-up", [row.speed_up for row in rows], 2, "×"),
        Column("asked", asked(row.budget for row in rows), None),
        Column("asked in total", asked(row.total for row in rows), None),
        Column("cost", [row.cost for row in rows], 3),
        Column("cost where sparse", [row.sparse_cost for row in rows], 3),
    ]
    if brief:
        columns = [column for column in columns if column.title in BRIEF]
    for metric in metrics:
        known, means = describe(metric), [row.metrics.get(metric) for row in rows]
        title, higher = (known.title, None) if brief else (known.heading, known.higher_is_better)
        columns.append(Column(title, means, known.digits, higher_is_better=higher))
    return [column for column in columns if any(column.means)]


def _number(value: float, digits: int | None) -> str:
    """As people write it; without digits, as short as it can be."""
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    return (f"{value:g}" if digits is None else f"{value:,.{digits}f}").replace("-", "−")


def _spread(found: Interval, digits: int | None) -> str:
    """How far a mean can be trusted: its interval or, of two values, both of them.

    Nothing where they are all the same as far as the digits go.
    """
    ends = found.values if found.low is None or found.high is None else (found.low, found.high)
    said = dict.fromkeys(_number(end, digits) for end in ends)
    return (", " if found.values else " – ").join(said) if len(said) > 1 else ""


def _fold(told: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[str], bool]]:
    """(name, value in every run, whether they differ), what differs first."""
    lines = []
    for key in dict.fromkeys(key for part in told for key in part):
        values = [_value(part.get(key)) for part in told]
        lines.append((key.replace("_", " "), values, len(set(values)) > 1))
    return sorted(lines, key=lambda line: not line[2])


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _data(comparison: Comparison) -> dict[str, Any]:
    """What the script draws from."""
    return {
        "runs": [run.name for run in comparison.runs],
        "metrics": [
            {"id": name, "title": m.title, "digits": m.digits, "higher": m.higher_is_better}
            for name, m in ((name, describe(name)) for name in comparison.metric_names)
        ],
        "clips": [_clip_data(comparison, clip) for clip in comparison.clips],
    }


def _clip_data(comparison: Comparison, clip: str) -> dict[str, Any]:
    films = comparison.films[clip]
    return {
        "name": clip,
        "prompt": comparison.prompt(clip),
        "frames": films[0].frames,
        "height": films[0].height,
        "width": films[0].width,
        "runs": [
            {
                "fps": film.fps,
                "budget": next(iter(run.numbers([clip], "budget")), None),
                "curves": {
                    name: [_json_number(value) for value in curve.per_frame]
                    for name, curve in metrics.clips.get(clip, {}).items()
                },
                "sites": sites,
                "difference": apart and {"means": apart.means, "lossy": apart.lossy},
            }
            for run, film, metrics, sites, apart in zip(
                comparison.runs,
                films,
                comparison.metrics,
                comparison.sites[clip],
                comparison.differences[clip],
                strict=True,
            )
        ],
    }


def _json_number(value: float | None) -> float | str | None:
    """JSON has no infinity; the script knows it as a word."""
    return "inf" if value == math.inf else value if value is None else round(value, 5)
