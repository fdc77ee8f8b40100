"""A small Wan checkpoint, and the command line as a test calls it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

# 3×4×4 tokens.
SMALL = (
    "--height=64", "--width=64", "--num-frames=9", "--steps=3", "--device=cpu",
    "--argument=max_sequence_length=16",
)  # fmt: skip


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("diffusers")
    import checkpoints

    return checkpoints.save("wan-t2v-1.3b", tmp_path_factory.mktemp("wan"))


@pytest.fixture
def small(checkpoint: Path) -> tuple[str, ...]:
    return ("--model=wan-t2v-1.3b", f"--path={checkpoint}", *SMALL)
