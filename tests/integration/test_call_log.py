"""One mode over a bare transformer may last for days: what it keeps does not grow, what it says
still counts every call."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tiny
import torch

import jali
from jali.integration import autoregressive, stats
from jali.integration.stats import KEPT, CallLog, CallRecord, CallSums, Stats, read_records

INPUTS: dict[str, Any] = {
    "hidden_states": torch.ones(1, 16, 2, 8, 8).cumsum(-1) / 8,
    "encoder_hidden_states": torch.ones(1, 8, 32),
    "return_dict": False,
}


def records(count: int) -> Iterator[CallRecord]:
    """Every third one dense, of two sizes; a model's output after each five."""
    for number in range(count):
        tokens, step = 64 + 64 * (number % 2), number // 100
        reason = None if number % 3 else "first steps"
        read = None if reason else torch.full((1, 2), float(number % 60) * tokens)
        total = torch.zeros(())
        yield CallRecord(
            "transformer", number % 30, step, "cond", tokens, "torch", reason, read, total,
            samples=1, heads=2, head_dim=8, keys=tokens,
        )  # fmt: skip
        if number % 5 == 4:
            yield CallRecord("transformer", -1, step, "cond", 0, "", "", None, total)


def stats_of(log: CallLog) -> Stats:
    return Stats("entropy", 0.3, log.rows(), older=log.older)


def test_totals_are_those_of_all_calls() -> None:
    log, all_of_them = CallLog(), []
    for record in records(20_000):
        log.append(record)
        all_of_them.append(record)
    assert KEPT <= len(log) < 2 * KEPT
    whole = Stats("entropy", 0.3, read_records(stats.attentions(all_of_them)))
    found = stats_of(log)
    assert len(found.rows) < len(whole.rows) == found.sums.calls == 20_000
    assert found.rows == whole.rows[-len(found.rows) :]
    assert found.cost == pytest.approx(whole.cost, rel=1e-12)
    assert found.sparse_cost == pytest.approx(whole.sparse_cost, rel=1e-12)
    assert found.dense == whole.dense == {"first steps": 6667}
    assert found.line() == whole.line()


def test_memory_stays_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "KEPT", 500)
    log, sizes = CallLog(), []
    tracemalloc.start()
    for number, record in enumerate(records(5000)):
        log.append(record)
        if number % 1000 == 0:
            sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    assert len(sizes) > 3
    assert max(sizes[2:]) < 1.2 * sizes[1]


def test_what_was_not_finite_is_still_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "KEPT", 10)
    log = CallLog()
    for number, record in enumerate(records(100)):
        bad = torch.tensor(math.nan) if number in (7, 90) else record.total
        log.append(record._replace(total=bad, step=number))
    found = log.first_not_finite()
    assert found is not None
    assert found.step == 7


def test_sums_add_up() -> None:
    rows = read_records(stats.attentions(records(50)))
    assert CallSums.of(rows[:20]) + CallSums.of(rows[20:]) == CallSums.of(rows)


def test_calls_without_end_at_one_timestep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats, "KEPT", 20)
    model, calls = tiny.wan_transformer(2), 60
    with torch.no_grad(), jali.sparse_processor_mode(model, 0.5, warmup_frac=0) as handle:
        for _ in range(calls):
            model(timestep=torch.tensor([5]), **INPUTS)
        run, found = handle.run, handle.stats()
        assert len(run.records) < 40
        assert len(run.transformers[0].branches_begun) <= 16
    assert found.sums.calls == 2 * calls
    assert found.dense == {"layer 0": calls}
    assert f"in {calls} sparse of {2 * calls})" in found.line()
    assert f"rows are of the latest {len(found.rows)} calls, sums of all" in found.line()


def test_chunks_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoregressive, "KEPT", 10)
    bounded, whole = (autoregressive.ChunkState(jali.Dense(), "torch", layers=2) for _ in range(2))
    for number in range(100):
        cost = None if number % 3 else torch.tensor(number / 200)
        call = autoregressive.ChunkCall(number // 4, SimpleNamespace(), 8 + number, cost, 4)  # type: ignore[arg-type]
        bounded._note(call)
        whole.calls.append(call)
    assert len(bounded.calls) < 20
    for chunk in (None, 0, 3, 24):
        assert bounded.cost(chunk) == pytest.approx(whole.cost(chunk), rel=1e-12)
    bounded.reset()
    assert bounded.cost() == 1
