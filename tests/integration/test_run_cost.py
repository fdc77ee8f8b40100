"""What a run cost: all that was computed over all that would be, call by call."""

from __future__ import annotations

import pytest
import tiny
import torch

import jali
from jali.integration.stats import CallRecord, CallRow, Stats, mean_cost, read_records
from jali.integration.transformer import AttentionCall


def row(cost: float, work: float, reason: str | None = None, step: int = 0) -> CallRow:
    return CallRow("transformer", 0, step, "cond", 8, "torch", reason, cost, (cost,), work)


def test_calls_count_by_their_dense_work() -> None:
    rows = (row(0.2, 900), row(0.5, 100), row(1.0, 1000, "first steps", step=1))
    stats = Stats("entropy", 0.3, rows)
    assert stats.sparse_cost == pytest.approx((0.2 * 900 + 0.5 * 100) / 1000)
    assert stats.cost == pytest.approx((0.2 * 900 + 0.5 * 100 + 1000) / 2000)
    assert stats.by("step") == {(0,): pytest.approx(0.23), (1,): 1.0}
    assert mean_cost(rows[:1]) == 0.2
    assert Stats("entropy", 0.3, ()).cost == 1


@pytest.mark.parametrize("planned", [(1, 1), (1, 3), (2, 1), (2, 3)])
@pytest.mark.parametrize("keys", [12, torch.tensor(12)])
def test_one_plan_may_serve_all_heads_or_samples(
    planned: tuple[int, int], keys: int | torch.Tensor
) -> None:
    """Two samples of 4 and 8 real keys, three heads, five queries."""
    read = torch.arange(1, planned[0] * planned[1] + 1).view(planned)
    sites = ("transformer", 0, 0, "cond", 5, "torch", None)
    records = [
        CallRecord(*sites, read, None, samples=2, heads=3, head_dim=16, keys=keys),
        CallRecord(*sites[:6], "dense", None, None, samples=2, heads=3, head_dim=16, keys=keys),
    ]
    found, dense = read_records(records)
    every = read.expand(2, 3).sum(0).tolist()
    assert found.heads == pytest.approx([pairs / (5 * 12) for pairs in every])
    assert found.cost == pytest.approx(sum(every) / (3 * 5 * 12))
    assert found.dense_work == dense.dense_work == 5 * 12 * 3 * 16
    assert (dense.cost, dense.heads) == (1, (1, 1, 1))


class Ledger:
    """What was computed and what would be, from the tensors of every call."""

    def __init__(self) -> None:
        self.read = self.dense = self.sparse_dense = 0
        self.calls = 0

    def __call__(self, seen: AttentionCall) -> None:
        B, H, Sq, D = seen.q.shape
        Sk = seen.k.shape[2]
        real = B * Sk if seen.padding is None else int(seen.padding.valid(Sk).sum())
        plan = seen.result.executed
        dense = Sq * real * H * D
        if plan is None:
            self.read += dense
        else:
            self.read += int(plan.pairs_read.expand(B, H).sum()) * D
            self.sparse_dense += dense
        self.dense += dense
        self.calls += 1


@pytest.mark.parametrize("family", ["Wan", "HunyuanVideo", "HunyuanVideo 1.5", "Flux"])
def test_a_run_costs_what_its_calls_computed(family: str) -> None:
    build, call = {
        "Wan": (tiny.wan, tiny.WAN_CALL),
        "HunyuanVideo": (tiny.hunyuan, tiny.HUNYUAN_CALL),
        "HunyuanVideo 1.5": (tiny.hunyuan15, tiny.hunyuan15_call()),
        "Flux": (tiny.flux, tiny.FLUX_CALL),
    }[family]
    pipe, ledger = build(), Ledger()
    with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=0.5) as handle:
        handle.run.watch = ledger
        tiny.generate(pipe, call, steps=2)
    stats = handle.stats()
    assert stats.cost == pytest.approx(ledger.read / ledger.dense)
    sparse = ledger.read - (ledger.dense - ledger.sparse_dense)
    assert stats.sparse_cost == pytest.approx(sparse / ledger.sparse_dense)
    assert sum(own.dense_work for own in stats.rows) == ledger.dense
    assert stats.sparse_cost < stats.cost < 1
