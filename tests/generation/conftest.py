"""A small Wan checkpoint and its pipeline, shared by the tests of this folder."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

MODEL = "wan-t2v-1.3b"
# 3×4×4 tokens in blocks of 16.
SMALL: dict[str, Any] = {
    "height": 64,
    "width": 64,
    "num_frames": 9,
    "steps": 3,
    "device": "cpu",
    "arguments": {"max_sequence_length": 16},
}
BLOCKS = {"q_block": 16, "k_block": 16}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    import checkpoints

    return checkpoints.save(MODEL, tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="session")
def pipe(checkpoint: Path) -> Any:
    from jali.integration.models.pipeline import load_pipeline

    found = load_pipeline(MODEL, path=checkpoint, device="cpu")
    found.set_progress_bar_config(disable=True)
    return found


@pytest.fixture(scope="session")
def settings() -> Callable[..., Any]:
    from jali.generation import Settings

    def make(**changes: Any) -> Settings:
        usual = {"method": "entropy", "budget": 0.4, "options": BLOCKS}
        return Settings(**{"model": MODEL, **SMALL, **usual, **changes})

    return make
