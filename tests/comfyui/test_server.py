"""The real program: ComfyUI as a server, nano sampled through HTTP."""

from __future__ import annotations

import itertools
import json
import os
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from real_comfyui import SHIM, RefusedError, Server, error_of
from torch import Tensor
from workflow_form import api_of

import jali
from jali.integration.fingerprint import Fingerprint
from jali.integration.recipe import Measured, Recipe, RunSize, Target

FOLDER = os.environ.get("JALI_COMFYUI")
if not FOLDER:
    pytest.skip("JALI_COMFYUI names no ComfyUI folder to run nano in", allow_module_level=True)
PROMPT, LAYERS, SEED, CFG = "a red ball moves left", 8, 3, 4.0
SIZE = (96, 64, 17)  # width, height, frames: 5×8×12 = 480 tokens
SPARSE = {
    "method": "entropy", "spend": "budget", "share": 0.5, "start_percent": 0.0,
    "end_percent": 1.0, "dense_blocks": "", "min_tokens": 0, "on_error": "error", "verbose": False,
    "options": "q_block: 32, k_block: 32",
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(Path(str(FOLDER)), tmp_path_factory.mktemp("comfyui"))
    yield started
    started.stop()


def prompt(
    prefix: str, sparse: dict[str, Any] | None = None, size: tuple[int, int, int] = SIZE,
    steps: int = 2, cfg: float = CFG, sampler: str = "euler", counted: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """nano, sampled and saved; with the node of ours where `sparse` has its inputs."""
    width, height, length = size
    nodes: dict[str, Any] = {
        "nano": ("JaliNano", {"width": width, "height": height, "length": length}),
        "yes": ("CLIPTextEncode", {"clip": ["nano", 1], "text": PROMPT}),
        "no": ("CLIPTextEncode", {"clip": ["nano", 1], "text": ""}),
        "sampler": ("KSampler", {
            "model": ["nano", 0], "seed": SEED, "steps": steps, "cfg": cfg, "sampler_name": sampler,
            "scheduler": "simple", "positive": ["yes", 0], "negative": ["no", 0],
            "latent_image": ["nano", 3], "denoise": 1.0,
        }),
        "save": ("SaveLatent", {"samples": ["sampler", 0], "filename_prefix": prefix}),
    }  # fmt: skip
    model = ["nano", 0]
    if counted:
        nodes["counted"] = ("CountingOverride", {"model": model, "name": prefix})
        model = ["counted", 0]
    if sparse is not None:
        nodes["sparse"] = ("JaliSparseAttention", {**SPARSE, **sparse, "model": model})
        model = ["sparse", 0]
        reading = {"model": model, "samples": ["sampler", 0]}
        nodes["read"], nodes["line"] = ("Readings", reading), ("JaliStatistics", reading)
    nodes["sampler"][1]["model"] = model
    return {name: {"class_type": kind, "inputs": given} for name, (kind, given) in nodes.items()}


def readings(outputs: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(outputs["read"]["text"][0]))


@pytest.fixture(scope="module")
def dense(server: Server) -> Tensor:
    server.run(prompt("dense"))
    return server.latents("dense")


def far(one: Tensor, other: Tensor) -> float:
    return float((one - other).abs().max())


def apart(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


def euler(pipe: Any, steps: int) -> Tensor:
    """What diffusers' transformer gives along ComfyUI's own steps (simple, shift 3)."""
    width, height, length = SIZE
    shape = (1, 16, (length - 1) // 4 + 1, height // 4, width // 4)
    x = torch.randn(shape, generator=torch.manual_seed(SEED))
    places = [(1000 - int(i * 1000 / steps)) / 1000 for i in range(steps)]
    sigmas = [3 * t / (1 + 2 * t) for t in places] + [0.0]
    with torch.no_grad():
        texts = [
            pipe.encode_prompt(text, None, False, max_sequence_length=512, device="cpu")[0]
            for text in (PROMPT, "")
        ]
        for now, then in itertools.pairwise(sigmas):
            yes, no = (
                pipe.transformer(x, torch.tensor([now * 1000]), text, return_dict=False)[0]
                for text in texts
            )
            x = x + (no + CFG * (yes - no)) * (then - now)
    return x


def test_unpatched_latents_are_those_of_diffusers(dense: Tensor) -> None:
    expected = euler(jali.load_pipeline("nano", device="cpu", dtype="fp32"), 2)
    assert apart(dense, expected) < 1e-5


def test_the_method_dense_changes_no_bit(server: Server, dense: Tensor) -> None:
    found = readings(server.run(prompt("same", {"method": "dense", "options": ""})))
    assert far(server.latents("same"), dense) == 0.0
    assert (found["cost"], found["dense"]) == (1.0, {"method dense": 2 * LAYERS * 2})


def test_all_blocks_give_the_same_latents(server: Server, dense: Tensor) -> None:
    found = readings(server.run(prompt("all", {"share": 1.0})))
    assert apart(server.latents("all"), dense) <= 5e-6
    assert (found["cost"], len(found["rows"])) == (1.0, 2 * LAYERS * 2)


def test_costs_of_two_budgets_and_a_total_are_read_back(server: Server, dense: Tensor) -> None:
    differences = {}
    for share in (0.5, 0.25):
        outputs = server.run(prompt(f"share{share}", {"share": share}))
        found = readings(outputs)
        assert found["sparse_cost"] == pytest.approx(share, abs=0.08)
        assert Counter(branch for _, _, branch, *_ in found["rows"]) == {"cond": 16, "uncond": 16}
        assert sorted({(step, layer) for step, layer, *_ in found["rows"]}) == [
            (step, layer) for step in range(2) for layer in range(LAYERS)
        ]
        assert f"asked {share:.2f}, cost" in outputs["line"]["text"][0]
        differences[share] = far(server.latents(f"share{share}"), dense)
    assert 1e-3 < differences[0.5] < differences[0.25]
    found = readings(server.run(prompt("total", {"spend": "total", "share": 0.5}, steps=4)))
    assert found["cost"] == pytest.approx(0.5, abs=0.1)
    assert found["tables"] == 0


def test_percents_are_of_steps(server: Server) -> None:
    asked = {"start_percent": 0.2, "end_percent": 0.8, "dense_blocks": "0, 6-7"}
    found = readings(server.run(prompt("percents", asked, steps=5)))
    sparse = {(step, layer) for step, layer, _, _, cost in found["rows"] if cost < 1}
    assert sparse == {(step, layer) for step in (1, 2, 3) for layer in range(1, 6)}
    assert set(found["dense"]) == {"first steps", "last steps", "layer 0", "layer 6", "layer 7"}


@pytest.mark.parametrize("sampler", ["heun", "dpm_2", "dpmpp_2s_ancestral", "uni_pc"])
def test_steps_come_from_sigmas_whatever_the_sampler(server: Server, sampler: str) -> None:
    found = readings(server.run(prompt(sampler, {}, steps=3, sampler=sampler)))
    calls = Counter(step for step, *_ in found["rows"])
    assert sorted(calls) == [0, 1, 2]
    assert all(count % (2 * LAYERS) == 0 for count in calls.values())


def test_without_guidance_there_is_one_branch(server: Server) -> None:
    found = readings(server.run(prompt("unguided", {}, cfg=1.0)))
    assert Counter(branch for _, _, branch, *_ in found["rows"]) == {"cond": 16}


def test_the_override_of_another_node_gets_what_stays_dense(server: Server, dense: Tensor) -> None:
    server.run(prompt("alone", counted=True))
    found = readings(server.run(prompt("chained", {"start_percent": 0.5}, counted=True)))
    calls = 2 * LAYERS  # of one model call: as many cross-attentions as self-attentions
    assert found["counted"]["alone"] == 2 * calls
    assert found["counted"]["chained"] == calls + LAYERS  # step 1: cross-attention alone
    assert far(server.latents("alone"), dense) == 0.0


@pytest.mark.parametrize("size", [(124, 60, 13), (36, 100, 1)])
def test_odd_grids(server: Server, size: tuple[int, int, int]) -> None:
    server.run(prompt("odd", size=size))
    whole = server.latents("odd")
    found = readings(server.run(prompt("oddsparse", {"share": 1.0}, size=size)))
    width, height, length = size
    tokens = ((length + 3) // 4) * -(-(height // 4) // 2) * -(-(width // 4) // 2)
    assert {row[3] for row in found["rows"]} == {tokens}
    assert apart(server.latents("oddsparse"), whole) <= 5e-6


def test_cross_attention_of_equal_length_is_not_mistaken(server: Server) -> None:
    """512 tokens of video, 512 of text."""
    size = (128, 128, 5)
    server.run(prompt("equal", size=size))
    whole = server.latents("equal")
    found = readings(server.run(prompt("equalsparse", {"share": 1.0}, size=size, counted=True)))
    assert [len(found["rows"]), found["rows"][0][3]] == [2 * LAYERS * 2, 512]
    assert found["counted"]["equalsparse"] == 2 * LAYERS
    assert apart(server.latents("equalsparse"), whole) <= 5e-6


def test_nothing_is_left_of_a_patched_run(server: Server, dense: Tensor) -> None:
    server.run(prompt("between", {"share": 0.25}))
    # Another seed in between, so that nothing is taken from ComfyUI's own cache.
    other = prompt("again")
    other["sampler"]["inputs"]["denoise"] = 0.9999
    server.run(other)
    server.run(prompt("again"))
    assert far(server.latents("again"), dense) == 0.0


def test_two_nodes_in_a_row_are_one(server: Server) -> None:
    asked = prompt("twice", {"share": 0.25})
    asked["first"] = {
        "class_type": "JaliSparseAttention",
        "inputs": {**SPARSE, "share": 1.0, "model": ["nano", 0]},
    }
    asked["sparse"]["inputs"]["model"] = ["first", 0]
    found = readings(server.run(asked))
    assert found["sparse_cost"] == pytest.approx(0.25, abs=0.08)


def test_an_interrupted_run_leaves_nothing_behind(server: Server, dense: Tensor) -> None:
    number = server.start(
        prompt("interrupted", {"method": "rd", "options": ""}, size=(192, 128, 17), steps=50)
    )
    while not server.get("/queue")["queue_running"]:
        time.sleep(0.05)
    time.sleep(2)
    server.post("/interrupt", {})
    assert error_of(server.wait(number)) == "interrupted"
    fresh = prompt("after")
    fresh["sampler"]["inputs"]["denoise"] = 0.9998
    server.run(fresh)
    server.run(prompt("after"))
    assert far(server.latents("after"), dense) == 0.0
    found = readings(server.run(prompt("aftersparse", {})))
    assert len(found["rows"]) == 2 * LAYERS * 2


def said(server: Server, asked: dict[str, Any]) -> str:
    with pytest.raises(RefusedError) as refused:
        server.run(asked)
    return str(refused.value)


def test_a_model_that_is_not_known(server: Server) -> None:
    asked = prompt("unknown", {})
    asked["other"] = {"class_type": "UnknownModel", "inputs": {"model": ["nano", 0]}}
    asked["sparse"]["inputs"]["model"] = ["other", 0]
    asked["sampler"]["inputs"]["model"] = ["nano", 0]
    assert "JaliSparseAttention: MochiModel is no model that jali knows" in said(server, asked)
    asked["sparse"]["inputs"]["on_error"] = "dense"
    server.run(asked)
    assert "the model stays dense" in server.log.read_text()


def test_tokens_that_are_no_grid(server: Server) -> None:
    asked = prompt("nogrid", {})
    asked["more"] = {
        "class_type": "MoreFrames", "inputs": {"prompt": ["yes", 0], "samples": ["nano", 3]},
    }  # fmt: skip
    asked["less"] = {
        "class_type": "MoreFrames", "inputs": {"prompt": ["no", 0], "samples": ["nano", 3]},
    }  # fmt: skip
    asked["sampler"]["inputs"] |= {"positive": ["more", 0], "negative": ["less", 0]}
    sentence = said(server, asked)
    assert "has 576 tokens, and its latents are 5×8×12, which is 480" in sentence
    assert "on_error: dense" in sentence
    asked["sparse"]["inputs"]["on_error"] = "dense"
    found = readings(server.run(asked))
    assert (found["cost"], len(found["rows"])) == (1.0, 2 * LAYERS * 2)


def recipe_of(pipe: Any, change: float = 0.0) -> Recipe:
    found = Fingerprint.of(pipe.transformer)
    name, values = next(iter(found.weights.items()))
    weights = {**found.weights, name: tuple(value + change for value in values)}
    return Recipe(
        "nano", {"transformer": Fingerprint(found.kind, found.config, weights)},
        jali.Entropy(q_block=32, k_block=32), jali.Curve(0.5), RunSize(2, 64, 96, 17, CFG),
        Target("psnr", 30.0), True, Measured(0, {}, 0.5),
    )  # fmt: skip


def test_recipes(server: Server, tmp_path: Path) -> None:
    pipe = jali.load_pipeline("nano", device="cpu", dtype="fp32")
    mine, others = tmp_path / "mine.yaml", tmp_path / "others.yaml"
    recipe_of(pipe).write(mine)
    recipe_of(pipe, change=1.0).write(others)
    found = readings(server.run(prompt("recipe", {"recipe": str(mine), "share": 0.1})))
    assert found["cost"] == pytest.approx(0.5, abs=0.1)
    assert "the weights are not those of nano" in said(
        server, prompt("other", {"recipe": str(others)})
    )
    missing = tmp_path / "missing.yaml"
    assert f"there is no recipe file {missing}" in said(
        server, prompt("missing", {"recipe": str(missing)})
    )


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"dense_blocks": "0, 8"}, "dense_blocks names block 8, and this model has 8"),
        ({"dense_blocks": "first"}, "dense_blocks are numbers such as 0, 1, 47-49 or -1"),
        ({"start_percent": 0.6, "end_percent": 0.4}, "start_percent 0.6 is not before"),
        ({"spend": "total", "share": 0.01}, "a total of 0.01 cannot be reached in 2 steps"),
        ({"method": "sol", "options": "taw: 2"}, "did you mean 'tau'"),
    ],
)
def test_wrong_inputs(server: Server, asked: dict[str, Any], sentence: str) -> None:
    assert sentence in said(server, prompt("wrong", asked))


def test_values_that_no_widget_takes(server: Server) -> None:
    assert "value_bigger_than_max" in said(server, prompt("much", {"share": 1.5}))
    assert "value_not_in_list" in said(server, prompt("what", {"method": "entropie"}))


def test_verbose_says_once_why_calls_stay_dense(server: Server) -> None:
    server.run(prompt("loud", {"verbose": True, "start_percent": 0.5, "dense_blocks": "3"}))
    text = server.log.read_text()
    assert text.count("jali: 480 tokens: dense, first steps") == 1
    assert text.count("jali: 480 tokens: dense, layer 3") == 1
    assert text.count("jali: 480×512 tokens: dense, not one of the model's self-attentions") == 1


@pytest.mark.timeout(1300)  # on two busy cores
def test_the_example_workflow_runs_unchanged(server: Server) -> None:
    """The file that the window opens, and the same for the server."""
    opened, sent = (
        json.loads((SHIM / name).read_text(encoding="utf-8"))
        for name in ("example_workflows/nano.json", "nano_api.json")
    )
    asked = api_of(opened, server.get("/object_info"))
    assert asked == {
        name: {key: node[key] for key in ("class_type", "inputs")} for name, node in sent.items()
    }
    outputs = server.run(sent, seconds=1200)
    films = [
        server.base / "output" / image["subfolder"] / image["filename"]
        for node in outputs.values()
        for image in node.get("images", ())
    ]
    assert len(films) == 2
    assert all(film.stat().st_size > 2000 for film in films)
    (line,) = outputs["11"]["text"]
    assert "asked 0.50 in total, cost 0.5" in line
