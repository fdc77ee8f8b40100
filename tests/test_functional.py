"""sparse_attention: MindIE-SD's surface, its examples, and torch.compile."""

from __future__ import annotations

import inspect
from typing import Any

import numpy as np
import pytest
import torch

import jali.functional
from jali import Attended, RfV2, TokenGrid, attend, sparse_attention
from oracle import relative, sdpa, tensors

# The first 18 parameters of the original, in order, with their defaults.
SURFACE = {
    "q": inspect.Parameter.empty, "k": inspect.Parameter.empty, "v": inspect.Parameter.empty,
    "attn_mask": None, "scale": None, "is_causal": False, "head_num": 1, "input_layout": "BNSD",
    "inner_precise": 0, "sparse_type": None, "txt_len": 0, "block_size": 128,
    "latent_shape_q": None, "latent_shape_k": None, "keep_sink": True, "keep_recent": True,
    "cdf_threshold": 1.0, "sparsity": 0.0,
}  # fmt: skip
TYPES = ["rf_v2", "ada_bsa", "entropy", "psa"]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Attended]:
    """What the data path was asked for, and did, behind sparse_attention."""
    results: list[Attended] = []

    def spy(*args: Any, **options: Any) -> Attended:
        results.append(attend(*args, **options))
        return results[-1]

    monkeypatch.setattr(jali.functional, "attend", spy)
    return results


def test_parameters_and_defaults_are_those_of_mindie() -> None:
    parameters = inspect.signature(sparse_attention).parameters
    first = list(parameters.values())[:18]
    assert [p.name for p in first] == list(SURFACE)
    for parameter in first:
        assert parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD
        assert parameter.default == SURFACE[parameter.name]


@pytest.mark.parametrize("heads", [2, pytest.param(24, marks=pytest.mark.slow)])
def test_the_image_example(seen: list[Attended], heads: int) -> None:
    """The seed's own call, on the CPU; it passes no latent shape."""
    q, k, v = (torch.randn(2, heads, 4096, 128, dtype=torch.float16) for _ in "qkv")
    out = sparse_attention(
        q, k, v, head_num=heads, input_layout="BNSD", sparse_type="rf_v2", sparsity=0.6
    )
    assert out.shape == q.shape
    assert out.dtype == q.dtype
    plan = seen[0].plan
    assert plan is not None
    assert plan.density == pytest.approx(0.4, abs=0.02), "an image must stay sparse"


@pytest.mark.parametrize("shape", [(3, 24, 16), (3, 21, 17), (5, 30, 13)])
def test_the_video_example(seen: list[Attended], shape: tuple[int, int, int]) -> None:
    t, h, w = shape
    q, k, v = tensors(t * h * w, B=2, H=3, D=64, spread=1.0)
    out = sparse_attention(
        q, k, v,
        head_num=3,
        input_layout="BNSD",
        sparse_type="rf_v2",
        sparsity=0.8,
        latent_shape_q=[t, h, w],
        latent_shape_k=[t, h, w],
    )  # fmt: skip
    plan = seen[0].plan
    assert out.shape == q.shape
    assert plan is not None
    assert plan.layout.q_grid == TokenGrid.of(shape)
    assert plan.density < 1


@pytest.mark.parametrize("sparse_type", [None, *TYPES])
@pytest.mark.parametrize("text", [0, 7])
def test_layouts_agree(sparse_type: str | None, text: int) -> None:
    q, k, v = tensors(3 * 13 * 17 + text, B=2, H=3)
    given: dict[str, Any] = {"head_num": 3, "sparse_type": sparse_type, "txt_len": text}
    given |= {"latent_shape_q": [3, 13, 17]}
    if sparse_type:
        given["sparsity"] = 0.6
    first = sparse_attention(q, k, v, input_layout="BNSD", **given)
    moved = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    second = sparse_attention(*moved, input_layout="BSND", **given)
    assert second.shape == (2, 3 * 13 * 17 + text, 3, 16)
    assert torch.equal(first, second.transpose(1, 2))


def test_tokens_first_takes_other_keys() -> None:
    """In BSND, too, the heads are compared, not the tokens: 77 keys of 100 queries."""
    q, k, v = tensors(100, 77, H=3)
    moved = (x.transpose(1, 2) for x in (q, k, v))
    out = sparse_attention(*moved, head_num=3, input_layout="BSND", sparse_type="entropy")
    assert torch.equal(out.transpose(1, 2), sparse_attention(q, k, v, sparse_type="entropy"))


@pytest.mark.parametrize("sparse_type", [None, *TYPES])
def test_non_contiguous_inputs(sparse_type: str | None) -> None:
    q, k, v = tensors(300, B=2, H=3)
    wide = [torch.randn(2, 3, 300, 32) for _ in "qkv"]
    for x, y in zip(wide, (q, k, v), strict=True):
        x[..., ::2] = y
    more = {"sparse_type": sparse_type, "sparsity": 0.5 if sparse_type else 0.0}
    first = sparse_attention(q, k, v, **more)
    second = sparse_attention(*(x[..., ::2] for x in wide), **more)
    torch.testing.assert_close(first, second)
    assert second.is_contiguous()


@pytest.mark.parametrize("sparse_type", [None, *TYPES])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_sparsity_zero_is_dense(sparse_type: str | None, layout: str) -> None:
    q, k, v = tensors(1000, H=2, D=32, spread=1.0)
    given = (x if layout == "BNSD" else x.transpose(1, 2) for x in (q, k, v))
    out = sparse_attention(*given, sparse_type=sparse_type, input_layout=layout, head_num=2)
    out = out if layout == "BNSD" else out.transpose(1, 2)
    assert relative(out, sdpa(q.double(), k.double(), v.double())) < 5e-6
    if sparse_type is None:
        assert torch.equal(out, sdpa(q, k, v))


@pytest.mark.parametrize("sparse_type", TYPES)
@pytest.mark.parametrize("sparsity", [0.3, 0.7, 1, 1.0])
def test_sparsity_is_a_budget(seen: list[Attended], sparse_type: str, sparsity: float) -> None:
    q, k, v = tensors(4096, H=2)
    sparse_attention(q, k, v, sparse_type=sparse_type, sparsity=sparsity)
    plan = seen[0].plan
    assert plan is not None
    own = float(plan.layout.own.float().mean())
    slack = 1 / plan.layout.N + own  # rounding up, and the own blocks where they are more
    if sparse_type == "ada_bsa":
        slack += 2 / plan.layout.N  # sink and recent
    assert 1 - sparsity - 1.5 / plan.layout.N <= plan.cost <= 1 - sparsity + slack


def test_text_comes_first_and_is_protected(seen: list[Attended]) -> None:
    q, k, v = tensors(7 + 4 * 16 * 16, D=16)
    sparse_attention(
        q, k, v, sparse_type="rf_v2", sparsity=0.9, txt_len=7, latent_shape_q=[4, 16, 16]
    )
    plan = seen[0].plan
    assert plan is not None
    layout = plan.layout
    assert layout.q.index is not None
    assert layout.q.index[-7:].tolist() == list(range(7))
    assert (plan.levels[..., -1] == 1).all()
    assert (plan.levels[:, :, -1] == 1).all()


def test_all_text() -> None:
    q, k, v = tensors(300)
    out = sparse_attention(q, k, v, sparse_type="entropy", sparsity=0.9, txt_len=300)
    assert relative(out, sdpa(q, k, v)) < 5e-6


def test_latent_shape_k_is_honoured(seen: list[Attended]) -> None:
    q, k, v = tensors(2 * 16 * 16, 4 * 16 * 12)
    sparse_attention(
        q, k, v, sparse_type="rf_v2", sparsity=0.5, latent_shape_q=[2, 16, 16],
        latent_shape_k=[4, 16, 12],
    )  # fmt: skip
    layout = seen[0].plan.layout  # type: ignore[union-attr]
    assert layout.k_grid == TokenGrid.video(4, 16, 12)
    assert layout.q_grid == TokenGrid.video(2, 16, 16)
    one, other = (
        sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.8, latent_shape_k=shape)
        for shape in ([4, 16, 12], [1, 1, 768])
    )
    assert not torch.equal(one, other), "the keys' shape must decide their blocks"


@pytest.mark.parametrize("sparse_type", [None, *TYPES])
def test_key_masks_and_grouped_heads(sparse_type: str | None) -> None:
    q, k, v = tensors(300, B=2, H=6, kv=2)
    mask = torch.ones(2, 300, dtype=torch.bool)
    mask[0, 200:] = False
    mask[1] = False
    k, v = (x.masked_fill(~mask[:, None, :, None], torch.nan) for x in (k, v))
    for given in (mask, mask[:, None, None]):
        out = sparse_attention(q, k, v, attn_mask=given, sparse_type=sparse_type, head_num=6)
        wanted = sdpa(q[:1], k[:1, :, :200], v[:1, :, :200])
        assert relative(out[:1], wanted) < 5e-6
        assert (out[1] == 0).all()


def test_dense_takes_any_mask() -> None:
    q, k, v = tensors(40, B=2, H=3)
    pair = torch.rand(40, 40) < 0.5
    pair[:, 0] = True
    assert torch.equal(sparse_attention(q, k, v, attn_mask=pair), sdpa(q, k, v, attn_mask=pair))
    bias = torch.randn(2, 1, 40, 40)
    assert torch.equal(sparse_attention(q, k, v, attn_mask=bias), sdpa(q, k, v, attn_mask=bias))


def test_keys_hidden_from_all_queries_are_as_if_absent() -> None:
    q, k, v = tensors(40, B=2, H=3)
    junk_k, junk_v = k.clone(), v.clone()
    junk_k[:, :, 30:], junk_v[:, :, 30:] = torch.nan, torch.inf
    pair = torch.rand(40, 40) < 0.5
    pair[:, 0], pair[:, 30:] = True, False
    bias = torch.randn(2, 1, 40, 40).masked_fill(~pair, -torch.inf)
    for mask in (pair, bias, pair[:1], pair[0], pair[None, None]):
        out = sparse_attention(q, junk_k, junk_v, attn_mask=mask)
        assert torch.equal(out, sparse_attention(q, k, v, attn_mask=mask))
        assert out.isfinite().all()


@pytest.mark.parametrize("sparse_type", [None, "ada_bsa", "entropy"])
def test_causal(sparse_type: str | None) -> None:
    q, k, v = tensors(300)
    out = sparse_attention(q, k, v, is_causal=True, sparse_type=sparse_type)
    assert relative(out, sdpa(q, k, v, is_causal=True)) < 5e-6


@pytest.mark.parametrize("inner_precise", [0, 1])
def test_inner_precise(inner_precise: int) -> None:
    q, k, v = tensors(300, dtype=torch.bfloat16)
    out = sparse_attention(q, k, v, inner_precise=inner_precise, sparse_type="rf_v2", sparsity=0.5)
    assert torch.equal(out, sparse_attention(q, k, v, sparse_type="rf_v2", sparsity=0.5))


@pytest.mark.parametrize("shape", [np.array([2, 16, 12]), tuple(np.int32([2, 16, 12]))])
def test_numbers_of_numpy_are_numbers(seen: list[Attended], shape: Any) -> None:
    """A shape that was worked out with numpy: what the same ints give."""
    q, k, v = tensors(384 + 16, H=2, D=16)
    options: dict[str, Any] = {"sparse_type": "rf_v2", "backend": "reference"}
    plain = {"head_num": 2, "txt_len": 16, "block_size": 32, "sparsity": 0.5, "scale": 0.25,
             "is_causal": False}  # fmt: skip
    shapes = {"latent_shape_q": shape, "latent_shape_k": shape}
    kinds = {bool: np.bool_, int: np.int64, float: np.float32}
    theirs = {name: kinds[type(value)](value) for name, value in plain.items()}
    out = sparse_attention(q, k, v, **shapes, **theirs, **options)
    assert torch.equal(
        out, sparse_attention(q, k, v, latent_shape_q=[2, 16, 12], **plain, **options)
    )
    assert seen[0].plan is not None
    assert str(seen[0].plan.layout.q_grid) == "16 text + 2×16×12"


@pytest.mark.parametrize("shape", [np.array([2.0, 16, 12]), [2, 16, np.float64(12)], np.int64(384)])
def test_a_shape_of_numpy_is_ints(shape: Any) -> None:
    q, k, v = tensors(384)
    with pytest.raises(TypeError, match="latent_shape_q must be"):
        sparse_attention(q, k, v, sparse_type="rf_v2", latent_shape_q=shape)


def test_positional_call() -> None:
    q, k, v = tensors(256, H=2)
    by_place = sparse_attention(
        q, k, v, None, None, False, 2, "BNSD", 0, "rf_v2", 0, 128, [1, 16, 16], None, True, True,
        1.0, 0.5,
    )  # fmt: skip
    wanted = attend(q, k, v, method=RfV2(0.5), grid=(1, 16, 16)).out
    assert torch.equal(by_place, wanted)


@pytest.mark.parametrize("sparse_type", [None, *TYPES])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_compiles_to_one_graph(sparse_type: str | None, layout: str) -> None:
    q, k, v = tensors(300, H=2) if layout == "BNSD" else tensors(2, H=300)
    heads = 2
    options: dict[str, Any] = {"sparse_type": sparse_type, "head_num": heads}
    options |= {"input_layout": layout, "latent_shape_q": [3, 10, 10]}
    if sparse_type:
        options["sparsity"] = 0.5

    def model(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return sparse_attention(q * 2, k, v, **options) + 1

    torch._dynamo.reset()
    graphs: list[torch.fx.GraphModule] = []

    def count(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        graphs.append(graph)
        from torch._dynamo.backends.registry import lookup_backend

        return lookup_backend("aot_eager")(graph, inputs)

    with torch.no_grad():
        compiled = torch.compile(model, fullgraph=True, backend=count)
        torch.testing.assert_close(compiled(q, k, v), model(q, k, v))
        torch.testing.assert_close(compiled(k, q, v), model(k, q, v))
    assert len(graphs) == 1
    calls = [node for node in graphs[0].graph.nodes if "sparse_attention" in str(node.target)]
    assert len(calls) == 1
    torch._dynamo.reset()


@pytest.mark.parametrize("sparse_type", ["rf_v2", "psa", None])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_opcheck(sparse_type: str | None, layout: str) -> None:
    q, k, v = tensors(40, H=40, D=16)
    sparsity = 0.5 if sparse_type else 0.0
    torch.library.opcheck(
        torch.ops.jali.sparse_attention.default,
        (q, k, v, None, None, False, 40, layout, 0, sparse_type, 0, 128, [1, 5, 8], None, True,
         True, 1.0, sparsity, False, "auto"),
    )  # fmt: skip
