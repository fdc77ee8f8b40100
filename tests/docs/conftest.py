"""Small models under the names that the pages use, so that every example runs on a CPU."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
for folder in ("integration", "report"):
    sys.path.insert(0, str(Path(__file__).parents[1] / folder))
sys.path.insert(0, str(Path(__file__).parent))

SAME = {"wan-t2v-14b": "wan-t2v-1.3b"}  # one small checkpoint serves both
SIZES: dict[str, Any] = {"height": 32, "width": 48, "num_frames": 5, "max_sequence_length": 16}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A small checkpoint of a model, by any of its names: the real layout, random weights."""
    pytest.importorskip("diffusers")
    root = tmp_path_factory.mktemp("checkpoints")

    def find(name: str) -> Path:
        import checkpoints

        from jali.integration.models.registry import model_card

        known = model_card(name).name
        known = SAME.get(known, known)
        return root / known if (root / known).exists() else checkpoints.save(known, root / known)

    return find


@pytest.fixture
def small(
    checkpoint: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Path]:
    """An empty folder to work in, where models are small and clips are short."""
    pytest.importorskip("diffusers")
    import diffusers
    import tiny
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

    from jali.backends import BACKENDS
    from jali.integration.families import FAMILIES
    from jali.integration.models import pipeline as models

    load, generate = models.load_pipeline, models.generate_video
    calibration = importlib.import_module("jali.maskbook.calibration")
    record = calibration.calibrate

    def load_small(name: str, **options: Any) -> Any:
        options |= {"path": checkpoint(name), "device": "cpu", "lora": None, "cpu_offload": False}
        pipe = load(name, **options)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    def generate_small(pipe: Any, prompt: str, model_name: str, **options: Any) -> Any:
        steps = min(options.pop("steps", 4), 4)
        return generate(pipe, prompt, model_name, steps=steps, **(options | SIZES))

    def calibrate_small(pipe: Any, prompts: Any, output: Any, **options: Any) -> Any:
        return record(pipe, prompts, output, **(options | SIZES | {"steps": 4}))

    class SmallPipeline(diffusers.WanPipeline):
        """A pipeline that makes small clips whatever it is asked for."""

        def __call__(self, prompt: str, **options: Any) -> Any:  # type: ignore[override]
            options |= SIZES | {"num_inference_steps": 3}
            return super().__call__(prompt, **options)

        def to(self, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG002
            return self

    def from_pretrained(*args: Any, **kwargs: Any) -> Any:  # noqa: ARG001
        pipe = SmallPipeline(**tiny.wan(2).components)
        pipe.set_progress_bar_config(disable=True)
        return pipe

    monkeypatch.setattr(models, "load_pipeline", load_small)
    monkeypatch.setattr(models, "generate_video", generate_small)
    monkeypatch.setattr(calibration, "calibrate", calibrate_small)
    monkeypatch.setattr(diffusers.WanPipeline, "from_pretrained", from_pretrained)
    monkeypatch.chdir(tmp_path)
    # What a page registers stays on that page.
    tables: list[dict[str, Any]] = [BACKENDS, FAMILIES]
    kept, active = [dict(table) for table in tables], Registry._active_backend
    yield tmp_path
    Registry._active_backend = active
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)
