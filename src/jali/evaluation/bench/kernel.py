"""`jali bench kernel`: attention alone, dense and sparse, in one run."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from jali.attend import ONE_CALL, attend, prepare
from jali.backends import BACKENDS, Backend, Task, fa4
from jali.backends.dense import stock
from jali.checks import check_call
from jali.evaluation.bench.inputs import Shape, make_inputs
from jali.evaluation.bench.measure import median_ms, sampled_error
from jali.methods import AdaBsa, Dense, Entropy, Method, Psa, Query, RfV2
from jali.planning.budget import Budget
from jali.planning.plan import BlockPlan, full_plan
from jali.tokens.order import Raster

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
            bench = _Bench(shape, kind, inputs, repeats)
            bench.warm()
            dense = list(bench.dense_rows())
            bench = replace(bench, dense_ms=min(row.ms for row in dense))
            yield from (replace(row, speedup=bench.dense_ms / row.ms) for row in dense)
            for name in backends:
                yield from bench.backend_rows(BACKENDS[name], densities)
            for name in methods:
                for backend in bench.able(METHODS[name]):
                    yield bench.sparse_row(name, METHODS[name], backend)


@dataclass(frozen=True)
class _Bench:
    """One shape on one kind of input; `dense_ms` is what the fastest dense kernel took."""

    shape: Shape
    kind: str
    inputs: Inputs
    repeats: int
    dense_ms: float = 1.0

    @property
    def scale(self) -> float:
        return self.shape.head_dim**-0.5

    @property
    def device(self) -> torch.device:
        return self.inputs[0][0].device

    @property
    def task(self) -> Task:
        return check_call(*self.inputs[0], Dense(), self.shape.grid).task

    def warm(self, seconds: float = 1.0) -> None:
        """Work until the clocks have settled: a cool GPU flatters whatever is measured first."""
        if self.device.type != "cuda":
            return
        start = time.perf_counter()
        while time.perf_counter() - start < seconds:
            stock(*self.inputs[0], self.scale)
            torch.cuda.synchronize(self.device)

    def dense_rows(self) -> Iterator[KernelRow]:
        """Every dense kernel that runs here."""
        for name, call in self._dense_kernels().items():
            ms = self._ms(call, self.inputs)
            error = sampled_error(*self.inputs[0], call(*self.inputs[0]), None, self.scale)
            yield self._row(name, "dense", 1.0, 1.0, ms, error)

    def _dense_kernels(self) -> dict[str, Callable[..., Tensor]]:
        plain = functools.partial(stock, scale=self.scale)
        if self.device.type != "cuda":
            return {"sdpa": plain}
        kernels: dict[str, Callable[..., Tensor]] = {
            "sdpa-flash": sdpa_kernel(SDPBackend.FLASH_ATTENTION)(plain),
            "sdpa-cudnn": sdpa_kernel(SDPBackend.CUDNN_ATTENTION)(plain),
        }
        if not fa4.Fa4().why_not(self.task):
            kernels["fa4-dense"] = functools.partial(fa4.dense, scale=self.scale)
        return kernels

    def backend_rows(self, backend: Backend, densities: Iterable[float]) -> Iterator[KernelRow]:
        """A backend at every density, or why it cannot run."""
        reasons = backend.why_not(self.task)
        if reasons:
            none = KernelRow(
                self.shape.name, self.kind, backend.name, "entropy", 0, 0, 0, 0, 0, None
            )
            yield replace(none, why_not="; ".join(reasons))
            return
        bench = self
        if backend.name == "torch" and self.device.type == "cuda":
            # Slow on a GPU: two densities and few repeats say enough.
            densities = [d for d in densities if d in (0.3, 0.1)]
            bench = replace(self, repeats=min(self.repeats, 3))
        for density in densities:
            entropy = Entropy(Budget(density))
            yield bench.sparse_row("entropy", entropy, backend.name, full=density == 1.0)

    def able(self, method: Method) -> list[str]:
        """The fastest backend; for a pyramid both that are made for it."""
        task = replace(self.task, ratios=method.executed_ratios)
        able = [name for name, backend in BACKENDS.items() if not backend.why_not(task)]
        pyramid = [name for name in able if name in ("fa4+triton", "triton")]
        return pyramid if method.executed_ratios != (1,) and pyramid else able[:1]

    def sparse_row(self, name: str, method: Method, backend: str, full: bool = False) -> KernelRow:
        """A method as a call runs it, in its own order and blocks: attention alone, planning alone,
        and the whole call. A `full` one reads everything, without planning."""
        prepared = prepare(check_call(*self.inputs[0], method, self.shape.grid), method, backend)
        seen = [prepared.query(q, k, v, ONE_CALL) for q, k, v in self.inputs]
        if full:
            plans = [(full_plan(prepared.layout),) * 2 for _ in seen]
        else:
            plans = [prepared.plan(query) for query, _ in seen]
        for _, executed in plans:
            executed.lists  # noqa: B018  (built here, so that only attention is timed)
        given = [(query, v(), done) for (query, v), (_, done) in zip(seen, plans, strict=True)]

        def run_plan(query: Query, v: Tensor, plan: BlockPlan) -> Tensor:
            return prepared.backend.attend(query.q, query.k, v, plan, query.scale)[0]

        query, v, executed = given[0]
        error = sampled_error(query.q, query.k, v, run_plan(*given[0]), executed, self.scale)
        cost = fmean(done.cost for _, done in plans)  # of what is timed
        row = functools.partial(
            self._row, prepared.backend.name, name, _asked_share(method, cost), cost,
            self._ms(run_plan, given), error,
        )  # fmt: skip
        if full:
            return row()
        whole = functools.partial(attend, method=method, grid=self.shape.grid, backend=backend)

        def order_and_plan(q: Tensor, k: Tensor, v: Tensor) -> object:
            return prepared.plan(prepared.query(q, k, v, ONE_CALL)[0])[0].lists

        if method.orders_heads:  # made from q and k, so that they are a part of planning
            plan_ms = self._ms(order_and_plan, self.inputs)
        else:
            made = [(query,) for query, _ in seen]
            plan_ms = self._ms(lambda query: method.plan(query).lists, made)
        return row(plan_ms, self._ms(whole, self.inputs))

    def _ms(self, call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]]) -> float:
        return median_ms(call, inputs, device=self.device, repeats=self.repeats)

    def _row(
        self, backend: str, method: str, budget: float, cost: float, ms: float, error: float,
        plan_ms: float | None = None, whole_ms: float | None = None,
    ) -> KernelRow:  # fmt: skip
        tflops = cost * self.shape.flops / ms / 1e9
        whole_speedup = None if whole_ms is None else self.dense_ms / whole_ms
        return KernelRow(
            self.shape.name, self.kind, backend, method, budget, cost, ms, tflops,
            self.dense_ms / ms, error, plan_ms, whole_ms, whole_speedup,
        )  # fmt: skip


def _asked_share(method: Method, cost: float) -> float:
    """The share of the work that was asked for; the pyramid's levels ask for none."""
    if isinstance(method, Entropy):
        return method.budget.mean
    return 1 - method.sparsity if isinstance(method, RfV2 | AdaBsa) else cost
