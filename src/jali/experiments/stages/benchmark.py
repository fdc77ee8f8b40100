"""benchmark: dense and every sparse variant on one machine, one after the other: `speed.json`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.experiments.experiment import DENSE, Experiment
from jali.experiments.stage import Stage, StageContext
from jali.experiments.stages.run import (
    book_of,
    load_pipeline,
    pin_threads,
    prompts_of,
    settings_of,
    variant_inputs,
)
from jali.files import UnreadableError, read_json, write_json

if TYPE_CHECKING:
    from jali.generation import Settings

KIND, PARTIAL = "jali-speed", "speed.partial.json"
WARM_UP = 1  # rounds that are not counted


class Benchmark(Stage):
    """A few steps of one prompt: the median of some repeats, after one that loads, compiles and
    tunes what there is."""

    name = "benchmark"

    def weight(self, experiment: Experiment) -> float:
        rounds = experiment.bench_repeats + WARM_UP
        return rounds * (1 + len(experiment.variants)) * _steps(experiment)

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        return variant_inputs(experiment, folder) | {
            "prompt": prompts_of(experiment)[0],
            "bench_steps": _steps(experiment),
            "repeats": experiment.bench_repeats,
        }

    def run(self, context: StageContext) -> Sequence[Path]:
        from jali.generation.machine import machine, versions

        e, steps = context.experiment, _steps(context.experiment)
        path, partial = context.folder / "speed.json", context.folder / PARTIAL
        with pin_threads(e):
            pipe = load_pipeline(context)
            facts: dict[str, Any] = {
                "kind": KIND, "version": 1, "tag": e.tag, "model": e.settings.model,
                "steps": steps, "repeats": e.bench_repeats,
                "machine": machine(pipe.device.type), "versions": versions(),
            }  # fmt: skip
            rows = _measured(partial, facts) if context.resuming else []
            variants = (DENSE, *e.variants)
            total = (WARM_UP + e.bench_repeats) * steps
            for number, variant in enumerate(variants[len(rows) :], len(rows)):

                def on_step(step: int, number: int = number, variant: str = variant) -> None:
                    context.progress(number * total + step, len(variants) * total, variant)

                row = _measure(context, pipe, variant, on_step)
                dense = rows[0] if rows else row
                row["speedup"] = round(dense["seconds"] / row["seconds"], 4)
                rows.append(row)
                if context.writes:
                    write_json(partial, facts | {"rows": rows})
        if context.writes:
            write_json(path, facts | {"rows": rows})
            partial.unlink(missing_ok=True)
        return [path]


def _measure(
    context: StageContext, pipe: Any, variant: str, on_step: Callable[[int], None]
) -> dict[str, Any]:
    """The row of one variant, timed on this machine."""
    from jali.generation.produce import attention, frames_of

    e, steps = context.experiment, _steps(context.experiment)
    settings = _with_steps(settings_of(e, variant, context.folder), steps, context).resolve(pipe)
    whole: list[float] = []
    inside: list[float | None] = []

    def count_step(step: int) -> None:
        on_step(len(whole) * steps + step)

    with attention(pipe, settings) as handle:
        handle.run.watch = None  # nobody looks at plans here, and looking takes time
        for _ in range(WARM_UP + e.bench_repeats):
            _wait(pipe)
            begin = time.perf_counter()
            frames_of(pipe, settings, prompts_of(e)[0], e.settings.seed, count_step)
            _wait(pipe)
            whole.append(time.perf_counter() - begin)
            stats = handle.stats()
            inside.append(stats.seconds)
    counted = slice(WARM_UP, None)
    times = [value for value in inside[counted] if value is not None]
    return {
        "variant": variant,
        "budget": None if variant == DENSE else settings.budget,
        "cost": round(stats.cost, 6),
        "sparse_cost": None if stats.sparse_cost is None else round(stats.sparse_cost, 6),
        "seconds": round(statistics.median(whole[counted]), 4),
        "seconds_transformer": round(statistics.median(times), 4) if times else None,
        "predicted_speedup": None if stats.predicted is None else round(stats.predicted, 4),
        "first_seconds": round(whole[0], 4),  # with what is loaded and compiled; not counted
        "all_seconds": [round(value, 4) for value in whole[counted]],
        "summary": stats.line(),
    }


def _with_steps(settings: Settings, steps: int, context: StageContext) -> Settings:
    """The same with fewer steps; a book is for one number of steps, so it is resampled."""
    if settings.masks is None or steps == settings.steps:
        return replace(settings, steps=steps)
    from jali.maskbook import MaskBook

    short = context.folder / f"masks-{steps}-steps.safetensors"
    book = MaskBook.open(book_of(context.experiment, context.folder))
    if book.fits_any_steps:
        return replace(settings, steps=steps)
    if context.writes:
        try:
            book.resample(steps=steps, output=short).close()
        finally:
            book.close()
    if context.experiment.ranks > 1:  # nobody opens it before it is there
        import torch.distributed as dist

        dist.barrier()
    return replace(settings, masks=str(short), steps=steps)


def _measured(path: Path, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Rows of an attempt that died, if they are of this very machine and these versions."""
    try:
        found = read_json(path, KIND)
    except (FileNotFoundError, UnreadableError):
        return []
    same = all(found.get(name) == value for name, value in facts.items())
    rows = found.get("rows")
    return list(rows) if same and isinstance(rows, list) else []


def _steps(experiment: Experiment) -> int:
    return min(experiment.bench_steps, experiment.settings.steps or experiment.bench_steps)


def _wait(pipe: Any) -> None:
    if pipe.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
