"""A configuration beside a model: saved, loaded, shared, and strict."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("huggingface_hub")

import huggingface_hub

from jali import Budget, Entropy, Psa, Raster, Schedule
from jali.integration.config import CONFIG_NAME, SparseAttentionConfig
from jali.presets import load_preset, presets

CONFIG = SparseAttentionConfig(
    Schedule(Entropy(Budget(0.4), k_block=64), dense_steps=0.2, dense_layers=(0, -1)),
    backend="torch",
    model="wan-t2v-1.3b",
)


def test_saved_and_loaded_it_is_the_same(tmp_path: Path) -> None:
    file = CONFIG.save_pretrained(tmp_path / "model")
    assert file == tmp_path / "model" / CONFIG_NAME
    assert SparseAttentionConfig.from_pretrained(tmp_path / "model") == CONFIG
    assert SparseAttentionConfig.from_pretrained(file) == CONFIG
    assert SparseAttentionConfig.from_pretrained(tmp_path, subfolder="model") == CONFIG
    data = json.loads(file.read_text())
    assert data["_class_name"] == "SparseAttentionConfig"
    assert data["schedule"]["dense_steps"] == 0.2
    assert data["options"]["samples"] == 4  # defaults are written too: they may change one day


@pytest.mark.parametrize("preset", presets(), ids=lambda p: f"{p.model}-{p.name}")
def test_every_preset_can_be_saved(preset: Any, tmp_path: Path) -> None:
    config = SparseAttentionConfig.from_preset(preset)
    config.save_pretrained(tmp_path)
    assert SparseAttentionConfig.from_pretrained(tmp_path) == config
    assert config.method == load_preset(preset.name, preset.model).method


def test_from_the_hubs_cache(tmp_path: Path) -> None:
    root = tmp_path / "models--me--sparse-wan"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text("1" * 40)
    CONFIG.save_pretrained(root / "snapshots" / ("1" * 40))
    found = SparseAttentionConfig.from_pretrained(
        "me/sparse-wan", cache_dir=tmp_path, local_files_only=True
    )
    assert found == CONFIG
    with pytest.raises(OSError, match="me/other is neither a folder with a"):
        SparseAttentionConfig.from_pretrained("me/other", cache_dir=tmp_path, local_files_only=True)


def test_push_to_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, dict[str, Any]]] = []

    @dataclass
    class Answer:
        repo_id: str = "me/sparse-wan"
        commit_url: str = "the commit"

    class Api:
        def __init__(self, token: str | None) -> None:
            assert token == "secret"

        def create_repo(self, repo_id: str, **options: Any) -> Answer:
            calls.append((repo_id, options))
            return Answer()

        def upload_file(self, **options: Any) -> Answer:
            calls.append((options.pop("repo_id"), options))
            return Answer()

    monkeypatch.setattr(huggingface_hub, "HfApi", Api)
    CONFIG.save_pretrained(
        tmp_path / "sparse-wan", push_to_hub=True, token="secret", private=True, subfolder="sub"
    )
    (made, options), (repo, upload) = calls
    assert made == "sparse-wan"  # as diffusers names it: after the folder
    assert options == {"private": True, "exist_ok": True}
    assert repo == "me/sparse-wan"
    assert upload["path_in_repo"] == f"sub/{CONFIG_NAME}"
    sent = json.loads(upload["path_or_fileobj"])
    assert SparseAttentionConfig.from_dict(sent) == CONFIG
    with pytest.raises(TypeError, match=r"\['private'\] only mean something with push_to_hub"):
        CONFIG.save_pretrained(tmp_path, private=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"backends": "torch"}, "has no key 'backends'; did you mean 'backend'?"),
        ({"backend": "cuda"}, "'cuda'"),
        ({"format": 2}, "has format 2, written by jali"),
        ({"_class_name": "WanTransformer3DModel"}, "is a WanTransformer3DModel, not a"),
        ({"method": "entropi"}, ".method is unknown: 'entropi'; did you mean 'entropy'?"),
        ({"options": {"budget": 2}}, ".options.budget: mean must be in [0, 1], got 2"),
        ({"options": {"sparsity": 0.5}}, ".options has no key 'sparsity'"),
        ({"schedule": {"dense_layers": 0}}, ".schedule.dense_layers must be a list, got 0"),
        ({"model": 3}, ".model must be text, got 3"),
    ],
)
def test_a_wrong_file_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = CONFIG.save_pretrained(tmp_path)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        SparseAttentionConfig.from_pretrained(tmp_path)
    assert CONFIG_NAME in str(caught.value)


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"holds no {CONFIG_NAME}"):
        SparseAttentionConfig.from_pretrained(tmp_path)
    (tmp_path / CONFIG_NAME).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        SparseAttentionConfig.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match="is a file"):
        CONFIG.save_pretrained(tmp_path / CONFIG_NAME)
    with pytest.raises(TypeError, match="method must be a Method"):
        SparseAttentionConfig("entropy")  # type: ignore[arg-type]


def test_it_may_lie_beside_a_model(tmp_path: Path) -> None:
    """Neither file disturbs the other."""
    pytest.importorskip("diffusers")
    pytest.importorskip("transformers")
    import checkpoints

    from jali.integration.models.pipeline import load_pipeline

    folder = checkpoints.save("wan-t2v-1.3b", tmp_path / "wan")
    index = (folder / "model_index.json").read_text()
    psa = SparseAttentionConfig(Psa(order=Raster()))
    psa.save_pretrained(folder)
    assert (folder / "model_index.json").read_text() == index
    pipe = load_pipeline("wan-t2v-1.3b", path=folder, device="cpu")
    pipe.save_pretrained(tmp_path / "again")
    shutil.copy(folder / CONFIG_NAME, tmp_path / "again")
    assert SparseAttentionConfig.from_pretrained(tmp_path / "again") == psa
