"""Names that are known without torch are those of the registries, and a device is told by name."""

from __future__ import annotations

import subprocess
import sys

import pytest

from jali import name
from jali.backends import BACKENDS
from jali.device import check_device, may_have_gpu
from jali.error import ArgumentError
from jali.evaluation.quality.evaluation import MEASURES
from jali.integration.models.registry import MODELS
from jali.integration.models.size import usual_strides
from jali.methods import METHODS
from jali.presets import presets


def test_names_are_those_of_the_registries(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        for module in ("jali.methods", "jali.backends"):
            patch.delitem(sys.modules, module)
        without_torch = name.method_names(), name.backend_names()
    assert without_torch == (tuple(METHODS), ("auto", *BACKENDS))
    assert set(name.METRICS) <= set(MEASURES)
    for model in MODELS:
        assert name.preset_names(model) == tuple(preset.name for preset in presets(model))
    assert name.preset_names() == tuple(sorted({preset.name for preset in presets()}))


def test_a_method_from_outside_has_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(METHODS, "mine", METHODS["local"])
    assert "mine" in name.method_names()


def test_names_need_no_torch() -> None:
    code = (
        "import sys; from jali.name import *; from jali.device import may_have_gpu;"
        "from jali.integration.models.registry import model_card;"
        "from jali.generation.settings import Settings;"
        "model_card('wan21_1.3b'); may_have_gpu(); Settings('nano', budget=0.3).check();"
        "print('torch' in sys.modules)"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "False\n"


@pytest.mark.parametrize("device", ["cpu", "cpu:0", "mps", "meta"])
def test_devices(device: str) -> None:
    check_device(device)


@pytest.mark.parametrize("device", ["graphics", "", "cuda:", "cuda:x", "cuda:-1", "CPU", ":0"])
def test_no_devices(device: str) -> None:
    with pytest.raises(ArgumentError, match="must be cuda or cpu"):
        check_device(device)


def test_a_gpu_that_torch_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    check_device("cuda:1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert not may_have_gpu()
    with pytest.raises(ArgumentError, match="device is cuda:1, but torch sees no GPU here"):
        check_device("cuda:1")


def test_sizes_of_the_models_own_checkpoints() -> None:
    """As their pipelines would say, which are not here."""
    found = {name: usual_strides(card) for name, card in MODELS.items()}
    plain = {name: (s.height, s.width, s.frames) for name, s in found.items()}
    assert plain == {
        "wan-t2v-1.3b": (16, 16, 4), "wan-t2v-14b": (16, 16, 4), "wan2.2-ti2v-5b": (32, 32, 4),
        "wan2.2-t2v-a14b": (16, 16, 4), "cogvideox-5b": (16, 16, 4), "cogvideox1.5-5b": (16, 16, 4),
        "hunyuan-video": (16, 16, 4), "hunyuan-video-1.5": (16, 16, 4), "ltx-video": (32, 32, 8),
        "flux.1-dev": (16, 16, 0), "nano": (16, 16, 4), "qwen-image": (16, 16, 0),
    }  # fmt: skip
    for model, card in MODELS.items():  # what a model makes without asking, it can make
        assert card.height % found[model].height == card.width % found[model].width == 0


def test_an_argument_that_cannot_be_is_said_with_any_name() -> None:
    error = ArgumentError("steps", "does not go with `masks`, got 3")
    assert isinstance(error, ValueError)
    assert str(error) == "steps does not go with masks, got 3"
    assert error.said_as("--{}".format) == "--steps does not go with --masks, got 3"
    assert str(ArgumentError("model", ": unknown model 'x'")) == "model: unknown model 'x'"
