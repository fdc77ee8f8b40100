"""`jali bench pipeline`: time against quality, every method at every budget and dense in one run.

Each row is a run folder, so every clip behind a figure can be looked at. Prompts are the outer
loop: a machine that gets slower meanwhile slows all rows alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.evaluation.bench.machine import machine
from jali.files import write_json
from jali.generation import RunFolder, Settings, Tick, produce
from jali.generation.produce import attention, frames_of
from jali.generation.settings import dense_twin
from jali.methods import METHODS, Dense

if TYPE_CHECKING:
    from jali.evaluation.quality.evaluation import Evaluation

DENSE = "dense"
RESULTS, PLOT = "results.json", "pareto.svg"
BUDGETS = (0.5, 0.3, 0.2)
WARM_STEPS = 2  # one of them dense, one sparse


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
    """Every run by the name of its folder, dense first. A preset has its own budget."""
    found = {DENSE: dense_twin(base)}
    for name in methods:
        if name in METHODS and METHODS[name] is Dense:
            continue
        if name in METHODS:
            for budget in budgets:
                own = replace(_bare(base), method=name, budget=budget)
                found[f"{name}-{budget:g}"] = own.resolve()
        else:
            found[name] = replace(_bare(base), preset=name, method=None).resolve()
    for budget in budgets if masks is not None else ():
        own = replace(_bare(base), masks=masks, method=None, budget=budget)
        found[f"cached-{budget:g}"] = own.resolve()
    return found


def _bare(base: Settings) -> Settings:
    return replace(base, attention=None, options={})


def run(
    pipe: Any,
    prompts: Sequence[str],
    runs: dict[str, Settings],
    folder: Path,
    progress: Callable[[str, Tick], None] | None = None,
) -> list[PipelineRow]:
    """All runs on all prompts; after each prompt the results so far are in the folder."""
    check_empty(folder)
    _warm(pipe, prompts[0], runs)
    rows: list[PipelineRow] = []
    for count in range(1, len(prompts) + 1):
        made: dict[str, RunFolder] = {}
        for label, settings in runs.items():

            def tell(tick: Tick, label: str = label) -> None:
                if progress is not None:
                    progress(label, tick)

            made[label] = produce(pipe, prompts[:count], settings, folder / label, tell)
        # Quality takes a look at every clip, so it is measured once, in the end.
        rows = _rows(made, judged=count == len(prompts))
        write_json(folder / RESULTS, result(rows, made, prompts), sort_keys=False)
    return rows


def check_empty(folder: Path) -> None:
    """Times of two runs are not one run, so nothing is continued here."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ValueError(f"{folder} is not empty; a benchmark needs a folder of its own")


def _warm(pipe: Any, prompt: str, runs: dict[str, Settings]) -> None:
    """Compile and allocate before anything is timed: once for every method."""
    warm = {own.label: own for own in runs.values()}
    for own in warm.values():
        few = min(WARM_STEPS, int(own.steps or WARM_STEPS))
        short = own if own.masks else replace(own, steps=few)  # a book fits its own steps only
        with attention(pipe, short):
            frames_of(pipe, short, prompt, short.seed)


def _rows(made: dict[str, RunFolder], judged: bool) -> list[PipelineRow]:
    dense = made[DENSE]
    rows = [_row(label, gallery, dense, judged) for label, gallery in made.items()]
    return list(_mark_best(rows))


def _row(label: str, gallery: RunFolder, dense: RunFolder, judged: bool) -> PipelineRow:
    clips, others = gallery.clips, dense.clips
    seconds, slow = (_mean([c.seconds for c in part]) for part in (clips, others))
    inside, slow_inside = (
        None
        if any(c.seconds_transformer is None for c in part)
        else _mean([c.seconds_transformer or 0.0 for c in part])
        for part in (clips, others)
    )
    sparse = [c.sparse_cost for c in clips if c.sparse_cost is not None]
    return PipelineRow(
        label=label,
        method=gallery.settings.label,
        budget=gallery.settings.budget,
        cost=_mean([c.cost for c in clips]),
        sparse_cost=_mean(sparse) if sparse else None,
        seconds=seconds,
        seconds_transformer=inside,
        speedup=slow / seconds,
        speedup_transformer=None if not inside or not slow_inside else slow_inside / inside,
        quality=_quality(dense.folder, gallery.folder) if judged and label != DENSE else {},
    )


def _quality(reference: Path, generated: Path) -> dict[str, float]:
    from jali.evaluation.quality.evaluation import evaluate

    found: Evaluation = evaluate(reference, generated)
    summary = found.to_dict()["summary"]
    return {
        name: float(value["mean"]) for name, value in summary.items() if value["mean"] is not None
    }


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _mark_best(rows: Sequence[PipelineRow]) -> Iterator[PipelineRow]:
    """Rows that no other row beats in time and PSNR at once."""
    places = {row.label: (-row.seconds, nearness(row)) for row in rows if row.quality}
    for row in rows:
        here = places.get(row.label)
        beaten = here is None or any(
            there != here and there[0] >= here[0] and there[1] >= here[1]
            for there in places.values()
        )
        yield replace(row, best=not beaten)


def nearness(row: PipelineRow) -> float:
    """PSNR; frames that are the same have none, for it is infinite."""
    return row.quality.get("psnr", math.inf)


def result(
    rows: Sequence[PipelineRow], made: dict[str, RunFolder], prompts: Sequence[str]
) -> dict[str, Any]:
    import torch

    dense = made[DENSE]
    return {
        "kind": "jali-pipeline-bench",
        "version": 1,
        "what": "jali bench pipeline",
        "machine": machine(torch.device(str(dense.settings.device))),
        "settings": dense.settings.to_dict(),
        "prompts": list(prompts[: len(dense.clips)]),
        "complete": len(dense.clips) == len(prompts),
        "rows": [asdict(row) for row in rows],
    }
