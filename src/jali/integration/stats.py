"""What a run did, call by call, and of a very long one the sums."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

KEPT = 8192  # latest calls, at least: more than a generation of any usual model


class CallRecord(NamedTuple):
    """One attention call as it is noted. Numbers stay on the device until someone asks for them."""

    transformer: str
    layer: int
    step: int
    branch: str
    tokens: int
    backend: str
    reason: str | None  # why it was dense; None where it was sparse
    pairs_read: Tensor | None = None  # by every head, [B|1, H|1]; None where it was dense
    total: Tensor | None = None  # sum of the output: not finite where any of it is not
    samples: int = 1
    heads: int = 1
    head_dim: int = 1
    keys: int | Tensor = 0  # real ones of all samples together
    planning: float = 0.0  # as a share of the dense call


@dataclass(frozen=True, slots=True)
class CallRow:
    """One attention call as plain values: its cost, and that of every head.

    `dense_work` is what the call would be densely: queries × real keys × head dim, over heads and
    samples. Means over calls are weighted by it.
    """

    transformer: str
    layer: int
    step: int
    branch: str
    tokens: int
    backend: str
    reason: str | None  # why it was dense; None where it was sparse
    cost: float
    heads: tuple[float, ...] = ()
    dense_work: float = 1.0
    planning: float = 0.0  # the arithmetic of its plan, a share of the dense call's


@dataclass(frozen=True, slots=True)
class CallSums:
    """Sums over attention calls, of which every mean is made: how many there were, their dense
    work, and the part of it that was done; of all, and of the sparse ones; and what planning took.
    """

    calls: int = 0
    work: float = 0.0
    done: float = 0.0
    sparse_calls: int = 0
    sparse_work: float = 0.0
    sparse_done: float = 0.0
    dense: Mapping[str, int] = field(default_factory=dict)  # calls by the reason why they were
    planned: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[CallRow]) -> CallSums:
        rows = list(rows)
        sparse = [row for row in rows if row.reason is None]
        reasons = Counter(row.reason for row in rows if row.reason is not None)
        planned = sum(row.planning * row.dense_work for row in sparse)
        return cls(*_sums(rows), *_sums(sparse), dict(reasons), planned)

    def __add__(self, other: CallSums) -> CallSums:
        return CallSums(
            self.calls + other.calls,
            self.work + other.work,
            self.done + other.done,
            self.sparse_calls + other.sparse_calls,
            self.sparse_work + other.sparse_work,
            self.sparse_done + other.sparse_done,
            dict(Counter(self.dense) + Counter(other.dense)),
            self.planned + other.planned,
        )


def _sums(rows: Sequence[CallRow]) -> tuple[int, float, float]:
    work = sum(row.dense_work for row in rows)
    return len(rows), work, sum(row.cost * row.dense_work for row in rows)


@dataclass(frozen=True, slots=True)
class Stats:
    """The latest generation: asked budget, achieved cost, and one row for every attention call.

    Of a generation with very many calls `rows` are the latest, at least `KEPT` of them; everything
    but `rows` and `by` still counts all (`sums`).

    `predicted` is what the cost model forecasts for all transformer calls of the generation
    together. `measured` is the time of a dense transformer call over that of a sparse one, both
    warm and of this generation. Neither is that of a whole clip. `seconds` are those of all
    transformer calls, with whatever the first ones loaded and compiled; `seconds_first_call` those
    of the very first.
    """

    method: str
    budget: float | None
    rows: tuple[CallRow, ...]
    predicted: float | None = None
    measured: float | None = None
    notes: tuple[str, ...] = ()
    seconds: float | None = None
    seconds_first_call: float | None = None
    why_not_measured: str = ""
    older: CallSums = CallSums()  # calls that have no row any more
    total: float | None = None  # the asked share of all work, where it was asked that way
    skipped: int = 0  # self-attentions that a cache of the model left out; they are in no number

    @property
    def sums(self) -> CallSums:
        """Over all calls."""
        return self.older + CallSums.of(self.rows)

    @property
    def cost(self) -> float:
        """Share of the dense work of all calls; a dense one costs 1. What a cache of the model
        skipped was no call, and is on neither side."""
        sums = self.sums
        return sums.done / sums.work if sums.work else 1.0

    @property
    def planning(self) -> float:
        """The arithmetic of all plans, as a share of the dense work of all calls; not in `cost`."""
        sums = self.sums
        return sums.planned / sums.work if sums.work else 0.0

    @property
    def sparse_cost(self) -> float | None:
        """The same of the sparse calls alone."""
        sums = self.sums
        if not sums.sparse_calls:
            return None
        return sums.sparse_done / sums.sparse_work if sums.sparse_work else 1.0

    @property
    def dense(self) -> dict[str, int]:
        """How many calls stayed dense, by reason."""
        return dict(self.sums.dense)

    def by(self, *names: str) -> dict[tuple[Any, ...], float]:
        """The cost of the rows by any of transformer, layer, step, branch, backend."""
        groups: dict[tuple[Any, ...], list[CallRow]] = {}
        for row in self.rows:
            groups.setdefault(tuple(getattr(row, name) for name in names), []).append(row)
        return {key: mean_cost(rows) for key, rows in groups.items()}

    def line(self) -> str:
        """Everything in one line."""
        asked = "" if self.budget is None else f" asked {self.budget:.2f},"
        if self.total is not None:
            asked = f" asked {self.total:.2f} in total,"
        sums = self.sums
        parts = [f"{self.method}:{asked} cost {self.cost:.3f}"]
        if sums.sparse_calls:
            parts[0] += f" ({self.sparse_cost:.3f} in {sums.sparse_calls} sparse of {sums.calls})"
            parts.extend(self._speedups())
        else:
            parts[0] += f" (none of {sums.calls} calls was sparse)"
        if sums.planned:
            parts[0] += f", planning {self.planning:.3f}"
        if sums.dense:
            counts = ", ".join(f"{n} × {reason}" for reason, n in sums.dense.items())
            parts.append(f"dense: {counts}")
        if self.skipped:
            every = sums.calls + self.skipped
            of = "" if self.total is None else " (the total was asked of a run without it)"
            parts.append(
                f"a cache skipped {self.skipped} of {every} calls, which are in no number{of}"
            )
        return "; ".join([*parts, *self.notes])

    __str__ = line

    def _speedups(self) -> Iterator[str]:
        """Each with what it is the speed-up of."""
        if self.predicted is not None:
            of = "all transformer calls, forecast by the cost model"
            yield f"predicted speed-up {self.predicted:.2f}× ({of})"
        if self.measured is not None:
            yield f"measured speed-up {self.measured:.2f}× (per transformer call)"
        elif self.why_not_measured:
            yield f"no measured speed-up ({self.why_not_measured})"


def mean_cost(rows: Sequence[CallRow]) -> float:
    """The cost of these calls together: the mean, weighted by their dense work."""
    _, work, done = _sums(rows)
    return done / work if work else 1.0


class CallLog:
    """The calls of a generation as they come, however many: the latest as records, the older ones,
    read once in a long while, as sums."""

    def __init__(self) -> None:
        self.older = CallSums()
        self._latest: list[CallRecord] = []
        self._first_bad: CallRecord | None = None

    def __len__(self) -> int:
        return len(self._latest)

    def append(self, record: CallRecord) -> None:
        self._latest.append(record)
        if len(self._latest) >= 2 * KEPT:
            old, self._latest = self._latest[:KEPT], self._latest[KEPT:]
            self._first_bad = self._first_bad or first_not_finite(old)
            self.older += CallSums.of(read_records(attentions(old)))

    def rows(self) -> tuple[CallRow, ...]:
        """Of the latest attention calls. Waits for the device, once."""
        return read_records(attentions(self._latest))

    def first_not_finite(self) -> CallRecord | None:
        """The first call whose output was not finite. Waits for the device, once."""
        return self._first_bad or first_not_finite(self._latest)


def attentions(records: Iterable[CallRecord]) -> list[CallRecord]:
    """Without those of a model's output."""
    return [record for record in records if record.layer >= 0]


def read_records(records: list[CallRecord]) -> tuple[CallRow, ...]:
    """Records as rows. Waits for the device, once."""
    counted = [x for r in records for x in (r.pairs_read, r.keys) if isinstance(x, Tensor)]
    numbers = _host(counted)
    return tuple(_row(record, numbers) for record in records)


def _row(record: CallRecord, numbers: Iterator[float]) -> CallRow:
    """One plan may serve all heads, or all samples."""
    heads = [1.0] * record.heads
    read: list[list[float]] = []
    if record.pairs_read is not None:
        samples, planned = record.pairs_read.shape
        read = [[next(numbers) for _ in range(planned)] for _ in range(samples)]
    keys = next(numbers) if isinstance(record.keys, Tensor) else record.keys
    dense = record.tokens * keys
    if read:
        all_samples = [sum(own) * record.samples / len(read) for own in zip(*read, strict=True)]
        heads = [all_samples[i % len(all_samples)] / max(dense, 1) for i in range(record.heads)]
    work = dense * record.heads * record.head_dim
    cost = sum(heads) / len(heads)
    return CallRow(*record[:7], cost, tuple(heads), float(work), record.planning)


def first_not_finite(records: list[CallRecord]) -> CallRecord | None:
    """The first call whose output was not finite. Waits for the device, once."""
    checked = [r for r in records if r.total is not None]
    totals = _host([r.total for r in checked if r.total is not None])
    pairs = zip(checked, totals, strict=True)
    return next((record for record, total in pairs if not math.isfinite(total)), None)


def _host(values: list[Tensor]) -> Iterator[float]:
    """All numbers of all tensors; one transfer where they share a device."""
    if not values:
        return iter(())
    if len({(v.device, v.dtype) for v in values}) == 1:
        return iter(torch.cat([v.reshape(-1) for v in values]).tolist())
    return iter([x for v in values for x in v.reshape(-1).tolist()])
