"""What a call costs the host: questions with one answer are asked once."""

from __future__ import annotations

import traceback
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import tiny

import jali
from jali.attend import PreparedCall
from jali.backends import BACKENDS
from jali.integration import attachment, modes
from jali.integration.attachment import self_attentions

ROOT = Path(jali.__file__).parent


def inputs(t: float) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(2)
    return {
        "hidden_states": torch.randn(1, 16, 5, 32, 32, generator=generator),
        "encoder_hidden_states": torch.randn(1, 16, 32, generator=generator),
        "timestep": torch.tensor([t]),
        "return_dict": False,
    }


def test_backends_are_asked_once_for_every_kind_of_call(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.wan_transformer(4)
    asked: list[str] = []
    with torch.no_grad(), jali.sparse_processor_mode(model, 0.5, warmup_frac=1, steps=4) as run:
        for t in (900.0, 800.0):  # a dense step and a sparse one
            model(**inputs(t))
        for backend in BACKENDS.values():

            def why_not(self: Any, _task: Any) -> list[str]:
                asked.append(self.name)
                return []

            monkeypatch.setattr(type(backend), "why_not", why_not)
        for t in (700.0, 600.0):
            model(**inputs(t))
    assert asked == []
    assert {row.backend for row in run.stats().rows if row.reason is None} == {"torch"}


def test_gradients_on_is_no_obstacle_but_there_is_no_backward_pass() -> None:
    """Weights ask for gradients by default, and not everyone writes no_grad around a model."""
    model = tiny.wan_transformer(2)
    with torch.no_grad(), jali.sparse_processor_mode(model, 0.5, warmup_frac=0):
        expected = model(**inputs(500.0))[0]
    with jali.sparse_processor_mode(model, 0.5, warmup_frac=0):
        out = model(**inputs(500.0))[0]
    assert torch.equal(out, expected)
    with pytest.raises(RuntimeError, match="jali only does inference"):
        out.sum().backward()


def test_five_frames_lead_from_a_models_attention_to_the_data_path(monkeypatch: Any) -> None:
    found: list[list[str]] = []
    run = PreparedCall.run

    def watched(self: PreparedCall, *given: Any) -> Any:
        stack = traceback.extract_stack()
        found.append([frame.name for frame in stack if Path(frame.filename).is_relative_to(ROOT)])
        return run(self, *given)

    monkeypatch.setattr(PreparedCall, "run", watched)
    model = tiny.wan_transformer(2)
    with torch.no_grad(), jali.sparse_processor_mode(model, 0.4, warmup_frac=0, steps=3):
        model(**inputs(500.0))
    assert found
    assert all(len(frames) <= 5 for frames in found), found[0]


def test_entering_a_mode_looks_for_the_self_attentions_once(monkeypatch: Any) -> None:
    looked: list[Any] = []

    def watched(module: Any) -> list[Any]:
        looked.append(module)
        return self_attentions(module)

    for user in (attachment, modes):
        monkeypatch.setattr(user, "self_attentions", watched)
    model = tiny.wan_transformer(2)
    with jali.sparse_processor_mode(model, 0.4, warmup_frac=0, steps=3):
        assert looked == [model]
