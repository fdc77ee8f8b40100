"""The page: tables and words written here, players and plots by the script inside it."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from jali.evaluation.report.comparison import Comparison, Progress, read_comparison
from jali.evaluation.report.measure import MetricCurve, scale_of
from jali.evaluation.report.run import ComparedRun
from jali.evaluation.report.summary import (
    Mean,
    RunSummary,
    best,
    facts,
    headline,
    rows_of,
    speed_up,
)

COLOURS = 6


def compare_page(
    folders: Sequence[Path],
    metrics: Sequence[str] | None = None,
    *,
    names: Sequence[str] = (),
    limit: int | None = None,
    progress: Progress = lambda _: None,
) -> str:
    """One self-contained HTML page about the runs in `folders`, the reference first.

    `metrics` None takes each folder's metrics.json, and measures where there is none; names are
    measured now; an empty sequence shows none. `limit` takes only the first clips.
    """
    return Report.of(read_comparison(folders, names, metrics, limit, progress)).html()


@dataclass(frozen=True, slots=True)
class Report:
    """A comparison and its numbers, ready to be printed in either form."""

    comparison: Comparison
    rows: tuple[RunSummary, ...]

    @classmethod
    def of(cls, comparison: Comparison) -> Report:
        return cls(comparison, tuple(rows_of(comparison)))

    def headline(self) -> str:
        return "".join(headline(list(self.rows)))

    def to_dict(self) -> dict[str, Any]:
        """What the page says in numbers, for machines."""
        return {
            "kind": "jali-comparison",
            "version": 1,
            "headline": self.headline(),
            "clips": list(self.comparison.clips),
            "rows": [row.to_dict() for row in self.rows],
            "notes": list(self.comparison.notes),
        }

    def html(self) -> str:
        """The whole page."""
        # A number and its unit stay on one line.
        loud, quiet = (part.replace(" dB", "\u00a0dB") for part in headline(list(self.rows)))
        runs = self.comparison.runs
        others = ", ".join(run.name for run in runs[1:])
        parts = {
            "title": html.escape(f"{others} against {runs[0].name}"),
            "headline": f"<b>{html.escape(loud)}</b>{html.escape(quiet)}",
            "lead": html.escape(_lead(self.comparison)),
            "cards": _cards(self.rows),
            "notes": "".join(
                f'<p class="note" role="note">{html.escape(note)}</p>'
                for note in self.comparison.notes
            ),
            "table": _table(list(self.rows), self.comparison),
            "by_clip": _by_clip(self.comparison),
            "settings": _settings(runs),
            "footer": html.escape(_footer(runs)),
            "films": _films(self.comparison),
            "data": _data(self.comparison),
            "style": _own("page.css"),
            "script": _own("page.js"),
        }
        # One pass, so that nothing inside a part is taken for a place to fill.
        return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _own("page.html"))


def _own(name: str) -> str:
    return files("jali.evaluation.report").joinpath(name).read_text(encoding="utf-8")


def _lead(comparison: Comparison) -> str:
    runs, settings = comparison.runs, comparison.reference.settings
    film = comparison.films[comparison.clips[0]][0]
    count = len(comparison.clips)
    clips = "one clip" if count == 1 else f"{count} clips"
    said = [f"{clips} of {film.frames} frames at {film.width}×{film.height}"]
    if settings.get("model"):
        said.insert(0, str(settings["model"]))
        said.append(f"{settings['steps']} steps")
    machine = _machine(comparison.reference)
    if machine:
        said.append(f"on {machine}")
    others = " and ".join(run.name for run in runs[1:])
    return f"{others} against {runs[0].name}: {', '.join(said)}."


def _machine(run: ComparedRun) -> str:
    return str(run.machine.get("device") or run.machine.get("cpu") or "")


def _footer(runs: Sequence[ComparedRun]) -> str:
    versions = {str(run.versions["jali"]) for run in runs if run.versions.get("jali")}
    made = f"made with jali {', '.join(sorted(versions))}; " if versions else ""
    return f"Clips {made}everything on this page is inside this one file."


def _cards(rows: Sequence[RunSummary]) -> str:
    cards = "".join(_card(row, place) for place, row in enumerate(rows))
    return f'<ul class="cards">{cards}</ul>'


def _card(row: RunSummary, place: int) -> str:
    said: list[tuple[str, str]] = []
    if row.speed_up:
        said.append(("speed-up", f"{row.speed_up.value:.2f}×"))
    elif row.seconds:
        said.append(("a clip", f"{_number(row.seconds.value, 1)} s"))
    if "psnr" in row.metrics:
        said.append(("PSNR", f"{_number(row.metrics['psnr'].value, 1)} dB"))
    if row.cost and place:
        asked = "cost" if row.budget is None else f"cost, {row.budget:g} asked"
        said.append((asked, f"{row.cost.value:.2f}"))
    terms = "".join(
        f"<div><dt>{html.escape(what)}</dt><dd>{html.escape(value)}</dd></div>"
        for what, value in said
    )
    role = "" if place else "<em>reference</em>"
    name = f"{_swatch(place)}{html.escape(row.name)}{role}"
    return f'<li class="card"><h3>{name}</h3><dl>{terms}</dl></li>'


def _swatch(place: int) -> str:
    return f'<span class="swatch" style="--run:var(--run-{place % COLOURS})"></span>'


def _number(value: float, digits: int) -> str:
    if not math.isfinite(value):
        return "∞" if value > 0 else "−∞"
    return f"{value:,.{digits}f}".replace("-", "−")


Cell = tuple[str, str, bool]  # what it says, what is small below it, whether it is the best
NO_CELL: Cell = ("", "", False)


def _cell(mean: Mean | None, digits: int, unit: str = "", good: bool = False) -> Cell:
    if mean is None:
        return NO_CELL
    small = f"± {_number(mean.within, digits)}" if mean.within else ""
    return _number(mean.value, digits) + unit, small, good


def _table(rows: list[RunSummary], comparison: Comparison) -> str:
    """One row per run; columns that nobody fills are left out."""
    columns: list[tuple[str, list[Cell]]] = [
        ("seconds", [_cell(row.seconds, 2) for row in rows]),
        ("in the transformer", [_cell(row.seconds_transformer, 2) for row in rows]),
        ("speed-up", [_cell(row.speed_up, 2, "×") for row in rows]),
        ("asked", [NO_CELL if r.budget is None else (f"{r.budget:g}", "", False) for r in rows]),
        ("cost", [_cell(row.cost, 3) for row in rows]),
        ("cost where sparse", [_cell(row.sparse_cost, 3) for row in rows]),
    ]
    for metric in comparison.metrics():
        scale, top = scale_of(metric), best(rows, metric)
        cells = []
        for row in rows:
            found = row.metrics.get(metric)
            good = found is not None and found.value == top
            cells.append(_cell(found, scale.digits, good=good))
        columns.append((scale.title + scale.arrow, cells))
    columns = [(name, cells) for name, cells in columns if any(cell[0] for cell in cells)]
    names = [(_swatch(place) + html.escape(row.name)) for place, row in enumerate(rows)]
    count = len(comparison.clips)
    small = f"Means over {count} clips, ± their 95 % interval."
    if count == 1:
        small = "One clip, so there are no intervals."
    missing = [f"{name}: {why}" for m in comparison.measures for name, why in m.unavailable.items()]
    told = "".join(f" Not measured: {html.escape(why)}." for why in dict.fromkeys(missing))
    return (
        _grid("cards-when-narrow", "run", names, columns)
        + f'<p class="keys">{small} Budget is asked, cost achieved: 1 is dense attention.{told}</p>'
    )


def _grid(kind: str, first: str, names: Sequence[str], columns: Sequence[tuple[str, Any]]) -> str:
    head = "".join(f'<th scope="col">{html.escape(name)}</th>' for name, _ in columns)
    body = []
    for place, name in enumerate(names):
        cells = []
        for column, values in columns:
            says, small, good = values[place]
            below = f"<small>{html.escape(small)}</small>" if small else ""
            bold = ' class="best"' if good else ""
            label = f' data-label="{html.escape(column)}"'
            cells.append(f"<td{bold}{label}>{html.escape(says)}{below}</td>")
        body.append(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>')
    return (
        f'<div class="scroll"><table class="{kind}"><thead><tr><th scope="col">{first}</th>{head}'
        f"</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _by_clip(comparison: Comparison) -> str:
    """The same numbers clip by clip, behind a fold."""
    metrics = comparison.metrics()
    names: list[str] = []
    columns: dict[str, list[Cell]] = {}
    for index, clip in enumerate(comparison.clips):
        for place, run in enumerate(comparison.runs):
            told = html.escape(comparison.prompt(clip) or clip)
            link = f'<button type="button" class="link" data-clip="{index}">{told}</button>'
            names.append(link if not place else f"{_swatch(place)}{html.escape(run.name)}")
            ratio = speed_up(comparison, place, clip)
            cells = {
                "seconds": _plain_cell(facts(run, [clip], "seconds"), 2),
                "speed-up": _plain_cell([] if ratio is None else [ratio], 2, "×"),
                "cost": _plain_cell(facts(run, [clip], "cost"), 3),
            }
            measured = comparison.measures[place].clips.get(clip, {})
            for metric in metrics:
                found = [measured[metric].mean] if metric in measured else []
                cells[scale_of(metric).title] = _plain_cell(found, scale_of(metric).digits)
            for name, cell in cells.items():
                columns.setdefault(name, []).append(cell)
    filled = [(name, cells) for name, cells in columns.items() if any(cell[0] for cell in cells)]
    if not filled:
        return ""
    grid = _grid("cards-when-narrow", "clip", names, filled)
    return f"<details><summary>Clip by clip</summary>{grid}</details>"


def _plain_cell(found: Sequence[float], digits: int, unit: str = "") -> Cell:
    return (_number(found[0], digits) + unit, "", False) if found else NO_CELL


def _settings(runs: Sequence[ComparedRun]) -> str:
    if not any(run.settings for run in runs):
        return '<p class="about">These folders have no manifest, so nothing is known of them.</p>'
    folds = (
        ("Settings", [run.settings for run in runs]),
        ("Versions", [run.versions for run in runs]),
        ("Machine", [run.machine for run in runs]),
    )
    return "".join(_fold(title, runs, told) for title, told in folds)


def _fold(title: str, runs: Sequence[ComparedRun], told: Sequence[Mapping[str, Any]]) -> str:
    keys = list(dict.fromkeys(key for part in told for key in part))
    if not keys:
        return ""
    lines = [(key, [_value(part.get(key)) for part in told]) for key in keys]
    lines.sort(key=lambda line: len(set(line[1])) == 1)
    head = "".join(
        f'<th scope="col">{_swatch(i)} {html.escape(r.name)}</th>' for i, r in enumerate(runs)
    )
    body = "".join(
        f"<tr{' class=differs' if len(set(values)) > 1 else ''}>"
        f'<th scope="row">{html.escape(key.replace("_", " "))}</th>'
        + "".join(f"<td>{html.escape(value)}</td>" for value in values)
        + "</tr>"
        for key, values in lines
    )
    differing = [key.replace("_", " ") for key, values in lines if len(set(values)) > 1]
    said = "all the same"
    if differing:
        said = ", ".join(differing) + (" differs" if len(differing) == 1 else " differ")
    return (
        f"<details><summary>{title} <small>{html.escape(said)}</small></summary>"
        f'<div class="scroll"><table class="settings"><thead><tr><th scope="col">name</th>{head}'
        f"</tr></thead><tbody>{body}</tbody></table></div></details>"
    )


def _value(value: Any) -> str:
    if value is None:
        return "–"
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _films(comparison: Comparison) -> str:
    """Every film in an element of its own, so that the browser decodes only what is watched."""
    return "\n".join(
        f'<script type="text/plain" id="film-{index}-{place}">{film.uri}</script>'
        for index, clip in enumerate(comparison.clips)
        for place, film in enumerate(comparison.films[clip])
    )


def _data(comparison: Comparison) -> str:
    metrics = [{"id": name, **asdict(scale_of(name))} for name in comparison.metrics()]
    told = {
        "runs": [run.name for run in comparison.runs],
        "metrics": metrics,
        "clips": [_clip_data(comparison, clip) for clip in comparison.clips],
    }
    # "<" only ever stands inside a string, where its escape means the same.
    text = json.dumps(told, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c")


def _clip_data(comparison: Comparison, clip: str) -> dict[str, Any]:
    films = comparison.films[clip]
    runs = []
    for place, film in enumerate(films):
        measured = comparison.measures[place].clips.get(clip, {})
        budget = facts(comparison.runs[place], [clip], "budget")
        runs.append(
            {
                "fps": film.fps,
                "budget": budget[0] if budget else None,
                "curves": {name: _curve(series) for name, series in measured.items()},
                "sites": comparison.sites[clip][place],
            }
        )
    return {
        "name": clip,
        "prompt": comparison.prompt(clip),
        "frames": films[0].frames,
        "height": films[0].height,
        "width": films[0].width,
        "runs": runs,
    }


def _curve(series: MetricCurve) -> list[float | str | None]:
    """JSON has no infinity; the script knows it as a word."""
    return ["inf" if v == math.inf else v if v is None else round(v, 5) for v in series.per_frame]
