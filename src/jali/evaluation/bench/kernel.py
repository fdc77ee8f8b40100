"""`jali bench kernel`: attention alone, dense and sparse, in one run."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from jali.attend import attend
from jali.backends import BACKENDS, Backend, Task, fa4
from jali.backends.dense import stock
from jali.evaluation.bench.inputs import Shape, make_inputs
from jali.evaluation.bench.measure import median_ms, sampled_error
from jali.methods import AdaBsa, Entropy, Method, Psa, Query, RfV2
from jali.planning.budget import Budget
from jali.planning.plan import BlockPlan, full_plan
from jali.planning.site import Site
from jali.tokens.layout import block_layout
from jali.tokens.order import Raster

log = logging.getLogger("jali")

DENSITIES = (1.0, 0.7, 0.5, 0.3, 0.2, 0.1)
METHODS: dict[str, Method] = {
    "entropy-0.5": Entropy(Budget(0.5)),
    "entropy-0.3": Entropy(Budget(0.3)),
    "rf_v2-0.8": RfV2(sparsity=0.8),
    "ada_bsa-0.8": AdaBsa(sparsity=0.8),
    "psa": Psa(),
    "psa-raster": Psa(order=Raster()),
    "psa-raster-surrogate": Psa(order=Raster(), importance="surrogate"),
    "psa-fine": Psa(
        {1: (0.0, 0.3), 2: (0.3, 0.5), 8: (0.5, 0.8), 0: (0.8, 1.0)}, k_block=128, order=Raster()
    ),
}
Inputs = list[tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class KernelRow:
    """One measurement. `speedup` is over the fastest dense attention of the same run; `plan_ms`
    and `whole_ms` (planning and attention in one call) are there for sparse rows."""

    shape: str
    inputs: str
    backend: str
    method: str
    budget: float
    cost: float
    ms: float
    tflops: float
    speedup: float
    error: float | None
    plan_ms: float | None = None
    whole_ms: float | None = None
    whole_speedup: float | None = None
    why_not: str | None = None


def run(
    shapes: Iterable[Shape],
    kinds: Iterable[str],
    densities: Iterable[float],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    backends: Iterable[str] = ("fa4", "triton", "flex", "torch"),
    repeats: int = 10,
    methods: Iterable[str] = (),
) -> Iterator[KernelRow]:
    """Measure row by row: dense kernels, then every backend at every density by lists of the
    entropy method, then whole calls of the named methods on whatever backend is the fastest."""
    for shape in shapes:
        for kind in kinds:
            inputs = [make_inputs(kind, shape, device, dtype, seed) for seed in range(2)]
            _warm(shape, inputs, device)
            dense = list(_dense_rows(shape, kind, inputs, device, repeats))
            best = min(row.ms for row in dense)
            yield from (_over(row, best) for row in dense)
            for name in backends:
                yield from _sparse_rows(
                    shape, kind, inputs, BACKENDS[name], list(densities), best, device, repeats
                )
            for name in methods:
                for backend in _able(METHODS[name], shape, inputs[0][0]):
                    yield _method_row(shape, kind, inputs, name, backend, best, device, repeats)


def _warm(shape: Shape, inputs: Inputs, device: torch.device, seconds: float = 1.0) -> None:
    """Work until the clocks have settled: a cool GPU flatters whatever is measured first."""
    if device.type != "cuda":
        return
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        stock(*inputs[0], shape.head_dim**-0.5)
        torch.cuda.synchronize(device)


def _dense_rows(
    shape: Shape, kind: str, inputs: Inputs, device: torch.device, repeats: int
) -> Iterator[KernelRow]:
    scale = shape.head_dim**-0.5
    for name, call in _dense_kernels(shape, inputs[0][0], scale).items():
        ms = median_ms(call, inputs, device=device, repeats=repeats)
        error = sampled_error(*inputs[0], call(*inputs[0]), None, scale)
        tflops = shape.flops / ms / 1e9
        yield KernelRow(shape.name, kind, name, "dense", 1.0, 1.0, ms, tflops, 1.0, error)


def _dense_kernels(shape: Shape, q: Tensor, scale: float) -> dict[str, Callable[..., Tensor]]:
    def by(backend: SDPBackend) -> Callable[..., Tensor]:
        def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                return stock(q, k, v, scale)

        return call

    if not q.is_cuda:
        return {"sdpa": lambda q, k, v: stock(q, k, v, scale)}
    kernels = {
        "sdpa-flash": by(SDPBackend.FLASH_ATTENTION),
        "sdpa-cudnn": by(SDPBackend.CUDNN_ATTENTION),
    }
    if not fa4.Fa4().why_not(_task(shape, q)):
        kernels["fa4-dense"] = lambda q, k, v: fa4.dense(q, k, v, scale)
    return kernels


def _sparse_rows(
    shape: Shape,
    kind: str,
    inputs: Inputs,
    backend: Backend,
    densities: list[float],
    best: float,
    device: torch.device,
    repeats: int,
) -> Iterator[KernelRow]:
    task = _task(shape, inputs[0][0])
    reasons = backend.why_not(task)
    if reasons:
        why = "; ".join(reasons)
        yield KernelRow(shape.name, kind, backend.name, "entropy", 0, 0, 0, 0, 0, None, why_not=why)
        return
    if backend.name == "torch" and device.type == "cuda":
        # Slow on a GPU: two densities and few repeats say enough.
        densities, repeats = [d for d in densities if d in (0.3, 0.1)], min(repeats, 3)
    for density in densities:
        yield _sparse_row(shape, kind, inputs, backend, task, density, best, device, repeats)


def _sparse_row(
    shape: Shape,
    kind: str,
    inputs: Inputs,
    backend: Backend,
    task: Task,
    density: float,
    best: float,
    device: torch.device,
    repeats: int,
) -> KernelRow:
    scale = shape.head_dim**-0.5
    method = Entropy(Budget(density))
    layout = block_layout(shape.grid, blocks=backend.preferred(task), device=device)

    def planned(q: Tensor, k: Tensor, v: Tensor) -> BlockPlan:  # noqa: ARG001
        if density == 1.0:
            return full_plan(layout)
        return method.plan(Query(q, k, layout, Site(), scale))

    plans = [planned(*x) for x in inputs]
    for plan in plans:
        plan.lists  # noqa: B018  (built here, so that only attention is timed)
    given = [(*x, plan) for x, plan in zip(inputs, plans, strict=True)]

    def call(q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan) -> Tensor:
        return backend.attend(q, k, v, plan, scale)[0]

    ms = median_ms(call, given, device=device, repeats=repeats)
    error = sampled_error(*inputs[0], call(*given[0]), plans[0], scale)
    cost = plans[0].cost
    row = KernelRow(
        shape.name,
        kind,
        backend.name,
        "entropy",
        density,
        cost,
        ms,
        cost * shape.flops / ms / 1e9,
        best / ms,
        error,
    )
    if density == 1.0:
        return row
    plan_ms = median_ms(lambda *x: planned(*x).lists, inputs, device=device, repeats=repeats)
    whole_ms = whole(shape, method, inputs, backend.name, device, repeats)
    return KernelRow(
        **{
            **asdict(row),
            "plan_ms": plan_ms,
            "whole_ms": whole_ms,
            "whole_speedup": best / whole_ms,
        }
    )


def _method_row(
    shape: Shape,
    kind: str,
    inputs: Inputs,
    name: str,
    backend: str,
    best: float,
    device: torch.device,
    repeats: int,
) -> KernelRow:
    method = METHODS[name]
    scale = shape.head_dim**-0.5
    done = attend(*inputs[0], method=method, grid=shape.grid, backend=backend)
    plan, executed = done.plan, done.executed
    assert plan is not None
    assert executed is not None
    layout = plan.layout
    q, k, v = (layout.q.arrange(x) for x in inputs[0])
    error = sampled_error(q, k, v, layout.q.arrange(done.out), executed, scale)

    def planned(q: Tensor, k: Tensor) -> Any:
        return method.plan(Query(q, k, layout, Site(), scale)).lists

    pairs = [(layout.q.arrange(q), layout.k.arrange(k)) for q, k, _ in inputs]
    plan_ms = median_ms(planned, pairs, device=device, repeats=repeats)

    def run_plan(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return BACKENDS[done.backend].attend(q, k, v, executed, scale)[0]

    ms = median_ms(run_plan, [(q, k, v)], device=device, repeats=repeats)
    whole_ms = whole(shape, method, inputs, backend, device, repeats)
    cost = plan.cost
    return KernelRow(
        shape.name,
        kind,
        done.backend,
        name,
        _asked(method, cost),
        cost,
        ms,
        cost * shape.flops / ms / 1e9,
        best / ms,
        error,
        plan_ms,
        whole_ms,
        best / whole_ms,
    )


def _able(method: Method, shape: Shape, q: Tensor) -> list[str]:
    """The fastest backend; for a pyramid both that are made for it."""
    task = replace(_task(shape, q), ratios=method.ratios)
    able = [name for name, backend in BACKENDS.items() if not backend.why_not(task)]
    pyramid = [name for name in able if name in ("fa4+triton", "triton")]
    return pyramid if method.ratios != (1,) and pyramid else able[:1]


def _asked(method: Method, cost: float) -> float:
    """The share of the work that was asked for; the pyramid's levels ask for none."""
    if isinstance(method, Entropy):
        return method.budget.mean
    return 1 - method.sparsity if isinstance(method, RfV2 | AdaBsa) else cost


def whole(
    shape: Shape, method: Method, inputs: Inputs, backend: str, device: torch.device, repeats: int
) -> float:
    """Median time of one `attend` call, planning and reordering included."""

    def call(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return attend(q, k, v, method=method, grid=shape.grid, backend=backend)

    return median_ms(call, inputs, device=device, repeats=repeats)


def _task(shape: Shape, q: Tensor) -> Task:
    return Task(
        device=q.device,
        dtype=q.dtype,
        head_dim=shape.head_dim,
        heads=shape.heads,
        kv_heads=shape.heads,
        q_tokens=shape.tokens,
        k_tokens=shape.tokens,
    )


def _over(row: KernelRow, best: float) -> KernelRow:
    return KernelRow(**{**asdict(row), "speedup": best / row.ms})
