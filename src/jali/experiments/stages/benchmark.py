"""benchmark: dense and every sparse variant on one machine, one after the other: `speed.json`."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.experiments.experiment import Experiment
from jali.experiments.stage import Context
from jali.experiments.stages.variant import (
    DENSE,
    attention_of,
    book_digest,
    book_of,
    decides,
    pinned,
    pipeline,
    prompts_of,
    settings_of,
)
from jali.experiments.storage import UnreadableError, read_json, write_json

if TYPE_CHECKING:
    from jali.generation import Settings

KIND, PARTIAL = "jali-speed", "speed.partial.json"


@dataclass(frozen=True, slots=True)
class Benchmark:
    """A few steps of one prompt: the median of some repeats, after a warm-up where kernels are
    compiled or tuned on their first call, which is on a GPU."""

    name: str = "benchmark"

    def needed(self, experiment: Experiment) -> str:  # noqa: ARG002
        return ""

    def weight(self, experiment: Experiment) -> float:
        rounds = experiment.bench_repeats + 1
        return rounds * (1 + len(experiment.variants)) * _steps(experiment)

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        return decides(experiment) | attention_of(experiment) | {
            "prompt": prompts_of(experiment)[0],
            "bench_steps": _steps(experiment),
            "repeats": experiment.bench_repeats,
            "book": book_digest(experiment, folder),
        }  # fmt: skip

    def run(self, context: Context) -> Sequence[Path]:
        from jali.generation.machine import machine, versions

        e, steps = context.experiment, _steps(context.experiment)
        with pinned(e):
            pipe = pipeline(context)
            here = machine(pipe.device.type)
            facts: dict[str, Any] = {
                "kind": KIND, "version": 1, "tag": e.tag, "model": e.model, "steps": steps,
                "repeats": e.bench_repeats, "machine": here, "versions": versions(),
            }  # fmt: skip
            partial = context.folder / PARTIAL
            rows = _measured(partial, facts) if context.resuming else []
            names, rounds = (DENSE, *e.variants), _warm_up(pipe) + e.bench_repeats
            for number, variant in enumerate(names):
                if number < len(rows):
                    continue

                def told(step: int, number: int = number, variant: str = variant) -> None:
                    total = rounds * steps
                    context.progress(number * total + step, len(names) * total, variant)

                rows.append(_row(context, pipe, variant, steps, rows, told))
                if context.writes:
                    write_json(partial, facts | {"rows": rows})
        path = context.folder / "speed.json"
        if context.writes:
            write_json(path, facts | {"rows": rows})
            partial.unlink(missing_ok=True)
        return [path]


def _row(
    context: Context,
    pipe: Any,
    variant: str,
    steps: int,
    rows: Sequence[Mapping[str, Any]],
    told: Callable[[int], None],
) -> dict[str, Any]:
    from jali.generation.produce import attention, frames_of

    e = context.experiment
    settings = _shorter(settings_of(e, variant, context.folder), e, steps, context).resolve(pipe)
    whole: list[float] = []
    inside: list[float | None] = []

    def on_step(step: int) -> None:
        told(len(whole) * steps + step)

    with attention(pipe, settings) as handle:
        handle.run.watch = None  # nobody looks at plans here, and looking takes time
        for _ in range(_warm_up(pipe) + e.bench_repeats):
            _wait(pipe)
            begin = time.perf_counter()
            frames_of(pipe, settings, prompts_of(e)[0], e.seed, on_step)
            _wait(pipe)
            whole.append(time.perf_counter() - begin)
            stats = handle.stats()
            inside.append(stats.seconds)
    counted = slice(_warm_up(pipe), None)
    seconds = statistics.median(whole[counted])
    times = [value for value in inside[counted] if value is not None]
    return {
        "variant": variant,
        "budget": None if variant == DENSE else settings.budget,
        "cost": round(stats.cost, 6),
        "sparse_cost": None if stats.sparse_cost is None else round(stats.sparse_cost, 6),
        "seconds": round(seconds, 4),
        "seconds_transformer": round(statistics.median(times), 4) if times else None,
        "speedup": round((rows[0]["seconds"] if rows else seconds) / seconds, 4),
        "predicted_speedup": None if stats.predicted is None else round(stats.predicted, 4),
        "all_seconds": [round(value, 4) for value in whole[counted]],
        "summary": stats.line(),
    }


def _shorter(settings: Settings, e: Experiment, steps: int, context: Context) -> Settings:
    """The same with fewer steps; a book is for one number of steps, so it is resampled."""
    if settings.masks is None or steps == e.steps:
        return replace(settings, steps=steps)
    from jali.maskbook import MaskBook

    short = context.folder / f"masks-{steps}-steps.safetensors"
    if context.writes:
        book = MaskBook.open(book_of(e, context.folder))
        try:
            book.resample(steps=steps, output=short).close()
        finally:
            book.close()
    if e.ranks > 1:  # nobody opens it before it is there
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


def _warm_up(pipe: Any) -> int:
    return int(pipe.device.type == "cuda")


def _steps(experiment: Experiment) -> int:
    return min(experiment.bench_steps, experiment.steps or experiment.bench_steps)


def _wait(pipe: Any) -> None:
    if pipe.device.type == "cuda":
        import torch

        torch.cuda.synchronize()
