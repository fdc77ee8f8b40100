"""The demo as a test calls it: nano with random weights, at sizes that take no time."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))


@pytest.fixture(scope="session")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the one in the package, but for what is in it."""
    pytest.importorskip("diffusers")
    pytest.importorskip("av")
    import checkpoints

    return checkpoints.save("nano", tmp_path_factory.mktemp("nano"))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch, weights: Path) -> tuple[str, ...]:
    """2×4×4 tokens in place of either size: everything happens, and nothing is sparse."""
    from jali.evaluation.demo import clips

    for size in (clips.FULL, clips.QUICK):
        for name, value in (("height", 32), ("width", 32), ("num_frames", 5)):
            monkeypatch.setitem(size, name, value)
    return (f"--path={weights}", "--steps=1")
