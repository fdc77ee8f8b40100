"""A small Wan pipeline, and a tuning on it: three steps, four prompts."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
for package in ("diffusers", "av", "jinja2"):
    pytest.importorskip(package)
for folder in ("arena", "integration"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))

from tiny_arena import BLOCKS, MODEL, SMALL  # noqa: E402

PROMPTS = ("a red ball", "a blue cube", "a green cone", "a white dog", "a cat", "a car")


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import checkpoints

    return checkpoints.save(MODEL, tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="session")
def pipe(checkpoint: Path) -> Any:
    from jali.integration.models.pipeline import load_pipeline

    found = load_pipeline(MODEL, path=checkpoint, device="cpu")
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture
def tune(pipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    """`tune(output, …)`, where a clip takes a second and what its attention costs, times four."""
    import jali
    from jali.evaluation.arena import studio
    from jali.generation import Settings

    monkeypatch.setenv("JALI_WEIGHTS", str(tmp_path))  # no LPIPS: it takes longer than all
    make = studio.Studio.make

    def timed(self: Any, settings: Any, group: range) -> Any:
        from dataclasses import replace

        made = make(self, settings, group)
        spread = str(settings.attention)
        timed.made.append((settings.label, spread, settings.total, group.start))
        return replace(made, seconds=1 + 4 * made.cost)

    timed.made = []  # type: ignore[attr-defined]
    monkeypatch.setattr(studio.Studio, "make", timed)

    def call(output: Path, **changes: Any) -> Any:
        size = changes.pop("size", {})
        usual: dict[str, Any] = {"methods": [f"entropy{BLOCKS}"], "prompts": PROMPTS, "probes": 0}
        settings = Settings(MODEL, **SMALL | size)
        return jali.tune(pipe, settings=settings, output=output, **usual | changes)

    call.made = timed.made  # type: ignore[attr-defined]
    return call
