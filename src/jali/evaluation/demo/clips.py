"""One prompt, generated twice with the same seed by the model of this package: dense and sparse."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jali.clips.clip import read_clip, write_mp4
from jali.evaluation.demo.side_by_side import film, panels, write_strip
from jali.evaluation.quality.interval import Interval
from jali.evaluation.report import Comparison, render_page, write_page
from jali.generation import RunFolder, Settings, Tick, produce
from jali.generation.produce import load, warm_up
from jali.generation.settings import dense_twin
from jali.name import USUAL

MODEL = "nano"
PROMPT = "a large red checkered ball moves right over an olive wooden background"
METHOD, TOTAL = USUAL, 0.3
# All of it fits five minutes on two cores; fewer steps blur, more take longer.
STEPS, MOST_STEPS = 8, 50
FULL: dict[str, Any] = {"height": 192, "width": 320, "num_frames": 37}  # 10×24×40 = 9,600 tokens
QUICK: dict[str, Any] = {"height": 128, "width": 128, "num_frames": 33}  # 9×16×16 = 2,304 tokens
PACKAGES = {
    "diffusers": "diffusers", "transformers": "diffusers", "av": "quality", "jinja2": "report",
}  # fmt: skip
PAGE, FILM, STRIP = "index.html", "side-by-side.mp4", "strip.png"
METRICS = ("psnr", "ssim")


def why_not(path: str | None = None) -> str | None:
    """Why the model cannot run in this installation, as a clause; None where it can."""
    from jali.integration.models.registry import model_card

    for package, extra in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            return f"the model needs {package} (pip install 'jali[{extra}]')"
    if path is None and not (Path(model_card(MODEL).location) / "model_index.json").is_file():
        return f"this installation came without the weights of {MODEL}"
    return None


def demo_settings(
    quick: bool = False,
    method: str | None = None,
    budget: float | None = None,
    steps: int | None = None,
    recipe: str | Path | None = None,
    **others: Any,
) -> Settings:
    """The sparse run, resolved: 0.3 of all attention work along a falling schedule, a budget after
    dense first steps, or a recipe. Everything that cannot be is refused before weights are read."""
    if method == "dense":
        raise ValueError("method is compared with dense, so it is another one, got 'dense'")
    if steps is not None and not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"steps must be 1 to {MOST_STEPS}, got {steps}")
    return Settings(
        model=MODEL,
        method=METHOD if method is None and recipe is None else method,
        budget=budget,
        total=TOTAL if budget is None and recipe is None else None,
        recipe=None if recipe is None else str(recipe),
        steps=steps or STEPS,
        **(QUICK if quick else FULL),
        **others,
    ).resolve()


def generate_both(
    settings: Settings,
    prompt: str,
    folder: Path,
    progress: Callable[[str, Tick], None] = lambda *_: None,
) -> tuple[RunFolder, RunFolder]:
    """Two run folders, `dense` and the method's name, from the same noise on one pipeline.

    `progress` hears the method and where its run stands.
    """
    pipe, both = load(settings), (dense_twin(settings), settings)
    warm_up(pipe, both, prompt)  # what happens at first use is nobody's speed

    def make(own: Settings) -> RunFolder:
        tell, warm = functools.partial(progress, own.label), True
        return produce(pipe, [prompt], own, folder / own.label, tell, warm)

    dense, sparse = (make(own) for own in both)
    return dense, sparse


def write_files(folder: Path, runs: Sequence[RunFolder], comparison: Comparison) -> None:
    """Film, strip and page of both runs."""
    records = [run.clips[0] for run in runs]
    clips = [read_clip(run.path(clip.lossless)) for run, clip in zip(runs, records, strict=True)]
    names = [run.name for run in comparison.runs]
    titles = [f"{name} · {c.seconds:.1f} s" for name, c in zip(names, records, strict=True)]
    shown = panels(clips[0], clips[1], titles)
    write_mp4(folder / FILM, film(shown), records[0].fps)
    write_strip(folder / STRIP, shown)
    write_page(folder / PAGE, render_page(comparison))


def facts_of(runs: tuple[RunFolder, RunFolder], comparison: Comparison) -> dict[str, Any]:
    """Everything that was found, and what it was measured on; a PSNR of None is infinite."""
    sparse, found = runs[1], comparison.rows()[1]
    told = ("budget", "cost", "sparse_cost", "seconds", "seconds_transformer", "summary")
    both = {
        what: {
            "name": row.name,
            **{key: getattr(run.clips[0], key) for key in told},
            "video": f"{run.folder.name}/{run.clips[0].video}",
        }
        for what, run, row in zip(("dense", "sparse"), runs, comparison.rows(), strict=True)
    }
    numbers = {
        "speed_up": found.speed_up,
        "speed_up_transformer": found.speed_up_transformer,
        **{name: found.metrics[name] for name in METRICS},
    }
    return {
        "jali": sparse.jali,
        "prompt": sparse.clips[0].prompt,
        "settings": sparse.settings.to_dict(),
        "machine": sparse.machine,
        "versions": sparse.versions,
        **both,
        **{key: _rounded(mean) for key, mean in numbers.items()},
    }


def unknown_words(prompt: str) -> str | None:
    """What a prompt does not say in the model's words, as a sentence; None where it says it all."""
    from jali.nano.grammar import COLOURS, MOTIONS, SHAPES, understand

    wish = understand(prompt)
    tables = {"colour": COLOURS, "shape": SHAPES, "motion": list(MOTIONS.values())}
    missing = [kind for kind in tables if getattr(wish, kind) is None]
    if not missing:
        return None
    known = "; ".join(f"{kind}: {', '.join(tables[kind])}" for kind in missing)
    return (
        f"the prompt names no {', '.join(missing)} that {MODEL} knows, so it makes one up ({known})"
    )


def _rounded(found: Interval | None) -> float | None:
    if found is None or found.mean is None or not math.isfinite(found.mean):
        return None
    return round(found.mean, 4)
