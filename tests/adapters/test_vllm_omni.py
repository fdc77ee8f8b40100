"""The backend of vLLM-Omni, against the few names of vLLM-Omni that it meets."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import jali
from jali.adapters import vllm_omni

sys.path.insert(0, str(Path(__file__).parent))
from stub_vllm_omni import (
    OVERRIDES,
    AttentionMetadata,
    Backends,
    ForwardContext,
    Host,
    PlatformImpl,
    VideoTokenLayout,
)

ROOT = Path(__file__).parents[2]
GRID = (3, 8, 16)
H, S, D = 3, 384, 16
WAN = AttentionMetadata(video_layout=VideoTokenLayout(0, GRID, S))
BLOCKS = '"q_block": 32, "k_block": 32'
Layer = Callable[..., Any]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Iterator[Host]:
    host = Host()
    for name, module in host.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "jali.adapters.vllm_omni.backend", raising=False)
    monkeypatch.setenv("JALI_VLLM_OMNI", "{" + BLOCKS + "}")
    yield host
    sys.modules.pop("jali.adapters.vllm_omni.backend", None)


@pytest.fixture
def layer(host: Host) -> Layer:  # noqa: ARG001
    """A layer as the host makes it, with its settings for sparse blocks."""
    vllm_omni.register()
    impl = Backends.RAINFUSION_ATTN.get_class().get_impl_cls()

    def make(
        prefix: str = "blocks.1.attn1", role: str = "self", causal: bool = False,
        qkv_layout: str | None = "BSND", **block_sparse: Any,
    ) -> Any:  # fmt: skip
        settings = {"sparsity": 0.7, "start_step": 0, "end_step": 0, "precision": "bf16"}
        return impl(
            num_heads=H, head_size=D, softmax_scale=0.2, causal=causal, num_kv_heads=None,
            qkv_layout=qkv_layout, prefix=prefix, backend_kwargs=settings | block_sparse, role=role,
            computation="self", backend_explicit=True,
        )  # fmt: skip

    return make


def tensors(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(seed)
    return tuple(torch.randn(1, S, H, D) for _ in range(3))  # type: ignore[return-value]


def test_the_entry_point_is_the_plugin_of_the_host() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    group = project["entry-points"]["vllm_omni.general_plugins"]
    assert group == {"jali": f"{vllm_omni.__name__}:{vllm_omni.register.__name__}"}


def test_registering_takes_the_place_of_rainfusion(host: Host) -> None:
    for _ in range(2):  # the host may load its plugins more than once
        vllm_omni.register()
        assert OVERRIDES == {Backends.RAINFUSION_ATTN: vllm_omni.BACKEND}
    backend = Backends.RAINFUSION_ATTN.get_class()
    assert backend.supported_platforms is None
    assert backend.get_name() == "JALI"
    assert backend.get_supported_head_sizes() == []  # to the host: all
    for host.masks in (True, False):  # who computes calls with masks is the platform's own
        assert backend.supports_attention_mask(object()) is host.masks


def test_ascend_and_other_plugins_keep_theirs(host: Host) -> None:
    host.npu = True
    vllm_omni.register()
    assert OVERRIDES == {}
    host.npu = False
    OVERRIDES[Backends.RAINFUSION_ATTN] = "of.somebody.Else"
    vllm_omni.register()
    assert OVERRIDES == {Backends.RAINFUSION_ATTN: "of.somebody.Else"}


def test_another_host_goes_on_with_a_warning(
    host: Host, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    registry = host.modules()["vllm_omni.diffusion.attention.backends.registry"]
    monkeypatch.delattr(registry, "DiffusionAttentionBackendEnum")
    package = sys.modules["vllm_omni.diffusion.attention.backends"]
    monkeypatch.setattr(package, "registry", registry, raising=False)
    monkeypatch.setitem(sys.modules, registry.__name__, registry)
    vllm_omni.register()
    assert "not as in 0.32.0rc1" in caplog.text


def test_without_the_host_one_sentence_says_so() -> None:
    code = "import jali.adapters.vllm_omni as p, sys\nassert 'vllm_omni' not in sys.modules\n"
    code += "p.register()\nimport jali.adapters.vllm_omni.backend"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "jali: no backend for vLLM-Omni" in done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: jali.adapters.vllm_omni.backend is loaded by vLLM-Omni")


def test_a_sparse_call_is_one_of_attend(host: Host, layer: Layer) -> None:
    host.now = ForwardContext(2, 5)
    q, k, v = tensors()
    out = layer(sparsity=0.6).forward(q, k, v, WAN)
    method = jali.Entropy(jali.Budget(0.4), q_block=32, k_block=32)
    site = jali.Site(2, 5, 1, 2)
    heads = (x.transpose(1, 2) for x in (q, k, v))
    expected = jali.attend(*heads, method=method, grid=GRID, site=site, scale=0.2)
    assert torch.equal(out, expected.out.transpose(1, 2))
    assert PlatformImpl.calls == 0


def test_text_in_front_is_part_of_the_sequence(host: Host, layer: Layer) -> None:  # noqa: ARG001
    video = VideoTokenLayout(S - 2 * 8 * 16, (2, 8, 16), S)
    made = layer()
    made.forward(*tensors(), AttentionMetadata(video_layout=video))
    assert made.shared.run.stats().rows[0].reason is None


DENSE = {
    "no metadata": (None, "the model does not publish where its video lies"),
    "no layout": (AttentionMetadata(), "the model does not publish where its video lies"),
    "a mask": (
        AttentionMetadata(torch.ones(1, S).bool(), video_layout=WAN.video_layout),
        "a mask of the model's own",
    ),
    "packed": (
        AttentionMetadata(extra={"cu_seqlens_q": 1}, video_layout=WAN.video_layout),
        "several sequences in one",
    ),
    "spans": (
        AttentionMetadata(video_layout=VideoTokenLayout(used_len=S, video_spans=(1, 2))),
        "several sequences in one",
    ),
    "padding": (
        AttentionMetadata(video_layout=VideoTokenLayout(0, (2, 8, 16), 256)),
        "384 tokens, of which only 256 are text and video",
    ),
}


@pytest.mark.parametrize("name", DENSE)
def test_what_is_no_single_video_is_the_platforms(name: str, layer: Layer) -> None:
    metadata, why = DENSE[name]
    made = layer()
    made.forward(*tensors(), metadata)
    assert PlatformImpl.calls == 1
    assert [row.reason for row in made.shared.run.stats().rows] == [why]


@pytest.mark.parametrize(
    "given",
    [{"role": "cross"}, {"causal": True}, {"qkv_layout": None}, {"prefix": "attn"}],
    ids=str,
)
def test_layers_that_are_never_sparse(given: dict[str, Any], layer: Layer) -> None:
    made = layer(**given)
    made.forward(*tensors(), WAN)
    assert PlatformImpl.calls == 1
    assert made.why_never


def test_where_the_host_does_not_say_the_step(host: Host, layer: Layer) -> None:
    for host.now in (None, ForwardContext(None)):
        layer().forward(*tensors(), WAN)
    assert PlatformImpl.calls == 2


def test_its_steps_and_layers_are_kept_dense(host: Host, layer: Layer) -> None:
    made = {i: layer(f"blocks.{i}.attn1", start_step=1, end_step=1, skip_layers=[2])
            for i in range(3)}  # fmt: skip
    for step in range(4):
        host.now = ForwardContext(step, 4)
        for one in made.values():
            one.forward(*tensors(step), WAN)
    run = made[0].shared.run
    assert all(one.shared.run is run for one in made.values())  # what layers share is one run
    sparse = {(row.step, row.layer) for row in run.stats().rows if row.reason is None}
    assert sparse == {(step, layer) for step in (1, 2) for layer in (0, 1)}
    assert run.stats().dense == {"first steps": 2, "skip_layers": 4, "end_step": 2}


def test_guidance_branches_and_experts_are_told_apart(
    host: Host, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two calls of a step are two branches, equal layers are two models'."""
    monkeypatch.setenv("JALI_VLLM_OMNI", '{"method": "rd", "samples": 4, ' + BLOCKS + "}")
    first, second = layer(), layer()
    for step in range(4):
        host.now = ForwardContext(step, 4)
        for seed in range(2):
            (first if step < 2 else second).forward(*tensors(seed), WAN)
    rows = first.shared.run.stats().rows
    told = [(row.step, row.branch, row.transformer) for row in rows]
    names = ("transformer", "transformer", "transformer_2", "transformer_2")
    assert told == [(s, f"branch {b}", names[s]) for s in range(4) for b in (1, 2)]


def test_a_new_generation_begins_where_the_step_falls(host: Host, layer: Layer) -> None:
    made = layer()
    for step in (0, 1, 0):
        host.now = ForwardContext(step, 2)
        made.forward(*tensors(), WAN)
    assert [row.step for row in made.shared.run.stats().rows] == [0]


def test_the_configuration_of_the_page_is_one(layer: Layer) -> None:
    page = (ROOT / "docs/hosts.md").read_text("utf-8")
    (text,) = re.findall(r'```json\n(\{"per_role.*?)```', page, re.DOTALL)
    spec = json.loads(text)["per_role"]["self"]
    assert spec["backend"] == Backends.RAINFUSION_ATTN.name
    spec["block_sparse"]["skip_layers"] = [int(spec["block_sparse"]["skip_layers"])]  # as the host
    made = layer("blocks.0.attn1", **spec["block_sparse"])
    assert made.skipped
    assert made.shared.run.method.mean_budget == pytest.approx(0.3)


BAD = {
    "not json": ('{"method": rd}', {}, r"JALI_VLLM_OMNI must be a JSON object, got '\{\"method\""),
    "a list": ("[1]", {}, "JALI_VLLM_OMNI must be a JSON object of options, got '\\[1\\]'"),
    "method": ('{"method": "entrop"}', {}, "JALI_VLLM_OMNI: method must be .*got 'entrop'"),
    "option": ('{"colour": 1}', {}, "JALI_VLLM_OMNI.*colour"),
    "steps": ('{"steps": 0}', {}, "JALI_VLLM_OMNI: steps"),
    "precision": ("", {"precision": "fp8"}, "block_sparse.precision='fp8'"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_settings_are_told_before_the_model_runs(
    name: str, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    options, settings, said = BAD[name]
    monkeypatch.setenv("JALI_VLLM_OMNI", options)
    with pytest.raises(ValueError, match=said):
        layer(**settings)


@pytest.mark.parametrize("name", ["ring_degree", "allgather_degree"])
def test_a_part_of_the_keys_is_refused(name: str, host: Host, layer: Layer) -> None:
    host.config = SimpleNamespace(parallel_config=SimpleNamespace(**{name: 2}))
    with pytest.raises(ValueError, match=f"{name}=2 leaves a rank some of the keys"):
        layer()


def test_steps_that_are_needed_and_not_published(
    host: Host, layer: Layer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wan of the host announces its step, but not how many there are."""
    host.now = ForwardContext(0, None)
    with pytest.raises(ValueError, match=r"block_sparse\.end_step needs the number of steps"):
        layer(end_step=1).forward(*tensors(), WAN)
    monkeypatch.setenv("JALI_VLLM_OMNI", '{"method": "rd", ' + BLOCKS + "}")
    with pytest.raises(ValueError, match="rd needs the number of steps"):
        layer().forward(*tensors(), WAN)
    monkeypatch.setenv("JALI_VLLM_OMNI", '{"method": "rd", "steps": 4, ' + BLOCKS + "}")
    layer().forward(*tensors(), WAN)
    monkeypatch.setenv("JALI_VLLM_OMNI", "{" + BLOCKS + "}")
    layer(start_step=3).forward(*tensors(), WAN)
    assert PlatformImpl.calls == 1
