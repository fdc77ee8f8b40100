"""One prompt, generated twice with the same seed by the model of this package: dense and sparse."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jali.generation import RunFolder, Settings, Tick, produce
from jali.generation.produce import attention, check_sizes, frames_of, load
from jali.generation.settings import dense_twin

MODEL = "nano"
PROMPT = "a large red striped ball moves right over a grey cloudy background"
METHOD, BUDGET = "entropy", 0.3
# All of it fits five minutes on two cores; fewer steps blur, more take longer.
STEPS, MOST_STEPS = 8, 50
# Before anything is timed: what happens at first use is nobody's speed. Two steps, so that one of
# them is sparse.
WARM_UP: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 5, "steps": 2}
PACKAGES = {"diffusers": "diffusers", "transformers": "diffusers", "av": "quality"}

Follow = Callable[[str, Tick], None]


@dataclass(frozen=True, slots=True)
class Size:
    """Of a clip, in pixels and frames."""

    height: int
    width: int
    frames: int


FULL = Size(192, 320, 37)  # 10×24×40 = 9,600 tokens
QUICK = Size(128, 128, 33)  # 9×16×16 = 2,304 tokens


def why_not(path: str | None = None) -> str | None:
    """Why the model cannot run in this installation, as a clause; None where it can."""
    from jali.integration.models.registry import model_card

    for package, extra in PACKAGES.items():
        if importlib.util.find_spec(package) is None:
            return f"the model needs {package} (pip install 'jali[{extra}]')"
    folder = Path(model_card(MODEL).location)
    if path is None and not (folder / "model_index.json").is_file():
        return f"this installation came without the weights of {MODEL}"
    return None


def settings_of(
    size: Size,
    method: str = METHOD,
    budget: float = BUDGET,
    steps: int = STEPS,
    seed: int = 0,
    path: str | None = None,
) -> Settings:
    """The sparse run, resolved; everything that cannot be is refused before weights are read."""
    from jali.methods import METHODS, Dense, near

    sparse = [name for name, kind in METHODS.items() if kind is not Dense]
    if method not in sparse:
        raise ValueError(
            f"method is compared with dense, so it is one of {', '.join(sparse)}, got "
            f"{method!r}{'' if method == 'dense' else near(method, sparse)}"
        )
    if not 0 < budget <= 1:
        raise ValueError(f"budget must be above 0 and at most 1, got {budget}")
    if not 1 <= steps <= MOST_STEPS:
        raise ValueError(f"steps must be 1 to {MOST_STEPS}, got {steps}")
    if seed < 0:
        raise ValueError(f"seed must be at least 0, got {seed}")
    return Settings(
        model=MODEL,
        path=path,
        method=method,
        budget=budget,
        steps=steps,
        seed=seed,
        height=size.height,
        width=size.width,
        num_frames=size.frames,
    ).resolve()


def generate_both(
    settings: Settings,
    prompt: str,
    folder: Path,
    follow: Follow = lambda *_: None,
    pipe: Any = None,
) -> tuple[RunFolder, RunFolder]:
    """Two run folders, `dense` and the method's name, on one pipeline (loaded where none is given).

    Both start from the same noise.
    """
    pipe = load(settings) if pipe is None else pipe
    check_sizes(pipe, settings)
    dense = dense_twin(settings)
    for own in (dense, settings):
        _warm_up(pipe, own, prompt)

    def made(own: Settings) -> RunFolder:
        return produce(
            pipe, [prompt], own, folder / own.label, lambda tick: follow(own.label, tick)
        )

    return made(dense), made(settings)


def _warm_up(pipe: Any, settings: Settings, prompt: str) -> None:
    """Quietly: what there is to say about so small a clip is nobody's concern."""
    log = logging.getLogger("jali")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        with attention(pipe, settings):
            frames_of(pipe, replace(settings, **WARM_UP), prompt, settings.seed)
    finally:
        log.setLevel(level)


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
