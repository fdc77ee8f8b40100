"""quality: clips of every variant, and how close the sparse ones come to dense: `quality.json`."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.experiments.experiment import DENSE, Experiment
from jali.experiments.results import Results
from jali.experiments.stage import Stage, StageContext, damage, read_record
from jali.experiments.stages.run import (
    load_pipeline,
    pin_threads,
    prompts_of,
    settings_of,
    variant_inputs,
)
from jali.files import write_json

if TYPE_CHECKING:
    from jali.generation import RunFolder, Settings, Tick

log = logging.getLogger("jali")
KIND, CLIPS = "jali-quality", "clips"


class Quality(Stage):
    """Clip by clip, so that whatever ends it costs one clip at most.

    `quality.json` holds nothing of the machine: the same clips give the same file.
    """

    name = "quality"

    def weight(self, experiment: Experiment) -> float:
        count = len(experiment.prompts) if experiment.prompts else experiment.num_prompts
        return count * (1 + len(experiment.variants)) * (experiment.settings.steps or 1)

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        return variant_inputs(experiment, folder) | {
            "prompts": list(prompts_of(experiment)),
            "metrics": None if experiment.metrics is None else list(experiment.metrics),
        }

    def run(self, context: StageContext) -> Sequence[Path]:
        e, path = context.experiment, context.folder / "quality.json"
        with pin_threads(e):
            runs = _make_clips(context)
            if context.writes:
                rows = [_judge(e, runs[DENSE], runs[variant]) for variant in e.variants]
                for row, variant in zip(rows, e.variants, strict=True):
                    row["variant"] = variant
                facts = {
                    "kind": KIND, "version": 1, "tag": e.tag, "model": e.settings.model,
                    "steps": e.settings.steps, "seed": e.settings.seed,
                    "prompts": list(prompts_of(e)), "rows": rows,
                }  # fmt: skip
                write_json(path, facts)
        made = [p for variant in runs for p in (context.folder / CLIPS / variant).iterdir()]
        return [path, *(p for p in made if p.is_file() and not p.name.startswith("."))]


def _make_clips(context: StageContext) -> dict[str, RunFolder]:
    """The run folder of dense and of every variant, complete."""
    from jali.generation import produce

    e, prompts = context.experiment, prompts_of(context.experiment)
    variants = (DENSE, *e.variants)
    pipe, found = load_pipeline(context), {}
    for number, variant in enumerate(variants):
        folder = context.folder / CLIPS / variant
        settings = settings_of(e, variant, context.folder)
        if context.writes:
            resolved = settings.resolve(pipe)
            _clear_others(folder, resolved, prompts)
            if variant == DENSE:
                _copy_dense(folder, resolved, prompts, context.folder.parent)

        def progress(tick: Tick, number: int = number, variant: str = variant) -> None:
            clips = number * tick.clips + tick.clip
            what = f"{variant}, clip {tick.clip + 1} of {tick.clips}"
            total = len(variants) * tick.clips * tick.steps
            context.progress(clips * tick.steps + tick.step, total, what)

        found[variant] = produce(pipe, prompts, settings, folder, progress)
    return found


def _clear_others(folder: Path, settings: Settings, prompts: Sequence[str]) -> None:
    """Clips of other settings under this tag: the stage is being redone because they changed."""
    from jali.generation import RunFolderError
    from jali.generation.folder import find_run

    try:
        find_run(folder, settings, prompts)
    except RunFolderError as error:
        log.info("the clips in %s are made anew: %s", folder, error)
        shutil.rmtree(folder)


def _copy_dense(folder: Path, settings: Settings, prompts: Sequence[str], root: Path) -> None:
    """Fill an empty folder of dense clips with those of another experiment: they are the same for
    every method and budget.

    Only of one whose stage is complete, to the byte, and was done on the same kind of machine with
    the same versions: the clips are then what this experiment would make itself.
    """
    if folder.exists():
        return
    results, name = Results(root, root), f"{CLIPS}/{DENSE}"
    for tag in results.tags():
        with contextlib.suppress(OSError, ValueError):
            outputs = read_record(results, tag, "quality")[1]
            files, source = (
                [n for n in outputs if Path(n).parent == Path(name)],
                results.folder(tag),
            )
            if not _same_run(source / name, settings, prompts):
                continue
            if any(damage(source, file, outputs) for file in files):
                continue
            waiting = folder.with_name(f".borrowed-{folder.name}")
            shutil.rmtree(waiting, ignore_errors=True)  # of a process that was killed
            waiting.mkdir(parents=True)
            try:
                for file in files:
                    shutil.copyfile(source / file, waiting / Path(file).name)
                os.rename(waiting, folder)
            finally:
                shutil.rmtree(waiting, ignore_errors=True)
            log.info("the dense clips are those of %s", tag)
            return


def _same_run(folder: Path, settings: Settings, prompts: Sequence[str]) -> bool:
    from jali import __version__
    from jali.generation import read_run
    from jali.generation.machine import machine, versions

    found = read_run(folder)
    return (
        found.complete
        and found.settings.digest == settings.digest
        and [clip.prompt for clip in found.clips] == list(prompts)
        and found.machine == machine(str(settings.device))
        and found.versions == versions()
        and found.jali == __version__
    )


def _judge(experiment: Experiment, dense: RunFolder, sparse: RunFolder) -> dict[str, Any]:
    from jali.evaluation.quality.evaluation import evaluate
    from jali.evaluation.quality.result import write_evaluation

    found = evaluate(
        dense.folder, sparse.folder, experiment.metrics, device=str(sparse.settings.device)
    )
    write_evaluation(found, sparse.folder / "metrics.json")
    facts = found.to_dict()
    costs = [clip.sparse_cost for clip in sparse.clips if clip.sparse_cost is not None]
    return {
        "budget": sparse.settings.budget,
        "cost": _mean([clip.cost for clip in sparse.clips]),
        "sparse_cost": _mean(costs) if costs else None,
        "faults": {
            name: sum(pair["checks"][name] for pair in facts["pairs"])
            for name in ("black", "frozen", "nan")
        },
        "unavailable": facts["unavailable"],
        **facts["summary"],
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6)
