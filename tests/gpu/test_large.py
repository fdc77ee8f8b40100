"""Large calls on a GPU: against exact attention on sampled rows, and inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch

import jali
from jali.backends import BACKENDS, Task
from jali.evaluation.bench.inputs import Shape, make_inputs
from jali.evaluation.bench.measure import sampled_error
from jali.methods import Query

pytestmark = pytest.mark.gpu

SHAPES = [
    Shape("ragged", 3, 128, jali.TokenGrid.video(21, 30, 52)),
    Shape("text in front", 6, 64, jali.TokenGrid.video(13, 30, 45, text=226)),
    Shape("text behind", 2, 128, jali.TokenGrid.video(33, 34, 60, text=256, text_side="back")),
    Shape("120k", 1, 128, jali.TokenGrid.video(33, 45, 80, text=256, text_side="back")),
]
METHODS = [
    jali.Entropy(jali.Budget(0.3)),
    jali.RfV2(sparsity=0.8),
    jali.AdaBsa(sparsity=0.8),
    jali.AdaBsa(cdf_threshold=0.6),
    jali.Psa(),
    jali.Psa(mode="thresholdbound", importance="surrogate"),
]


@pytest.mark.parametrize("backend", ["fa4", "triton", "flex"])
@pytest.mark.parametrize("method", METHODS, ids=lambda m: m.name)
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: s.name)
def test_large_calls_are_exact(shape: Shape, method: jali.Method, backend: str) -> None:
    device = torch.device("cuda")
    q, k, v = make_inputs("structured", shape, device, torch.bfloat16)
    task = Task(
        device, q.dtype, shape.head_dim, shape.heads, shape.heads, shape.tokens, shape.tokens,
        method.ratios,
    )  # fmt: skip
    if BACKENDS[backend].why_not(task):
        pytest.skip("; ".join(BACKENDS[backend].why_not(task)))
    done = jali.attend(q, k, v, method=method, grid=shape.grid, backend=backend)
    assert done.executed is not None
    layout = done.executed.layout
    q, k, v, out = (layout.q.arrange(x) for x in (q, k, v, done.out))
    error = sampled_error(q, k, v, out, done.executed, shape.head_dim**-0.5)
    assert error < BACKENDS[backend].tolerance[torch.bfloat16]
    assert torch.isfinite(done.out).all()
    assert done.plan is not None
    assert done.plan.cost < 0.7


@pytest.mark.parametrize("backend", ["fa4", "triton"])
@pytest.mark.parametrize(
    "method", [jali.Entropy(jali.Budget(0.3)), jali.RfV2(), jali.Psa()], ids=lambda m: m.name
)
def test_planning_and_attention_in_a_cuda_graph(method: jali.Method, backend: str) -> None:
    device = torch.device("cuda")
    shape = Shape("small video", 4, 128, jali.TokenGrid.video(9, 24, 40))
    q, k, v = make_inputs("structured", shape, device, torch.bfloat16)
    task = Task(device, q.dtype, 128, 4, 4, shape.tokens, shape.tokens, method.ratios)
    if BACKENDS[backend].why_not(task):
        pytest.skip("; ".join(BACKENDS[backend].why_not(task)))

    def call() -> torch.Tensor:
        return jali.attend(q, k, v, method=method, grid=shape.grid, backend=backend).out

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = call()
    fresh = make_inputs("structured", shape, device, torch.bfloat16, seed=7)
    for old, new in zip((q, k, v), fresh, strict=True):
        old.copy_(new)
    graph.replay()
    torch.cuda.synchronize()
    torch.testing.assert_close(captured, call(), rtol=0, atol=0)


def test_fused_planning_agrees_with_the_torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda")
    shape = Shape("wan-480p", 3, 128, jali.TokenGrid.video(21, 30, 52))
    q, k, _ = make_inputs("structured", shape, device, torch.bfloat16)
    for method in METHODS:
        layout = method.layout(shape.grid, None, None, method.blocks(jali.Blocks(256, 128)), device)
        query = Query(layout.q.arrange(q), layout.k.arrange(k), layout, jali.Site(), 128**-0.5)
        fused = method.plan(query).levels
        with monkeypatch.context() as patch:
            patch.setattr("jali.kernels.available", lambda _: False)
            plain = method.plan(query).levels
        same = (fused == plain).float().mean()
        assert same >= 0.999, f"{method.name}: {same:.5f}"


def test_planning_needs_little_memory() -> None:
    device = torch.device("cuda")
    shape = Shape("wan-720p", 12, 128, jali.TokenGrid.video(21, 45, 80))
    q, k, _ = make_inputs("gaussian", shape, device, torch.bfloat16)
    for method in METHODS:
        layout = method.layout(shape.grid, None, None, method.blocks(jali.Blocks(256, 128)), device)
        query = Query(layout.q.arrange(q), layout.k.arrange(k), layout, jali.Site(), 128**-0.5)
        method.plan(query)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        method.plan(query)
        extra = torch.cuda.max_memory_allocated() - before
        assert extra <= 150e6, f"{method.name}: {extra / 1e6:.0f} MB"
