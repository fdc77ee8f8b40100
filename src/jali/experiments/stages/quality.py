"""quality: clips of every variant, and how close the sparse ones come to dense: `quality.json`."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jali.experiments.experiment import Experiment
from jali.experiments.stage import Context
from jali.experiments.stages.sharing import borrow
from jali.experiments.stages.variant import (
    DENSE,
    attention_of,
    book_digest,
    decides,
    pinned,
    pipeline,
    prompts_of,
    settings_of,
)
from jali.experiments.storage import write_json

if TYPE_CHECKING:
    from jali.generation import RunFolder, Settings, Tick

log = logging.getLogger("jali")
KIND, CLIPS = "jali-quality", "clips"


@dataclass(frozen=True, slots=True)
class Quality:
    """Clip by clip, so that whatever ends it costs one clip at most.

    `quality.json` holds nothing of the machine: the same clips give the same file.
    """

    name: str = "quality"

    def needed(self, experiment: Experiment) -> str:  # noqa: ARG002
        return ""

    def weight(self, experiment: Experiment) -> float:
        count = len(experiment.prompts) if experiment.prompts else experiment.num_prompts
        return count * (1 + len(experiment.variants)) * (experiment.steps or 1)

    def inputs(self, experiment: Experiment, folder: Path) -> Mapping[str, Any]:
        return decides(experiment) | attention_of(experiment) | {
            "prompts": list(prompts_of(experiment)),
            "metrics": None if experiment.metrics is None else list(experiment.metrics),
            "book": book_digest(experiment, folder),
        }  # fmt: skip

    def run(self, context: Context) -> Sequence[Path]:
        e = context.experiment
        with pinned(e):
            galleries = _galleries(context)
            path = context.folder / "quality.json"
            if context.writes:
                rows = [_row(context, galleries, variant) for variant in e.variants]
                facts = {
                    "kind": KIND, "version": 1, "tag": e.tag, "model": e.model, "steps": e.steps,
                    "seed": e.seed, "prompts": list(prompts_of(e)), "rows": rows,
                }  # fmt: skip
                write_json(path, facts)
        clips = context.folder / CLIPS
        names = {DENSE, *e.variants}
        made = [p for p in sorted(clips.glob("*/*")) if p.is_file() and p.parent.name in names]
        return [path, *(p for p in made if not p.name.startswith("."))]


def _galleries(context: Context) -> dict[str, RunFolder]:
    """The run folder of dense and of every variant, complete."""
    from jali.generation import produce

    e, prompts = context.experiment, prompts_of(context.experiment)
    names = (DENSE, *e.variants)
    pipe, found = pipeline(context), {}
    for number, variant in enumerate(names):
        folder = context.folder / CLIPS / variant
        settings = settings_of(e, variant, context.folder)
        if context.writes:
            resolved = settings.resolve(pipe)
            _clear_others(folder, resolved, prompts)
            if variant == DENSE:
                lender = borrow(folder, resolved, prompts, context.folder.parent)
                if lender is not None:
                    log.info("the dense clips are those of %s", lender)

        def told(tick: Tick, number: int = number, variant: str = variant) -> None:
            clips = number * tick.clips + tick.clip
            what = f"{variant}, clip {tick.clip + 1} of {tick.clips}"
            total = len(names) * tick.clips * tick.steps
            context.progress(clips * tick.steps + tick.step, total, what)

        found[variant] = produce(pipe, prompts, settings, folder, told)
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


def _row(context: Context, galleries: Mapping[str, RunFolder], variant: str) -> dict[str, Any]:
    from jali.evaluation.quality.evaluation import evaluate
    from jali.evaluation.quality.result import write_evaluation

    e, gallery = context.experiment, galleries[variant]
    device = str(gallery.settings.device)
    found = evaluate(galleries[DENSE].folder, gallery.folder, e.metrics, device=device)
    write_evaluation(found, gallery.folder / "metrics.json")
    facts = found.to_dict()
    sparse = [clip.sparse_cost for clip in gallery.clips if clip.sparse_cost is not None]
    return {
        "variant": variant,
        "budget": gallery.settings.budget,
        "cost": _mean([clip.cost for clip in gallery.clips]),
        "sparse_cost": _mean(sparse) if sparse else None,
        "faults": {
            name: sum(pair["checks"][name] for pair in facts["pairs"])
            for name in ("black", "frozen", "nan")
        },
        "unavailable": facts["unavailable"],
        **facts["summary"],
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 6)
