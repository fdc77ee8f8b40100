"""All results in one table: the same files give the same bytes, whenever and wherever."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jali.experiments.job import read_config
from jali.experiments.page import render
from jali.experiments.results import Results
from jali.experiments.status import why_not_whole
from jali.files import UnreadableError, read_json, write_text

SETTINGS = (
    "model", "height", "width", "num_frames", "steps", "warmup_frac", "dense_first_layer",
    "seed", "backend",
)  # fmt: skip
COSTS = ("variant", "budget", "cost", "sparse_cost")  # of the clips that are judged
SPEED = ("seconds", "seconds_transformer", "dense_seconds", "speedup")  # of the runs that are timed
TIMED = ("bench_steps", "bench_cost", "bench_sparse_cost")  # what the timed runs were
# What people are shown, and under which heading; CSV and JSON hold all columns.
SHOWN = {
    "tag": "experiment", "variant": "variant", "budget": "asked", "cost": "cost",
    "bench_steps": "timed steps", "bench_cost": "timed cost", "dense_seconds": "dense s",
    "seconds": "s", "speedup": "speed-up",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Rows of finished experiments, and what was left out, with the reason."""

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    left_out: Mapping[str, str]

    @property
    def headings(self) -> dict[str, str]:
        """By column, those that people are shown: on a terminal, and on the page."""
        means = [name for name in self.columns if name.endswith(".mean")]
        return SHOWN | {name: name.split(".")[1] for name in means}

    def to_csv(self) -> str:
        """repr keeps every digit of a float, so tables can be compared byte for byte."""
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(self.columns)
        for row in self.rows:
            values = [row.get(name) for name in self.columns]
            table.writerow([repr(v) if isinstance(v, float) else v for v in values])
        return text.getvalue()

    def to_dict(self) -> dict[str, Any]:
        return {"kind": "jali-results", "version": 1, **asdict(self)}

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_html(self) -> str:
        return render(self)


def collect(results: Results, tags: Iterable[str]) -> ResultTable:
    """One row for every sparse run of every finished experiment, in the order of the tags' names.

    Each tag counts once however often it is named. What is not finished, or not what its stages
    wrote, is left out and said.
    """
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for tag in sorted(set(tags)):
        try:
            why = why_not_whole(results, tag) if results.config(tag).exists() else ""
            rows += [] if why else _rows(results, tag)
        except FileNotFoundError:
            why = "there is no such experiment"
        except (UnreadableError, KeyError, TypeError, AttributeError) as error:
            why = f"its results cannot be read: {error}"
        if why:  # without the machine's own folders: the same results elsewhere, the same table
            left_out[tag] = why.replace(f"{results.root}/", "")
    metrics = sorted({name for row in rows for name in row if name.startswith("quality.")})
    columns = ("tag", *SETTINGS, *COSTS, *SPEED, "device", *metrics, *TIMED)
    return ResultTable(columns, tuple(rows), left_out)


def write(table: ResultTable, folder: Path) -> list[Path]:
    """table.csv, table.json and table.html."""
    texts = {"csv": table.to_csv(), "json": table.to_json(), "html": table.to_html()}
    for form, text in texts.items():
        write_text(folder / f"table.{form}", text)
    return [folder / f"table.{form}" for form in texts]


def _rows(results: Results, tag: str) -> list[dict[str, Any]]:
    settings = read_config(results.config(tag)).to_dict()
    speed, quality = read_json(results.speed(tag)), read_json(results.quality(tag))
    times = {row["variant"]: row for row in speed["rows"]}
    found = []
    for row in quality["rows"]:
        timed = times.get(row["variant"], {})
        values: dict[str, Any] = {name: settings[name] for name in ("tag", *SETTINGS)}
        values |= {name: row.get(name) for name in COSTS} | {n: timed.get(n) for n in SPEED}
        values["dense_seconds"] = times.get("dense", {}).get("seconds")
        values["device"] = (speed.get("machine") or {}).get("device")
        for name, value in row.items():
            if isinstance(value, Mapping) and "mean" in value:
                values |= {f"quality.{name}.{p}": value.get(p) for p in ("mean", "low", "high")}
        # Fewer steps than those of the clips may cost another share: it stands beside their times.
        counts = (speed.get("steps"), timed.get("cost"), timed.get("sparse_cost"))
        found.append(values | dict(zip(TIMED, counts, strict=True)))
    return found
