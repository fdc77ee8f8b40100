"""The node against ComfyUI's calling rules, on small models with its names."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_comfyui import (
    MODELS,
    OVERRIDE,
    Flux,
    HunyuanVideo,
    LTXVModel,
    MochiModel,
    Patcher,
    QwenImageTransformer2DModel,
    WanModel,
    sample,
)  # fmt: skip
from torch import Tensor, nn
from workflow_form import widgets

import jali
from jali.comfyui import NODE_CLASS_MAPPINGS, NODE_DISPLAY_NAME_MAPPINGS
from jali.comfyui.choice import patch_of, read_blocks, read_options
from jali.comfyui.node import SparseAttention, Statistics
from jali.comfyui.patch import step_of
from jali.integration.stats import CallRow, Stats

SHIM = Path(__file__).parents[2] / "comfyui"
ASKED = {
    "method": "entropy", "spend": "budget", "share": 0.5, "start_percent": 0.0, "end_percent": 1.0,
    "dense_blocks": "", "min_tokens": 0, "on_error": "error", "verbose": False,
    "options": "q_block: 16, k_block: 16",
}  # fmt: skip
IMAGES = (Flux, QwenImageTransformer2DModel)


def latents(kind: type[nn.Module], batch: int = 1) -> Tensor:
    """Odd sides, padded up where the model has patches."""
    torch.manual_seed(0)
    shape = {Flux: (15, 32), QwenImageTransformer2DModel: (1, 15, 32), LTXVModel: (3, 8, 10)}
    return torch.randn(batch, 4, *shape.get(kind, (3, 15, 20)))


def texts(tokens: int = 7) -> list[Tensor]:
    torch.manual_seed(2)
    return [torch.randn(1, tokens, 8) for _ in range(2)]


def made(kind: type[nn.Module], **asked: Any) -> tuple[Patcher, Patcher]:
    """A model that has run once, and the same with the node behind it."""
    plain = Patcher(kind())
    sample(plain, latents(kind), texts(), steps=1)  # lazy layers
    return plain, patched(plain, **asked)


def patched(model: Patcher, **asked: Any) -> Patcher:
    (found,) = SparseAttention().patch(model, **{**ASKED, **asked})  # type: ignore[arg-type]
    return found


def stats(model: Patcher) -> Stats:
    patch = patch_of(model)
    assert patch is not None
    return patch.run.stats()


def sparse(model: Patcher) -> list[CallRow]:
    return [row for row in stats(model).rows if row.reason is None]


@pytest.mark.parametrize("kind", MODELS)
def test_every_model_is_sparse_and_all_blocks_are_the_same(kind: type[nn.Module]) -> None:
    plain, half = made(kind)
    x = latents(kind)
    expected = sample(plain, x, texts())
    out = sample(half, x, texts())
    assert not torch.allclose(out, expected, rtol=0, atol=1e-6)
    layers = 4 if kind in (Flux, HunyuanVideo) else 3
    rows = sparse(half)
    assert len(rows) == len(stats(half).rows) == 4 * layers * 2
    assert {(row.step, row.layer) for row in rows} == {
        (step, layer) for step in range(4) for layer in range(layers)
    }
    assert 0.4 < stats(half).cost < 0.7
    whole = sample(patched(plain, share=1.0), x, texts())
    assert torch.allclose(whole, expected, rtol=1e-5, atol=1e-6)
    assert torch.equal(sample(patched(plain, method="dense", options=""), x, texts()), expected)
    assert torch.equal(sample(plain, x, texts()), expected), "nothing may stay behind"


@pytest.mark.parametrize("kind", [WanModel, Flux])
def test_branches_apart_or_in_one_batch_give_the_same(kind: type[nn.Module]) -> None:
    plain, _ = made(kind)
    x = latents(kind, batch=2)
    for method in ("rd", "entropy"):
        one, two = (
            patched(plain, method=method, options="") if method == "rd" else patched(plain)
            for _ in range(2)
        )
        together, apart = sample(one, x, texts()), sample(two, x, texts(), together=False)
        assert torch.allclose(together, apart, atol=1e-6)
        costs = stats(one).by("branch")
        assert costs == pytest.approx(stats(two).by("branch"))
        assert set(costs) == {("cond",), ("uncond",)}
    assert {row.branch for row in stats(one).rows if row.step == 0} == {"cond", "uncond"}


def test_rows_of_a_batch_are_those_of_their_branch() -> None:
    """uncond comes first: its own plan costs the same alone as in the batch of both."""
    plain, both = made(WanModel)
    x, (no, yes) = latents(WanModel), texts()
    sample(both, x, [no, yes], steps=1)
    alone = patched(plain)
    sample(alone, x, [yes], steps=1)  # one prompt is cond
    found = [row.heads for row in stats(both).rows if row.branch == "cond"]
    assert found == [row.heads for row in stats(alone).rows]


def test_cross_attention_of_equal_length_is_not_mistaken() -> None:
    """As many tokens of text as of video: 3×8×10."""
    for kind in (WanModel, LTXVModel):
        plain, whole = made(kind, share=1.0)
        x, equal = latents(kind), texts(240)
        assert torch.allclose(sample(whole, x, equal), sample(plain, x, equal), atol=1e-6)
        assert {row.tokens for row in sparse(whole)} == {240}
        assert len(sparse(whole)) == 4 * 3 * 2


def test_who_was_asked_before_gets_what_stays_dense() -> None:
    plain, _ = made(WanModel)
    calls = []

    def before(func: Any, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(kwargs["transformer_options"]["block_index"])
        assert not kwargs["skip_reshape"]
        return func(*args, **kwargs)

    chained = plain.clone()
    chained.model_options["transformer_options"][OVERRIDE] = before
    ours = patched(chained, start_percent=0.5, dense_blocks="1")
    out = sample(ours, latents(WanModel), texts())
    # Two dense steps of self- and cross-attention; then cross-attention, and block 1 as a whole.
    assert len(calls) == 2 * 6 + 2 * 4
    assert torch.equal(out, sample(patched(plain, start_percent=0.5, dense_blocks="1"),
                                   latents(WanModel), texts()))  # fmt: skip
    assert chained.model_options["transformer_options"][OVERRIDE] is before


def test_of_two_nodes_in_a_row_the_later_one_counts() -> None:
    plain, first = made(WanModel, share=0.9)
    second = patched(first, share=0.3)
    sample(second, latents(WanModel), texts())
    assert not stats(first).rows
    assert stats(second).cost == pytest.approx(0.35, abs=0.1)
    assert plain.wrappers == {}


def test_percents_are_of_steps_and_blocks_have_numbers() -> None:
    _, model = made(Flux, start_percent=0.2, end_percent=0.8, dense_blocks="0, 3")
    # A schedule that falls slowly: half of the noise is left for the last step.
    sample(model, latents(Flux), texts(), sigmas=[1, 0.98, 0.95, 0.9, 0.5, 0])
    assert {(row.step, row.layer) for row in sparse(model)} == {
        (step, layer) for step in (1, 2, 3) for layer in (1, 2)
    }
    assert set(stats(model).dense) == {"first steps", "last steps", "layer 0", "layer 3"}


@pytest.mark.parametrize("between", [False, True])
def test_steps_come_from_sigmas(between: bool) -> None:
    _, model = made(WanModel)
    sample(model, latents(WanModel), texts(), between=between)
    steps = [row.step for row in stats(model).rows]
    assert steps == sorted(steps)
    assert {steps.count(step) for step in range(4)} == {12 if between else 6}


def test_the_step_of_a_sigma() -> None:
    planned = [1.0, 0.75, 0.5, 0.0]
    found = [step_of(s, planned) for s in (1.2, 1.0, 0.99999, 0.9, 0.75, 0.74, 0.2, 0.0)]
    assert found == [(step, 3) for step in (0, 0, 0, 0, 1, 1, 2, 2)]


def test_a_total_is_of_all_work() -> None:
    _, model = made(WanModel, spend="total", share=0.6)
    sample(model, latents(WanModel), texts(), steps=8)
    assert stats(model).cost == pytest.approx(0.6, abs=0.05)
    line = Statistics().read(model, None)
    assert "asked 0.60 in total" in line["result"][0]
    assert line["ui"]["text"] == list(line["result"])


def test_the_own_threshold_of_a_method() -> None:
    _, model = made(WanModel, method="sol", spend="own", share=0.0,
                    options="tau: 0.2, q_block: 16, k_block: 16")  # fmt: skip
    sample(model, latents(WanModel), texts())
    assert 0 < stats(model).cost < 1


def test_short_sequences_stay_dense() -> None:
    plain, model = made(WanModel, min_tokens=241)
    expected = sample(plain, latents(WanModel), texts())
    assert torch.equal(sample(model, latents(WanModel), texts()), expected)
    assert stats(model).dense == {"fewer than 241 tokens": 24}


def test_references_are_pictures_of_their_own() -> None:
    for kind in IMAGES:
        plain, model = made(kind, share=1.0)
        image = latents(kind)[..., :9, :14]
        more = {"ref_latents": [image]}
        expected = sample(plain, latents(kind), texts()[:1], more=more)
        assert torch.allclose(sample(model, latents(kind), texts()[:1], more=more), expected,
                              atol=1e-6)  # fmt: skip
        assert {row.tokens for row in sparse(model)} == {7 + 8 * 16 + 5 * 7}


def test_text_of_several_encoders() -> None:
    _, model = made(HunyuanVideo)
    sample(model, latents(HunyuanVideo), texts(), more={"txt_byt5": torch.randn(1, 5, 8)})
    assert {row.tokens for row in sparse(model)} == {240 + 12}


def test_a_mask_stays_dense_and_is_said() -> None:
    plain, model = made(HunyuanVideo)
    more = {"attention_mask": True}
    expected = sample(plain, latents(HunyuanVideo), texts(), more=more)
    assert torch.equal(sample(model, latents(HunyuanVideo), texts(), more=more), expected)
    assert stats(model).dense == {"a mask [1, 1, 247]": 32}


def test_tokens_that_are_no_grid(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = made(WanModel)
    x = latents(WanModel)
    more = {"time_dim_concat": torch.randn(2, *x[:, :, :1].shape[1:])}
    sentence = "WanModel has 320 tokens, and its latents are 3×8×10, which is 240"
    with pytest.raises(ValueError, match=sentence) as error:
        sample(model, x, texts(), more=more)
    assert "on_error: dense" in str(error.value)
    going_on = patched(plain, on_error="dense")
    expected = sample(plain, x, texts(), more=more)
    assert torch.equal(sample(going_on, x, texts(), more=more), expected)
    assert caplog.text.count(sentence) == 1
    assert stats(going_on).cost == 1


def test_a_total_that_cannot_be_reached(caplog: pytest.LogCaptureFixture) -> None:
    plain, model = made(WanModel, spend="total", share=0.01)
    with pytest.raises(ValueError, match=r"a total of 0\.01 cannot be reached in 4 steps"):
        sample(model, latents(WanModel), texts())
    going_on = patched(plain, spend="total", share=0.01, on_error="dense")
    out = sample(going_on, latents(WanModel), texts())
    assert torch.equal(out, sample(plain, latents(WanModel), texts()))
    assert caplog.text.count("cannot be reached in 4 steps") == 1


def test_a_sampler_without_sigmas() -> None:
    _, model = made(WanModel)
    given = torch.randn(1, 4, 3, 15, 20), torch.ones(1), texts()[0], {}
    with pytest.raises(ValueError, match="does not say its sigmas"):
        model.transformer(*given, model.all_wrappers("diffusion_model"))


def test_a_model_that_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    plain = Patcher(MochiModel())
    with pytest.raises(
        ValueError, match="MochiModel is no model that jali knows in ComfyUI; those"
    ):
        patched(plain)
    assert patched(plain, on_error="dense") is plain
    assert "MochiModel" in caplog.text
    assert "stays dense" in caplog.text


def test_an_interrupted_run_leaves_nothing_behind() -> None:
    plain, model = made(WanModel, method="rd", options="")
    x = latents(WanModel)
    expected = sample(plain, x, texts())
    with pytest.raises(InterruptedError):
        sample(model, x, texts(), stop_after=2)
    patch = patch_of(model)
    assert patch is not None
    assert patch.run.tables.bytes == 0
    attentions = [each for each in model.transformer.modules() if each._forward_pre_hooks]
    assert not attentions
    assert torch.equal(sample(plain, x, texts()), expected)
    sample(model, x, texts())
    assert len(stats(model).rows) == 24


def test_verbose_says_once_per_shape_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "jali")
    _, model = made(WanModel, verbose=True, start_percent=0.5, dense_blocks="2")
    for _ in range(2):
        sample(model, latents(WanModel), texts())
    for said in ("240 tokens: dense, first steps", "240 tokens: dense, layer 2",
                 "240×7 tokens: dense, not one of the model's self-attentions",
                 "240 tokens: sparse"):  # fmt: skip
        assert caplog.text.count(f"jali: {said}") == 1, said
    assert caplog.text.count("in 8 sparse of 24") == 2  # a line of every run


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"dense_blocks": "0, 3"}, "dense_blocks names block 3, and this model has 3"),
        ({"dense_blocks": "-4"}, "dense_blocks names block -4, and this model has 3"),
        ({"dense_blocks": "2-"}, "numbers such as 0, 1, 47-49 or -1, got '2-'"),
        ({"start_percent": 0.5, "end_percent": 0.5}, "start_percent 0.5 is not before"),
        ({"share": 1.5}, r"mean must be in \[0, 1\], got 1.5"),
        ({"spend": "total", "share": 0.0}, "total must be a share above 0"),
        ({"method": "entropie"}, "is unknown: 'entropie'; did you mean 'entropy'"),
        ({"options": "sharpnes: 2"}, "did you mean 'sharpness'"),
        ({"options": "tau"}, "options are names with values, such as tau: 1.3, got 'tau'"),
        ({"recipe": "nothing.yaml"}, "there is no recipe file nothing.yaml"),
        ({"spend": "all"}, "spend must be"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(
    asked: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Patcher(WanModel())
    with pytest.raises((ValueError, TypeError), match=said):
        patched(plain, **asked)
    assert patched(plain, **asked, on_error="dense") is plain
    assert len(caplog.records) == 1


def test_blocks_and_options_as_they_are_typed() -> None:
    assert read_blocks("", 30) == ()
    assert read_blocks("0, 1,  27-29 -1", 30) == (0, 1, 27, 28, 29, -1)
    assert read_options("") == {}
    assert read_options("tau: 1.3, tail: true") == {"tau": 1.3, "tail": True}


def test_what_comfyui_sees() -> None:
    """Version 1 of its nodes, which every version takes."""
    assert set(NODE_CLASS_MAPPINGS) == set(NODE_DISPLAY_NAME_MAPPINGS)
    for kind in NODE_CLASS_MAPPINGS.values():
        given = kind.INPUT_TYPES()
        assert set(given) <= {"required", "optional"}
        assert callable(getattr(kind, kind.FUNCTION))
        assert kind.CATEGORY
        for name, _, more in widgets(given):
            assert "default" in more, name
    inputs = SparseAttention.INPUT_TYPES()
    assert inputs["required"]["method"][0] == list(jali.methods.METHODS)
    json.dumps(inputs)


def run(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": ":".join(map(str, path))},
    )  # fmt: skip


def test_the_nodes_are_there_without_comfyui_and_torch() -> None:
    code = (
        "import sys; sys.modules['comfy'] = None; sys.modules['torch'] = None\n"
        "sys.modules['diffusers'] = None\n"
        "import comfyui; print(*comfyui.NODE_CLASS_MAPPINGS)\n"
        "for kind in comfyui.NODE_CLASS_MAPPINGS.values(): kind.INPUT_TYPES()"
    )
    done = run(code, SHIM.parent, Path(jali.__file__).parents[1])
    assert done.stdout.split() == list(NODE_CLASS_MAPPINGS), done.stderr


def test_a_missing_jali_is_said_in_a_sentence() -> None:
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", "import sys; sys.path.append(sys.argv[1])\n"
         "import comfyui", str(SHIM.parent)], capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "ImportError: jali is not installed in ComfyUI's Python: " in done.stderr
    assert "-m pip install -U jali" in done.stderr


def test_the_entry_of_the_registry_has_the_version_of_the_package() -> None:
    entry = tomllib.loads((SHIM / "pyproject.toml").read_text(encoding="utf-8"))
    assert entry["project"]["version"] == jali.__version__
    assert entry["tool"]["comfy"]["PublisherId"]
    assert (SHIM / "requirements.txt").read_text().split() == entry["project"]["dependencies"]


def test_the_example_workflow_asks_for_what_there_is() -> None:
    used = 0
    for node in json.loads((SHIM / "nano_api.json").read_text(encoding="utf-8")).values():
        if node["class_type"] in NODE_CLASS_MAPPINGS:
            given = NODE_CLASS_MAPPINGS[node["class_type"]].INPUT_TYPES()
            known = {**given["required"], **given.get("optional", {})}
            assert set(given["required"]) <= set(node["inputs"]) <= set(known)
            used += 1
    assert used == len(NODE_CLASS_MAPPINGS)
