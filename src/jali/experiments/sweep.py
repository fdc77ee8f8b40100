"""A sweep: one strict YAML file that is a grid of experiments.

    name: mine
    models: [wan-t2v-1.3b]
    sizes: [480x832x81, 720x1280x81]   # height x width x frames; left out: the model's own
    methods: [entropy, psa, preset:psa_balanced]
    budgets: [0.7, 0.5, 0.3]
    schedules: [{warmup_frac: 0.2, dense_first_layer: true}]
    num_prompts: 16                    # and every other setting of an experiment, for all of them
    resources: {time: "12:00:00"}

Several grids in one file stand in a list under `grids`; what is outside holds for each of them.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jali.error import shorten
from jali.experiments.experiment import SETTINGS as RUN_SETTINGS
from jali.experiments.experiment import Experiment
from jali.experiments.resources import Resources
from jali.experiments.results import check_tag
from jali.files import read_text
from jali.strict_yaml import MOST_BYTES, parse_yaml

AXES = ("models", "sizes", "methods", "budgets", "schedules")
SCHEDULE = ("warmup_frac", "dense_first_layer")
# Set by the axes, or by the tag.
_BY_AXIS = {"tag", "model", "height", "width", "num_frames", "method", "preset", "budget"}
_OWN = tuple(f.name for f in dataclasses.fields(Experiment) if f.name != "settings")
SETTINGS = tuple(n for n in (*RUN_SETTINGS, *_OWN) if n not in {*_BY_AXIS, *SCHEDULE})
SIZE = re.compile(r"(\d+)[x×](\d+)(?:[x×](\d+))?")
MOST = 10_000


@dataclass(frozen=True, slots=True)
class Sweep:
    """A name, the experiments of the grid in order, and what each job asks for."""

    name: str
    experiments: tuple[Experiment, ...]
    resources: Resources = field(default_factory=Resources)

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(experiment.tag for experiment in self.experiments)


def read_sweep(path: Path) -> Sweep:
    """A file, checked to the last experiment: every model, size, method, preset and budget.

    FileNotFoundError where there is none, ValueError in one short sentence for what is wrong.
    """
    try:
        text = read_text(path.expanduser(), MOST_BYTES)
    except FileNotFoundError:
        raise FileNotFoundError(f"no sweep file {path}") from None
    return parse_sweep(text, str(path))


def parse_sweep(text: str, source: str = "the sweep") -> Sweep:
    """The sweep of a YAML text; the same errors."""
    try:
        data = parse_yaml(text)
    except ValueError as error:
        raise ValueError(f"{source} is not a sweep: {error}") from None
    if not isinstance(data, Mapping):
        raise ValueError(f"{source} is not a sweep: it holds no keys such as models and methods")
    try:
        return _sweep(data)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{source}: {shorten(error)}") from error


def _sweep(data: Mapping[Any, Any]) -> Sweep:
    _known(data, ("name", "resources", "grids", *AXES, *SETTINGS), "a sweep")
    if "name" not in data:
        raise ValueError("name is missing: it names the sweep's folder and begins every tag")
    name = check_tag(_text(data["name"], "name"), "name")
    resources = Resources.from_dict(_mapping(data.get("resources", {}), "resources"))
    shared = {key: value for key, value in data.items() if key in (*AXES, *SETTINGS)}
    if "grids" in data:
        parts = _items(data["grids"], "grids")
        grids = [(f"grids[{i}].", shared | dict(_grid(part, i))) for i, part in enumerate(parts)]
    else:
        grids = [("", shared)]
    experiments = list(itertools.chain.from_iterable(_cells(name, *grid) for grid in grids))
    _check_tags(experiments)
    return Sweep(name, tuple(experiments), resources)


def _grid(part: Any, index: int) -> Mapping[Any, Any]:
    part = _mapping(part, f"grids[{index}]")
    _known(part, (*AXES, *SETTINGS), f"grids[{index}]")
    return part


def _cells(name: str, where: str, grid: Mapping[str, Any]) -> Iterator[Experiment]:
    """Every experiment of one grid, in the file's order."""
    for axis in ("models", "methods"):
        if axis not in grid:
            raise ValueError(f"{where}{axis} is missing")
    models = [_text(m, f"{where}models") for m in _items(grid["models"], f"{where}models")]
    sizes = [_size(s, f"{where}sizes") for s in _items(grid.get("sizes", [None]), f"{where}sizes")]
    methods = [_method(m, f"{where}methods") for m in _items(grid["methods"], f"{where}methods")]
    budgets = _items(grid.get("budgets", [None]), f"{where}budgets")
    schedules = [
        _schedule(s, f"{where}schedules[{i}]")
        for i, s in enumerate(_items(grid.get("schedules", [{}]), f"{where}schedules"))
    ]
    count = len(models) * len(sizes) * len(methods) * len(budgets) * len(schedules)
    if count > MOST:
        raise ValueError(f"{where or 'the grid'} has {count:,} experiments; at most {MOST:,} fit")
    settings = {key: grid[key] for key in SETTINGS if key in grid}
    for key in ("prompts", "metrics"):
        if key in settings:
            values = _items(settings[key], f"{where}{key}")
            settings[key] = tuple(_text(text, f"{where}{key}") for text in values)
    for model, size, method, budget, (number, schedule) in itertools.product(
        models, sizes, methods, budgets, enumerate(schedules)
    ):
        facts = {**settings, **size, **method, **schedule, "model": model, "budget": budget}
        try:
            cell = Experiment(tag="x", **facts).completed()
        except (ValueError, TypeError) as error:
            raise ValueError(f"{where}{_cell_name(facts)}: {error}") from error
        tag = _tag(name, cell, number if len(schedules) > 1 else None)
        yield dataclasses.replace(cell, tag=tag)


def _tag(name: str, cell: Experiment, schedule: int | None) -> str:
    s = cell.settings
    parts = [name, s.model, f"{s.height}x{s.width}x{s.num_frames}", cell.variant]
    if s.budget is not None:
        parts.append(f"{s.budget:g}")
    if schedule is not None:
        parts.append(f"s{schedule}")
    return "-".join(parts)


def _cell_name(facts: Mapping[str, Any]) -> str:
    names = ("model", "method", "preset", "budget", "height", "width", "num_frames")
    return ", ".join(f"{n} {facts[n]}" for n in names if facts.get(n) is not None)


def _check_tags(experiments: list[Experiment]) -> None:
    seen: dict[str, Experiment] = {}
    for experiment in experiments:
        if experiment.tag in seen:
            differ = experiment.differences(seen[experiment.tag])
            raise ValueError(
                f"{experiment.tag} is in the sweep twice"
                + (f", with {'; '.join(differ)}" if differ else "")
                + ": let the grids not overlap"
            )
        seen[experiment.tag] = experiment


# What the values of the axes may be


def _method(value: Any, where: str) -> dict[str, str]:
    text = _text(value, where)
    if text.startswith("preset:"):
        return {"preset": text.removeprefix("preset:").strip()}
    return {"method": text}


def _size(value: Any, where: str) -> dict[str, int]:
    if value is None:
        return {}
    found = SIZE.fullmatch(value.replace(" ", "")) if isinstance(value, str) else None
    if not found:
        raise ValueError(f"{where}: a size is height x width x frames (480x832x81), got {value!r}")
    height, width, frames = found.groups()
    size = {"height": int(height), "width": int(width)}
    return size if frames is None else size | {"num_frames": int(frames)}


def _schedule(value: Any, where: str) -> dict[str, Any]:
    value = _mapping(value, where)
    _known(value, SCHEDULE, where)
    if not isinstance(value.get("dense_first_layer", True), bool):
        raise ValueError(f"{where}.dense_first_layer must be true or false")
    return dict(value)


def _items(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where} must be a list with at least one entry, got {value!r}")
    if len(value) > MOST:
        raise ValueError(f"{where} has {len(value):,} entries; at most {MOST:,} fit")
    for i, item in enumerate(value):
        if item in value[:i]:
            raise ValueError(f"{where} lists {item!r} twice")
    return value


def _mapping(value: Any, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where} must be a mapping of names to values, got {value!r}")
    return value


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{where} must be text, got {value!r}")
    return value


def _known(data: Mapping[Any, Any], known: tuple[str, ...], where: str) -> None:
    from jali.value import suggest

    for key in data:
        if key not in known:
            raise ValueError(f"{where} has no key {key!r}{suggest(str(key), known)}")
