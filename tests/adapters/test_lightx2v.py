"""The mask generator for LightX2V, against the few names of LightX2V that it meets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

import jali
from jali.adapters import lightx2v
from jali.methods import METHODS

GRID = (3, 8, 16)
H, S, D = 3, 384, 16
SIZE = {"height": 8, "width": 16}
CANNOT = {"rd", "psa", "sol", "svg", "svg2", "dense"}


class Registry(dict[str, Any]):
    """LightX2V's own: a taken name is an error."""

    def register(self, target: Any, key: str) -> None:
        assert key not in self
        self[key] = target


@pytest.fixture
def generators(monkeypatch: pytest.MonkeyPatch) -> Registry:
    found = Registry()
    factory = ModuleType("lightx2v.utils.registry_factory")
    factory.SPARSE_MASK_GENERATOR_REGISTER = found  # type: ignore[attr-defined]
    utils = ModuleType("lightx2v.utils")
    utils.registry_factory = factory  # type: ignore[attr-defined]
    for module in (ModuleType("lightx2v"), utils, factory):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return found


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return tuple(torch.randn(S, H, D) for _ in range(3))  # type: ignore[return-value]


def generator(blocks: tuple[int, int] = (32, 32), frames: int | None = 3, **setting: Any) -> Any:
    return lightx2v.MaskGenerator(*blocks, SIZE | setting, frames)


def as_the_host_does(made: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The three calls of general_sparse_attn, and an operator that takes the map by its word."""
    mask = made(q, k)
    q, k, v = made.reorg(q, k, v)
    read = mask.bool().repeat_interleave(made.q_block_size, 2)[:, :, :S]
    read = read.repeat_interleave(made.k_block_size, 3)[..., :S]
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=read)
    return made.restore(out[0].transpose(0, 1).flatten(1))


def test_it_registers_once(generators: Registry) -> None:
    for _ in range(2):
        lightx2v.register()
    assert generators == {"jali": lightx2v.MaskGenerator}


def test_without_the_host_one_sentence_says_so() -> None:
    code = "from jali.adapters import lightx2v\nlightx2v.register()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: jali.adapters.lightx2v registers in LightX2V, which")


@pytest.mark.parametrize("name", sorted(set(METHODS) - CANNOT))
def test_every_method_it_takes_is_one_of_attend(name: str) -> None:
    """The host's three calls give what `attend` gives, whatever order the method lays tokens in."""
    more = {"pool_h": 4, "pool_w": 8} if name == "draft" else {}  # its tiles are its blocks
    made = generator(method=name, budget=0.4, **more)
    q, k, v = tensors()
    out = as_the_host_does(made, q, k, v)
    heads = (x.transpose(0, 1)[None] for x in (q, k, v))
    expected = jali.attend(*heads, method=made.method, grid=GRID, backend="reference")
    assert expected.plan is not None
    assert expected.plan.cost < 1
    torch.testing.assert_close(out, expected.out[0].transpose(0, 1).flatten(1))


def test_the_map_is_what_operators_take() -> None:
    mask = generator((64, 48), method="entropy", budget=0.3)(*tensors()[:2])
    assert mask.shape == (1, H, 6, 8)
    assert mask.dtype == torch.int8
    assert set(mask.unique().tolist()) == {0, 1}


def test_options_are_those_of_the_method() -> None:
    made = generator(method="entropy", budget=0.3, order={"tiled": [1, 4, 8]}, sharpness=2.0)
    assert made.method.token_order == jali.Tiled((1, 4, 8))
    assert made.method.sharpness == 2.0
    q, k, _ = tensors()
    made(q, k)
    assert not torch.equal(made.reorg(q, k, k)[0], q)


def test_the_configuration_of_the_page_is_one() -> None:
    page = (Path(__file__).parents[2] / "docs/hosts.md").read_text("utf-8")
    (text,) = re.findall(r'```json\n(\{"self_attn_1_type.*?)```', page, re.DOTALL)
    setting = json.loads(text)["general_sparse_attn_setting"]
    assert setting["sparse_mask_generator"] == lightx2v.NAME
    made = lightx2v.MaskGenerator(128, 128, setting["sparse_setting"], 21)
    assert made.grid.tokens == 32760
    assert made.method.mean_budget == 0.3


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "frames": ({"frames": None}, "needs attnmap_frame_num of the video in tokens"),
    "height": ({"height": None}, "needs height of the video in tokens"),
    "width": ({"width": 0}, "width"),
    "method": ({"method": "entrop"}, "sparse_setting: method must be .*got 'entrop'"),
    "option": ({"colour": 1}, r"sparse_setting.*colour"),
    "budget": ({"budget": 3}, "sparse_setting: budget"),
    "rd": ({"method": "rd"}, "rd cannot be a mask generator of LightX2V: it reads v"),
    "psa": ({"method": "psa"}, "psa cannot .*: it reads means of keys"),
    "tail": ({"tail": True}, "entropy cannot .*: it reads means of keys"),
    "probes": ({"probes": 64}, "entropy cannot .*: it corrects what comes of a map"),
    "svg2": ({"method": "svg2"}, "svg2 cannot .*: it orders every head for itself"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_told_when_the_model_is_made(name: str) -> None:
    setting, said = BAD[name]
    with pytest.raises(ValueError, match=said):
        generator(**setting)


def test_another_number_of_tokens_is_told() -> None:
    q, k, _ = tensors()
    with pytest.raises(ValueError, match="384"):
        generator(frames=4)(q, k)


def test_blocks_that_the_operator_does_not_have_are_told() -> None:
    q, k, _ = tensors()
    with pytest.raises(ValueError, match="plans in blocks of 48 × 48, and the operator computes"):
        generator((64, 48), method="rf_v2")(q, k)


def test_an_order_is_known_after_a_call() -> None:
    with pytest.raises(RuntimeError, match="none has been"):
        generator().restore(torch.zeros(S, H * D))
