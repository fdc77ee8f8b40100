"""`jali bench pipeline`: time against quality, every method at every budget and dense in one run.

Each row is a run folder, so every clip behind a figure can be looked at. Prompts are the outer
loop: a machine that gets slower meanwhile slows all rows alike.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from jali.evaluation.arena.pareto import is_on_front
from jali.evaluation.bench.machine import machine
from jali.files import UnreadableError, check_place, read_json, write_json
from jali.generation import RunFolder, Settings, Tick, produce
from jali.generation.manifest import NAME
from jali.generation.produce import warm_up
from jali.generation.settings import dense_twin
from jali.methods import METHODS, Dense

DENSE, RECIPE = "dense", "recipe"
SIZE = ("steps", "guidance", "height", "width", "num_frames")
RESULTS, PLOT = "results.json", "pareto.svg"
KIND = "jali-pipeline-bench"


@dataclass(frozen=True)
class PipelineRow:
    """One method at one budget. Times are means over prompts, of one clip, in seconds; speed-ups
    are over dense in the same run. `best` says that no other row is both faster and nearer."""

    label: str
    method: str
    budget: float | None
    cost: float
    sparse_cost: float | None
    seconds: float
    seconds_transformer: float | None
    speedup: float
    speedup_transformer: float | None
    quality: dict[str, float]
    best: bool = False


def candidates(
    base: Settings, methods: Sequence[str], budgets: Sequence[float], masks: str | None = None
) -> dict[str, Settings]:
    """Every run by the name of its folder, dense first. A preset has its own budget, a recipe its
    own size too, which then is that of all."""
    recipe = None if base.recipe is None else replace(base, attention=None, options={}).resolve()
    if recipe is not None:
        base = replace(base, recipe=None, **recipe.pick(*SIZE))
    bare = replace(base, attention=None, options={})
    found = {DENSE: dense_twin(base)} | ({} if recipe is None else {RECIPE: recipe})
    for name in methods:
        if name not in METHODS:
            found[name] = replace(bare, preset=name, method=None).resolve()
        elif METHODS[name] is not Dense:
            for budget in budgets:
                own = replace(bare, method=name, budget=budget)
                found[f"{name}-{budget:g}"] = own.resolve()
    for budget in budgets if masks is not None else ():
        own = replace(bare, masks=masks, method=None, budget=budget)
        found[f"cached-{budget:g}"] = own.resolve()
    return found


def run(
    pipe: Any,
    prompts: Sequence[str],
    runs: dict[str, Settings],
    folder: Path,
    progress: Callable[[str, Tick], None] | None = None,
) -> list[PipelineRow]:
    """All runs on all prompts; after each prompt the results so far are in the folder."""
    check_empty(folder)
    begun = time.perf_counter()
    # Presets of one method may need other kernels; the budgets of one book do not.
    warm_up(pipe, {own.masks or label: own for label, own in runs.items()}.values(), prompts[0])
    warming = round(time.perf_counter() - begun, 2)
    rows: list[PipelineRow] = []
    for count in range(1, len(prompts) + 1):
        made: dict[str, RunFolder] = {}
        for label, settings in runs.items():
            tell = progress and functools.partial(progress, label)
            made[label] = produce(pipe, prompts[:count], settings, folder / label, tell, warm=True)
        # Quality takes a look at every clip, so it is measured once, in the end.
        judged = count == len(prompts)
        rows = _mark_best([_row(label, run, made[DENSE], judged) for label, run in made.items()])
        write_json(folder / RESULTS, result(rows, made, prompts, warming), sort_keys=False)
    return rows


def check_empty(folder: Path) -> None:
    """Times of two runs are not one run, so nothing is continued here."""
    check_place(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(
            f"{folder} is not empty{_what_is_there(folder)}; a benchmark needs a folder of its "
            f"own: remove this one, or name another with --output-dir"
        )


def _what_is_there(folder: Path) -> str:
    """Of a benchmark that was interrupted, what can be had of it, and why it does not go on."""
    try:
        found = read_json(folder / RESULTS, KIND)
    except (OSError, UnreadableError):
        if not (folder / DENSE / NAME).exists():
            return ""
        found = {}
    if found.get("complete") is True:
        return f": it holds a benchmark, in {RESULTS}"
    kept = f"; {RESULTS} has its rows so far" if found else ""
    return (
        f": it holds a benchmark that did not finish, and times of two runs are not one run{kept}"
    )


def _row(label: str, run: RunFolder, dense: RunFolder, judged: bool) -> PipelineRow:
    seconds, slow = (fmean(clip.seconds for clip in each.clips) for each in (run, dense))
    inside, slow_inside = (
        _mean_or_none([clip.seconds_transformer for clip in each.clips]) for each in (run, dense)
    )
    return PipelineRow(
        label=label,
        method=run.settings.label,
        budget=run.settings.budget,
        cost=fmean(clip.cost for clip in run.clips),
        sparse_cost=_mean_or_none([clip.sparse_cost for clip in run.clips]),
        seconds=seconds,
        seconds_transformer=inside,
        speedup=slow / seconds,
        speedup_transformer=None if not inside or not slow_inside else slow_inside / inside,
        quality=_quality(dense.folder, run.folder) if judged and label != DENSE else {},
    )


def _mean_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if values and len(known) == len(values) else None


def _quality(reference: Path, generated: Path) -> dict[str, float]:
    from jali.evaluation.quality.evaluation import evaluate

    summary = evaluate(reference, generated).to_dict()["summary"]
    return {name: own["mean"] for name, own in summary.items() if own["mean"] is not None}


def _mark_best(rows: Sequence[PipelineRow]) -> list[PipelineRow]:
    """With `best` for rows that no other row beats in time and PSNR at once."""
    # Frames that are the same have no PSNR, for it is infinite.
    found = {r.label: (-r.seconds, r.quality.get("psnr", math.inf)) for r in rows if r.quality}

    return [
        replace(row, best=row.label in found and is_on_front(found[row.label], found.values()))
        for row in rows
    ]


def result(
    rows: Sequence[PipelineRow], made: dict[str, RunFolder], prompts: Sequence[str], warming: float
) -> dict[str, Any]:
    """What results.json holds."""
    dense = made[DENSE]
    return {
        "kind": KIND,
        "version": 1,
        "what": "jali bench pipeline",
        "machine": machine(torch.device(str(dense.settings.device))),
        "settings": dense.settings.to_dict(),
        "prompts": list(prompts[: len(dense.clips)]),
        "complete": len(dense.clips) == len(prompts),
        "warm_up_seconds": warming,  # with compilation; in no row
        "rows": [asdict(row) for row in rows],
    }
