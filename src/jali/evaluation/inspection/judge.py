"""What every method keeps of a captured call, at equal cost."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from jali.attend import PreparedCall, prepare
from jali.checks import check_call
from jali.evaluation.inspection.capture import Capture
from jali.methods import METHODS, Dense, Method, RateDistortion, make_method
from jali.planning.cost import read_sizes
from jali.planning.plan import BlockPlan
from jali.planning.tables import Tables

ROWS = 64  # sampled queries; every head of every method is judged on the same ones
SEARCHES, CLOSE, FAR = 8, 0.02, 0.15
# Pairs of a row and a key that are looked at to know what a call could have: seconds.
PAIRS = {"cpu": 10**9, "cuda": 10**11}


@dataclass(frozen=True)
class MethodScore:
    """One method on one call. Means over heads and sampled queries.

    `mass` is the share of the exact attention that lies in blocks it reads, `mass_full` in those
    it reads unpooled, and `bound` is the most that any choice of full blocks, in its order and for
    as much work on these queries, has in them. `error` is ‖out − dense‖ / ‖dense‖, dense in fp32.
    `always` is the cost of what it reads whatever it is asked for. `heads` has one (cost, mass,
    error) for every head.
    """

    method: str
    budget: float
    cost: float
    density: float
    mass: float
    mass_full: float
    bound: float
    error: float
    always: float
    heads: tuple[tuple[float, float, float], ...]

    @property
    def no_choice(self) -> bool:
        """Whether all that it read is always read."""
        return self.cost <= self.always * (1 + 1e-9)


@dataclass(frozen=True)
class Reachable:
    """About the least error that blocks read at some level can have for the cost of a call.

    Levels by their error on all rows of every query block (or on `rows` of each `of`, where all
    would take too long): to know that takes more work than dense attention. It is no method.
    """

    score: MethodScore
    rows: int
    of: int

    def __str__(self) -> str:
        return "all rows seen" if self.rows == self.of else f"{self.rows} of {self.of} rows seen"


@dataclass(frozen=True, eq=False)
class JudgedCall:
    """One call: how far each head looks, every method's score, and what could be had.

    `spread` is the share of keys that a head spreads its attention over: exp(entropy) / keys.
    """

    capture: Capture
    cost: float
    spread: tuple[float, ...]
    scores: tuple[MethodScore, ...]
    plans: Mapping[str, BlockPlan]
    reachable: Reachable | None = None

    @property
    def bound(self) -> float:
        """The most that any of its methods could have read in full: the largest of their bounds."""
        return max(score.bound for score in self.scores)


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
        reachable = _reachable(call, exact, cost)
        yield JudgedCall(call, cost, exact.spread(), tuple(scores), plans, reachable)


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


def planned(method: Method, call: Capture, tables: Tables | None = None) -> BlockPlan:
    """The plan a backend would run, without running it."""
    prepared = prepared_call(method, call)
    query, _ = prepared.query(call.q, call.k, call.v, call.site, tables)
    return prepared.plan(query)[1]


def _reachable(call: Capture, exact: _ExactAttention, cost: float) -> Reachable:
    method = RateDistortion(levels=(2, 4, 8, "mean", "skip"))
    H, Sq, Sk = call.q.shape[1], call.q.shape[2], call.k.shape[2]
    most = PAIRS.get(call.q.device.type, PAIRS["cuda"]) * method.q_block // (H * Sq * Sk)
    rows = min(method.q_block, max(method.samples, most))
    score, _ = _score("reachable", replace(method, samples=rows), call, exact, cost)
    return Reachable(score, rows, method.q_block)


def _at_cost(
    method: Method, call: Capture, cost: float, always: float, tables: Tables
) -> tuple[float, Method, BlockPlan]:
    """The budget that makes the achieved cost this one, as nearly as blocks allow.

    What is `always` read counts too, and pooling and coarser blocks cost otherwise than asked; so
    the asked budget is searched by halving.
    """
    low, high, asked = 0.0, 1.0, cost
    tried: dict[float, tuple[float, Method, BlockPlan]] = {}  # by how far the cost was off
    for _ in range(SEARCHES):
        own = method.with_budget(asked)
        plan = planned(own, call, tables)
        miss = plan.cost - cost
        tried.setdefault(abs(miss), (asked, own, plan))
        if abs(miss) <= CLOSE * cost or (miss > 0 and plan.cost <= always):
            break
        low, high = (low, asked) if miss > 0 else (asked, high)
        asked = (low + high) / 2
    return tried[min(tried)]


def _score(
    name: str, method: Method, call: Capture, exact: _ExactAttention, cost: float
) -> tuple[MethodScore, BlockPlan]:
    tables = Tables()  # what a method looked at serves every budget
    always = planned(method.with_budget(0.0), call, tables).cost
    budget, own, plan = _at_cost(method, call, cost, always, tables)
    done = prepared_call(own, call).run(call.q, call.k, call.v, call.site, tables)
    H = call.q.shape[1]
    costs = plan.costs[0].expand(H).tolist()
    read = _ReadMass.of(exact, plan, H)
    masses, error, errors = read.touched.tolist(), *exact.errors(done.out)
    score = MethodScore(
        method=name,
        budget=budget,
        cost=plan.cost,
        density=plan.density,
        mass=fmean(masses),
        mass_full=float(read.full.mean()),
        bound=read.bound,
        error=error,
        always=always,
        heads=tuple(zip(costs, masses, errors, strict=True)),
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
        self.values = call.v if call.padding is None else call.padding.zeroed(call.v)

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

    def errors(self, out: Tensor) -> tuple[float, list[float]]:
        """‖out − exact‖ / ‖exact‖ over all heads together, as the next layer sees them, and of
        every head."""
        call = self.call
        squares = []
        for head in range(out.shape[1]):
            kv = head // (call.q.shape[1] // call.k.shape[1])
            exact = self.weights(head) @ self.values[0, kv].float()
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

    def on_blocks(self, head: int, plan: BlockPlan, rows: Tensor | None = None) -> Tensor:
        """The weights of these queries, summed over a plan's key blocks. fp32 [R, N]."""
        layout = plan.layout
        weights = self.weights(head, rows).index_select(1, plan.key_tokens(head))
        short = layout.N * plan.blocks.k - layout.k.tokens
        return torch.nn.functional.pad(weights, (0, short)).unflatten(1, (layout.N, -1)).sum(-1)

    def block_map(self, head: int, plan: BlockPlan) -> Tensor:
        """The exact weights of a query in every query block, summed over key blocks. [M, N]."""
        layout = plan.layout
        slots = torch.arange(layout.M, device=self.rows.device) * plan.blocks.q
        slots = (slots + plan.blocks.q // 2).clamp_max(layout.q.tokens - 1)
        return self.on_blocks(head, plan, plan.query_tokens(head)[slots])


class _ReadMass(NamedTuple):
    """Shares of the exact weights of sampled queries: in what a plan touches, and in what it reads
    in full [H]; and the most that full blocks can hold of all heads for as much work."""

    touched: Tensor
    full: Tensor
    bound: float

    @classmethod
    def of(cls, exact: _ExactAttention, plan: BlockPlan, heads: int) -> _ReadMass:
        layout = plan.layout
        own = plan.levels[0].expand(heads, -1, -1)
        slots = [plan.query_tokens(head).argsort()[exact.rows] for head in range(heads)]
        levels = torch.stack([x[at // plan.blocks.q] for x, at in zip(own, slots, strict=True)])
        mass = torch.stack([exact.on_blocks(head, plan).double() for head in range(heads)])
        sizes = read_sizes(layout, (1, *plan.ratios), plan.padding)[:, 0].double()
        keys = sizes[0].expand_as(mass)
        work = sum(
            (levels == r).double() @ own for r, own in zip(plan.ratios, sizes[1:], strict=True)
        )
        assert isinstance(work, Tensor)
        return cls(
            (mass * (levels > 0)).sum(-1).mean(-1),
            (mass * (levels == 1)).sum(-1).mean(-1),
            _heaviest(mass.flatten(), keys.flatten(), float(work.sum())) / work.numel(),
        )


def _heaviest(mass: Tensor, keys: Tensor, room: float) -> float:
    """The most mass of blocks that together have no more keys than `room`; the last one counts in
    part, so that nothing whole can be better."""
    order = (mass / keys.clamp_min(1)).argsort(descending=True)
    taken = (room - keys[order].cumsum(0) + keys[order]).clamp_min(0).minimum(keys[order])
    return float((mass[order] * taken / keys[order].clamp_min(1)).sum())


def exact_map(call: Capture, head: int, plan: BlockPlan) -> Tensor:
    """Where a head really looks, on a plan's blocks. fp32 [M, N] on the host."""
    return _ExactAttention(call, 1).block_map(head, plan).cpu()
