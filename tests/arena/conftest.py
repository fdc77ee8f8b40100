"""A small Wan pipeline, and an arena on it: four rows, one of them as published, three prompts."""

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

from tiny_arena import METHODS, MODEL, PROMPTS, SMALL  # noqa: E402


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


@pytest.fixture(scope="session")
def play(pipe: Any) -> Callable[..., Any]:
    """`play(folder, …)`: an arena of this size."""
    import jali
    from jali.generation import Settings

    def call(folder: Path, **changes: Any) -> Any:
        size = changes.pop("size", {})
        usual = {"methods": METHODS, "totals": [0.71], "prompts": PROMPTS, "batch": 2}
        settings = Settings(MODEL, **SMALL | size)
        return jali.arena(pipe, settings=settings, output=folder, **usual | changes)

    return call


@pytest.fixture(scope="session")
def made(play: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished one, not to be changed."""
    folder = tmp_path_factory.mktemp("arena") / "whole"
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("JALI_WEIGHTS", str(folder.parent))  # no LPIPS: it takes longer than all
        play(folder)
    return folder
