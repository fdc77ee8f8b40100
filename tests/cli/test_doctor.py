"""`jali doctor`: what runs, why not the rest, what to expect."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

from jali.backends import BACKENDS
from jali.integration.models.registry import MODELS

Jali = Callable[..., Any]


def test_every_model_has_a_workload() -> None:
    expected = {
        "wan-t2v-1.3b": 21 * 30 * 52,
        "wan2.2-t2v-a14b": 21 * 45 * 80,
        "wan2.2-ti2v-5b": 31 * 22 * 40,
        "cogvideox-5b": 13 * 30 * 45 + 226,
        "cogvideox1.5-5b": 11 * 48 * 85 + 226,
        "hunyuan-video": 33 * 34 * 60 + 256,
        "ltx-video": 21 * 16 * 22,
        "flux.1-dev": 64 * 64 + 512,
        "nano": 10 * 24 * 40,
    }
    for name, tokens in expected.items():
        assert MODELS[name].tokens == tokens, name


def test_on_a_cpu(jali: Jali) -> None:
    found = json.loads(jali("doctor", "--device", "cpu", "--json").stdout)
    assert found["device"]["type"] == "cpu"
    assert [row["name"] for row in found["backends"]] == list(BACKENDS)
    rows = {row["name"]: row for row in found["backends"]}
    assert rows["torch"]["runs"]
    assert rows["torch"]["why_not"] == []
    assert not rows["triton"]["runs"]
    assert "needs a CUDA device" in " ".join(rows["triton"]["why_not"])
    assert [row["name"] for row in found["models"]] == list(MODELS)
    for row in found["models"]:
        gains = row["predicted_speedup"]
        assert 1 < gains["0.5"] < gains["0.3"] < 1 / (0.2 + 0.8 * 0.3), row
    text = " ".join(jali("doctor", "--device", "cpu").stdout.split())
    assert "wan-t2v-1.3b" in text
    assert "jali[fa4]" in text or "flash-attn-4" not in text  # no markup is swallowed


def test_on_a_device_that_was_never_measured(jali: Jali, monkeypatch: pytest.MonkeyPatch) -> None:
    from jali.integration import forecast

    monkeypatch.setattr(forecast, "device_name", lambda _: "Abacus 9000")
    found = json.loads(jali("doctor", "--device", "cpu", "--json").stdout)
    assert all(v is None for m in found["models"] for v in m["predicted_speedup"].values())
    assert "not measured on this device" in jali("doctor", "--device", "cpu").stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there(jali: Jali) -> None:
    done = jali("doctor", "--device", "cuda")
    assert done.exit_code == 2
    assert done.stderr == "jali: --device is cuda, but torch sees no GPU here\n"


def test_the_proof(jali: Jali, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nano, dense and sparse; here another small Wan stands in for its weights."""
    import importlib

    import tiny

    doctor = importlib.import_module("jali.cli.doctor")
    smaller = {"num_frames": 17, "steps": 3}
    monkeypatch.setattr(doctor, "PROOF", doctor.PROOF | smaller)
    module = importlib.import_module("jali.generation.produce")
    monkeypatch.setattr(module, "load", lambda _settings: tiny.wan(layers=3))
    done = jali("doctor", "--device=cpu", "--run", "--json")
    assert done.exit_code == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    assert run["problem"] == ""
    assert run["dense_cost"] == 1 > run["sparse_cost"]
    assert run["sparse_transformer_seconds"] > 0
    assert "rd: asked 0.30" in run["sparse_summary"]
    # A run without a sparse call proves nothing, and says so.
    monkeypatch.setattr(module, "load", lambda _settings: tiny.wan(layers=1))
    done = jali("doctor", "--device=cpu", "--run")
    assert done.exit_code == 1
    assert done.stderr.endswith("jali: no attention call of nano was sparse\n")
