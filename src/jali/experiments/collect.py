"""All results in one table: the same files give the same bytes, whenever and wherever."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.experiments.experiment import Experiment
from jali.experiments.job import read_config
from jali.experiments.results import Results
from jali.experiments.status import why_not_whole
from jali.experiments.storage import UnreadableError, read_json, write_bytes

SETTINGS = (
    "model", "height", "width", "num_frames", "steps", "warmup_frac", "dense_first_layer",
    "seed", "backend",
)  # fmt: skip
SPEED = ("seconds", "seconds_transformer", "dense_seconds", "speedup")
KIND = "jali-results"
FORMATS = ("csv", "json", "html")


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Rows of finished experiments, and what was left out, with the reason."""

    columns: tuple[str, ...]
    rows: tuple[Mapping[str, Any], ...]
    left_out: Mapping[str, str]

    def to_csv(self) -> str:
        text = io.StringIO()
        table = csv.writer(text, lineterminator="\n")
        table.writerow(self.columns)
        for row in self.rows:
            table.writerow([_cell(row.get(name)) for name in self.columns])
        return text.getvalue()

    def to_json(self) -> str:
        facts = {
            "kind": KIND, "version": 1, "columns": list(self.columns),
            "rows": [dict(row) for row in self.rows], "left_out": dict(self.left_out),
        }  # fmt: skip
        return json.dumps(facts, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def to_html(self) -> str:
        from jali.experiments.page import render

        return render(self)

    def text(self, form: str) -> str:
        return {"csv": self.to_csv, "json": self.to_json, "html": self.to_html}[form]()


def collect(results: Results, tags: Iterable[str]) -> ResultTable:
    """One row for every sparse run of every finished experiment, in the order of the tags' names.

    Each tag counts once however often it is named. What is not finished, or not what its stages
    wrote, is left out and said.
    """
    rows: list[dict[str, Any]] = []
    left_out: dict[str, str] = {}
    for tag in sorted(set(tags)):
        try:
            experiment = read_config(results, tag)
            if reason := why_not_whole(results, tag):
                left_out[tag] = _inside(reason, results)
                continue
            rows += _rows(
                experiment, read_json(results.speed(tag)), read_json(results.quality(tag))
            )
        except FileNotFoundError:
            left_out[tag] = "there is no such experiment"
        except (UnreadableError, KeyError, TypeError, AttributeError) as error:
            left_out[tag] = _inside(f"its results cannot be read: {error}", results)
    metrics = sorted({name for row in rows for name in row if name.startswith("quality.")})
    columns = ("tag", *SETTINGS, "variant", "budget", "cost", "sparse_cost", *SPEED, "device")
    return ResultTable((*columns, *metrics), tuple(rows), left_out)


def write(results: ResultTable, folder: Path, name: str = "table") -> list[Path]:
    """table.csv, table.json and table.html."""
    paths = []
    for form in FORMATS:
        paths.append(folder / f"{name}.{form}")
        write_bytes(paths[-1], results.text(form).encode())
    return paths


def _rows(
    experiment: Experiment, speed: Mapping[str, Any], quality: Mapping[str, Any]
) -> list[dict[str, Any]]:
    times = {row["variant"]: row for row in speed["rows"]}
    dense = times.get("dense", {})
    settings = experiment.to_dict()
    found = []
    for row in quality["rows"]:
        fast = times.get(row["variant"], {})
        values: dict[str, Any] = {"tag": experiment.tag}
        values |= {name: settings[name] for name in SETTINGS}
        values |= {name: row.get(name) for name in ("variant", "budget", "cost", "sparse_cost")}
        values |= {name: fast.get(name) for name in SPEED} | {
            "dense_seconds": dense.get("seconds"),
            "device": (speed.get("machine") or {}).get("device"),
        }
        for name, value in row.items():
            if isinstance(value, Mapping) and "mean" in value:
                for part in ("mean", "low", "high"):
                    values[f"quality.{name}.{part}"] = value.get(part)
        found.append(values)
    return found


def _cell(value: Any) -> Any:
    """repr keeps every digit of a float, so the table can be compared byte for byte."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else value


def _inside(reason: str, results: Results) -> str:
    """Without the machine's own folders: the same results elsewhere give the same table."""
    return reason.replace(f"{results.root}/", "")
