"""What every method keeps of a captured call, at equal cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from jali.attend import PreparedCall, prepare
from jali.checks import check_call
from jali.evaluation.inspection.capture import Capture
from jali.methods import METHODS, Dense, Method, make_method
from jali.planning.plan import BlockPlan

CONTROLS = ("random", "local")
ROWS = 64  # sampled queries; every head of every method is judged on the same ones
SEARCHES, CLOSE, FAR = 8, 0.02, 0.15


@dataclass(frozen=True)
class MethodScore:
    """One method on one call. Means over heads and sampled queries.

    `mass` is the share of the exact attention that lies in blocks it reads, `mass_full` in those
    it reads unpooled. `error` is ‖out − dense‖ / ‖dense‖, dense in fp32. `heads` has one (cost,
    mass, error) for every head.
    """

    method: str
    budget: float
    cost: float
    density: float
    mass: float
    mass_full: float
    error: float
    heads: tuple[tuple[float, float, float], ...]


@dataclass(frozen=True, eq=False)
class JudgedCall:
    """One call: how far each head looks, and every method's score.

    `spread` is the share of keys that a head spreads its attention over: exp(entropy) / keys.
    `bound` is the mass that no plan of full blocks in the model's own order can exceed at this
    cost: that of each query's own heaviest blocks.
    """

    capture: Capture
    cost: float
    spread: tuple[float, ...]
    bound: float
    scores: tuple[MethodScore, ...]
    plans: Mapping[str, BlockPlan]


def judge(
    captures: Iterable[Capture], cost: float, methods: Sequence[str] = (), rows: int = ROWS
) -> Iterator[JudgedCall]:
    """Every method (or those named) on every call, each asked for what makes its cost this one."""
    if not 0 < cost < 1:
        raise ValueError(f"cost is a share of dense attention's work above 0 and below 1: {cost}")
    chosen = {name: make_method(name) for name in methods or METHODS if name != Dense.name}
    for call in captures:
        exact = _ExactAttention(call, rows)
        scores, plans = [], {}
        for name, method in chosen.items():
            score, plan = _score(name, method, call, exact, cost)
            scores.append(score)
            plans[name] = plan
        block = next(iter(plans.values())).blocks.k
        yield JudgedCall(call, cost, exact.spread(), exact.bound(cost, block), tuple(scores), plans)


def ranking(judged: Sequence[JudgedCall]) -> list[tuple[str, float, float]]:
    """(method, mean error, mean mass) over all calls, the nearest to dense first; methods that
    cannot be had at this cost come last, however near they are."""
    costly, found = too_costly(judged), []
    for name in [score.method for score in judged[0].scores]:
        own = [score for call in judged for score in call.scores if score.method == name]
        found.append((name, fmean(s.error for s in own), fmean(s.mass for s in own)))
    return sorted(found, key=lambda row: (row[0] in costly, row[1]))


def too_costly(judged: Sequence[JudgedCall]) -> set[str]:
    """Methods that cost more than was allowed somewhere: what they force is more than that."""
    return {v.method for j in judged for v in j.scores if v.cost > (1 + FAR) * j.cost}


def prepared_call(method: Method, call: Capture) -> PreparedCall:
    """The call as `attend` would make it."""
    checked = check_call(
        call.q, call.k, call.v, method, call.grid, scale=call.scale, padding=call.padding
    )
    return prepare(checked, method, "auto")


def planned(method: Method, call: Capture) -> BlockPlan:
    """The plan a backend would run, without running it."""
    prepared = prepared_call(method, call)
    query, _ = prepared.query(call.q, call.k, call.v, call.site)
    return prepared.plan(query)[1]


def _at_cost(method: Method, call: Capture, cost: float) -> tuple[float, Method, BlockPlan]:
    """The budget that makes the achieved cost this one, as nearly as blocks allow.

    What is forced counts too, and pooling and coarser blocks cost otherwise than asked; so the
    asked budget is searched by halving.
    """
    low, high, asked = 0.0, 1.0, cost
    tried: dict[float, tuple[float, Method, BlockPlan]] = {}  # by how far the cost was off
    for _ in range(SEARCHES):
        own = method.with_budget(asked)
        plan = planned(own, call)
        miss = plan.cost - cost
        tried.setdefault(abs(miss), (asked, own, plan))
        if abs(miss) <= CLOSE * cost:
            break
        low, high = (low, asked) if miss > 0 else (asked, high)
        asked = (low + high) / 2
    return tried[min(tried)]


def _score(
    name: str, method: Method, call: Capture, exact: _ExactAttention, cost: float
) -> tuple[MethodScore, BlockPlan]:
    budget, own, plan = _at_cost(method, call, cost)
    done = prepared_call(own, call).run(call.q, call.k, call.v, call.site)
    H = call.q.shape[1]
    costs = plan.costs[0].expand(H).tolist()
    read = [exact.mass(plan, head) for head in range(H)]
    error, errors = exact.errors(done.out)
    score = MethodScore(
        method=name,
        budget=budget,
        cost=plan.cost,
        density=plan.density,
        mass=fmean(touched for touched, _ in read),
        mass_full=fmean(full for _, full in read),
        error=error,
        heads=tuple(zip(costs, (touched for touched, _ in read), errors, strict=True)),
    )
    return score, plan


class _ExactAttention:
    """Dense attention in fp32 on some queries of the first sample, head by head."""

    def __init__(self, call: Capture, rows: int) -> None:
        S = call.q.shape[2]
        count = min(rows, S)
        # Evenly over the sequence, each a little off, so that no row or column is favoured.
        drawn = torch.Generator().manual_seed(0)
        at = (torch.arange(count) + torch.rand(count, generator=drawn)) * (S / count)
        self.rows = at.long().clamp_max(S - 1).to(call.q.device)
        self.call = call

    def weights(self, head: int, rows: Tensor | None = None) -> Tensor:
        """The softmax of these queries over all keys, in the model's order. fp32 [R, S]."""
        call = self.call
        rows = self.rows if rows is None else rows
        kv = head // (call.q.shape[1] // call.k.shape[1])
        logits = call.q[0, head, rows].float() @ call.k[0, kv].float().T * call.scale
        if call.padding is not None:
            real = call.padding.valid(logits.shape[-1])[0].to(logits.device)
            logits = logits.masked_fill(~real, -torch.inf)
        return logits.softmax(-1)

    def mass(self, plan: BlockPlan, head: int) -> tuple[float, float]:
        """(touched, read in full): shares of the exact weights."""
        layout = plan.layout
        slots = self.rows if layout.q.inverse is None else layout.q.inverse[self.rows]
        levels = plan.levels[0, head % plan.levels.shape[1]][slots // plan.blocks.q]
        levels = levels.repeat_interleave(plan.blocks.k, dim=-1)[:, : layout.k.tokens]
        if layout.k.inverse is not None:
            levels = levels.index_select(1, layout.k.inverse)
        weights = self.weights(head)
        touched = (weights * (levels > 0)).sum(-1).mean()
        return float(touched), float((weights * (levels == 1)).sum(-1).mean())

    def errors(self, out: Tensor) -> tuple[float, list[float]]:
        """‖out − exact‖ / ‖exact‖ over all heads together, as the next layer sees them, and of
        every head."""
        call = self.call
        squares = []
        for head in range(out.shape[1]):
            kv = head // (call.q.shape[1] // call.k.shape[1])
            exact = self.weights(head) @ call.v[0, kv].float()
            wrong = out[0, head, self.rows].float() - exact
            squares.append((float(wrong.square().sum()), float(exact.square().sum())))
        squares.append((sum(wrong for wrong, _ in squares), sum(total for _, total in squares)))
        *heads, whole = ((wrong / max(total, 1e-30)) ** 0.5 for wrong, total in squares)
        return whole, heads

    def _every_head(self) -> Iterator[Tensor]:
        return (self.weights(head) for head in range(self.call.q.shape[1]))

    def spread(self) -> tuple[float, ...]:
        """Of every head, see `JudgedCall`."""
        entropies = (-(w * w.clamp_min(1e-30).log()).sum(-1) for w in self._every_head())
        return tuple(float(e.exp().mean()) / self.call.k.shape[2] for e in entropies)

    def bound(self, cost: float, block: int) -> float:
        """The mass of every query's own heaviest blocks; the last one counts in part, so that it
        is exactly this cost."""
        found = []
        for weights in self._every_head():
            padded = torch.nn.functional.pad(weights, (0, -weights.shape[-1] % block))
            blocks = padded.unflatten(-1, (-1, block)).sum(-1).sort(-1, descending=True).values
            whole, part = divmod(cost * blocks.shape[1], 1)
            mass = blocks[:, : int(whole)].sum(-1) + part * blocks[:, int(whole)]
            found.append(float(mass.mean()))
        return fmean(found)

    def block_map(self, head: int, plan: BlockPlan) -> Tensor:
        """The exact weights of a query in every query block, summed over key blocks. [M, N]."""
        layout = plan.layout
        slots = torch.arange(layout.M, device=self.rows.device) * plan.blocks.q
        slots = (slots + plan.blocks.q // 2).clamp_max(layout.q.tokens - 1)
        rows = slots if layout.q.index is None else layout.q.index[slots]
        weights = self.weights(head, rows)
        if layout.k.index is not None:
            weights = weights.index_select(1, layout.k.index)
        S = weights.shape[-1]
        padded = torch.nn.functional.pad(weights, (0, layout.N * plan.blocks.k - S))
        return padded.unflatten(-1, (layout.N, plan.blocks.k)).sum(-1)


def exact_map(call: Capture, head: int, plan: BlockPlan) -> Tensor:
    """Where a head really looks, on a plan's blocks. fp32 [M, N] on the host."""
    return _ExactAttention(call, 1).block_map(head, plan).cpu()
