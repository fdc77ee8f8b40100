"""Settings: defaults filled in, equal where the run is equal, strict everywhere."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")

from jali.generation import Settings
from jali.generation.settings import dense_twin
from jali.methods import METHODS, Schedule
from jali.presets import presets

Make = Callable[..., Settings]


@pytest.mark.parametrize("method", METHODS)
def test_resolving_is_done_once(method: str) -> None:
    budget = None if method == "dense" else 0.3
    asked = Settings("wan21_1.3b", method=method, budget=budget, device="cpu")
    found = asked.resolve()
    assert found.model == "wan-t2v-1.3b"  # another name of the same model is the same run
    assert (found.height, found.width, found.num_frames, found.steps) == (720, 1280, 69, 50)
    assert (found.device, found.dtype, found.budget) == ("cpu", "float32", budget or 1.0)
    again = Settings.from_dict(json.loads(json.dumps(found.to_dict()))).resolve()
    assert again == found
    assert again.digest == found.digest
    assert again.make_method() == asked.make_method()
    assert found.label == method


def test_every_preset_is_written_out_in_full() -> None:
    for preset in presets():
        asked = Settings(str(preset.model), preset=preset.name, device="cpu")
        found = asked.resolve()
        assert found.make_method() == preset.method, preset
        assert found.resolve() == found, preset
        inner = preset.method.inner if isinstance(preset.method, Schedule) else preset.method
        assert found.method == inner.name


def test_what_is_asked_is_what_runs() -> None:
    found = Settings(
        "wan-t2v-1.3b", method="rf_v2", budget=0.25, warmup_frac=0.5, dense_first_layer=False,
        device="cpu",
    ).resolve()  # fmt: skip
    method: Any = found.make_method()
    assert method.inner.sparsity == 0.75
    assert (method.dense_steps, method.dense_layers) == (0.5, ())
    # A preset's own schedule, unless another is asked for.
    changed = Settings("cogvideox-5b", preset="psa_balanced", warmup_frac=0.1, device="cpu")
    assert changed.resolve().make_method().dense_steps == 0.1  # type: ignore[attr-defined]


def test_options_are_read_as_the_method_wants_them() -> None:
    options = {"order": {"tiled": [2, 8, 8]}, "sharpness": 2, "budget": {"mean": 0.3}}
    found: Any = Settings("nano", method="entropy", options=options, device="cpu").make_method()
    from jali import Budget, Tiled

    assert found.inner.order == Tiled((2, 8, 8))
    assert found.inner.budget == Budget(0.3)
    assert found.inner.sharpness == 2


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"model": "wan-t2v-2b"}, "unknown model 'wan-t2v-2b'; did you mean 'wan-t2v-14b'"),
        ({"method": "entrop"}, "unknown method or preset 'entrop'; did you mean 'entropy'?"),
        ({"budget": 1.5}, "budget must be a number above 0 and at most 1, got 1.5"),
        ({"budget": 0}, "budget must be a number above 0"),
        ({"warmup_frac": 1.5}, r"warmup_frac must be a share in .*, got 1\.5"),
        ({"seed": -1}, "seed must be a whole number of at least 0, got -1"),
        ({"steps": 0}, "steps must be a count of at least 1, got 0"),
        ({"height": 64.5}, "height must be a count of at least 1, got 64.5"),
        ({"guidance": float("nan")}, "guidance must be a number of at least 0, got nan"),
        ({"dense_first_layer": "yes"}, "dense_first_layer must be true or false, got .yes."),
        ({"path": " "}, "path must be text, got"),
        ({"method": "dense", "budget": 0.5}, "no budget but 1"),
        ({"preset": "psa_fast"}, "no preset 'psa_fast'"),
        ({"preset": "psa_balanced", "method": "rf_v2"}, "is of the method psa"),
        ({"preset": "psa_balanced", "options": {"floor": 1}}, "a preset is complete"),
        ({"options": {"colour": 1}}, "has no key 'colour'"),
        ({"options": {"samples": "many"}}, "samples"),
        ({"config": "none.yaml"}, "no preset file"),
        ({"method": "cached"}, "give masks"),
        ({"masks": "none.safetensors"}, r"none\.safetensors"),
        ({"masks": "x", "preset": "psa_balanced"}, "two methods at once"),
        ({"masks": "x", "method": "psa"}, "not by psa"),
        ({"device": "tpu"}, "device"),
        ({"dtype": "int8"}, "dtype must be one of"),
        ({"context_parallel": 0}, "a count of at least 1"),
        ({"context_parallel": 2, "tensor_parallel": 2}, "do not go together"),
    ],
)
def test_bad_settings(given: dict[str, Any], words: str) -> None:
    with pytest.raises((ValueError, RuntimeError, OSError), match=words):
        Settings(**{"model": "wan-t2v-1.3b", "device": "cpu", **given}).resolve()


def test_settings_of_a_version_that_knew_fewer_options_are_the_same() -> None:
    now = Settings("nano", method="psa", device="cpu").resolve()
    before = now.to_dict()
    before["attention"] = json.loads(json.dumps(before["attention"]))
    del before["attention"]["options"]["aligned"]
    assert now.differences(Settings.from_dict(before)) == {}
    before["attention"]["options"]["seed"] = 1
    assert set(now.differences(Settings.from_dict(before))) == {"attention"}


def test_what_is_not_compiled_is_what_it_was_before() -> None:
    """Neither the word nor its absence makes another run of one that was made without."""
    plain = Settings("nano", method="psa", device="cpu").resolve()
    known = {name: value for name, value in plain.to_dict().items() if name != "compile"}
    assert Settings.from_dict(known).digest == plain.digest
    assert replace(plain, compile=False).resolve().digest == plain.digest
    compiled = replace(plain, compile=True).resolve()
    assert compiled.digest != plain.digest
    assert plain.differences(compiled) == {"compile": (None, True)}


def test_a_written_method_is_not_half_changed() -> None:
    found = Settings("wan-t2v-1.3b", method="entropy", device="cpu").resolve()
    with pytest.raises(
        ValueError, match=r"warmup_frac is 0.5, but the method written out .* has 0;"
    ):
        replace(found, warmup_frac=0.5).resolve()
    with pytest.raises(ValueError, match=r"budget is 0\.3, but the method"):
        replace(found, budget=0.3).resolve()


def test_the_dense_twin_differs_in_attention_alone() -> None:
    found = Settings("cogvideox-5b", preset="psa_balanced", seed=7, device="cpu").resolve()
    twin = dense_twin(found)
    assert twin.label == "dense"
    assert twin.resolve() == twin
    allowed = {"method", "preset", "budget", "warmup_frac", "dense_first_layer", "attention"}
    assert set(twin.differences(found)) <= allowed


def test_the_config_of_a_file_is_in_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = "presets:\n  mine:\n    method: rf_v2\n    options: {sparsity: %s}\n"
    file.write_text(text % 0.6)
    one = Settings("wan-t2v-1.3b", preset="mine", config=str(file), device="cpu").resolve()
    assert one.budget == pytest.approx(0.4)
    file.write_text(text % 0.7)
    two = Settings("wan-t2v-1.3b", preset="mine", config=str(file), device="cpu").resolve()
    assert "attention" in one.differences(two)
    assert one.digest != two.digest
