"""The cost model: close to its rows, silent where nothing was measured, and heeded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch

import jali
from jali.integration import forecast


@pytest.mark.parametrize(
    "row",
    forecast.constants()["rows"],
    ids=lambda r: f"{r['backend']}-{r['tokens']}-{r['cost']}",
)
def test_near_what_was_measured(row: dict[str, Any]) -> None:
    times = forecast.attention_times(
        heads=row["heads"], head_dim=row["head_dim"], tokens=row["tokens"], cost=row["cost"],
        device=row["device"], backend=row["backend"],
    )  # fmt: skip
    assert times is not None
    assert times[0] == pytest.approx(row["dense_ms"], rel=0.1)
    assert times[1] == pytest.approx(row["sparse_ms"], rel=0.25)


def test_every_device_names_its_source() -> None:
    for constants in forecast.constants()["devices"].values():
        assert constants["source"]


def test_grows_with_the_sequence_and_falls_with_the_cost() -> None:
    def at(tokens: int, cost: float) -> float:
        times = forecast.attention_times(
            heads=12, head_dim=128, tokens=tokens, cost=cost, device="NVIDIA H200", backend="fa4"
        )
        assert times is not None
        return times[0] / times[1]

    assert at(1_000, 0.5) < 1 < at(32_760, 0.5) < at(75_600, 0.5) < at(75_600, 0.3)


def test_nothing_measured_nothing_said() -> None:
    for device, backend in (("NVIDIA Z9", "fa4"), ("cpu", "fa4")):
        assert (
            forecast.attention_times(
                heads=1, head_dim=64, tokens=9, cost=0.5, device=device, backend=backend
            )
            is None
        )
    assert forecast.attention_speedup(
        heads=1, head_dim=64, tokens=9, cost=None, device="cpu", backend="torch"
    ) is None  # fmt: skip


def test_a_whole_model_gains_less_than_its_attention(monkeypatch: Any) -> None:
    monkeypatch.setattr(forecast, "device_name", lambda _: "NVIDIA H200")
    shape: dict[str, Any] = {"heads": 12, "head_dim": 128, "tokens": 75_600, "cost": 0.5}
    attention = forecast.attention_speedup(**shape, device="cpu", backend="fa4")
    whole = forecast.model_speedup(
        **shape, batch=1, sparse_share=1.0, layers=30, weights=1_300_000_000, device="cpu",
        backend="fa4",
    )  # fmt: skip
    assert attention is not None
    assert whole is not None
    assert 1.4 < whole < attention
    assert whole == pytest.approx(1936 / 1199, rel=0.1)  # measured with free masks


def test_auto_stays_dense_and_says_so() -> None:
    pipe = tiny.wan(2)
    expected = tiny.generate(pipe, tiny.WAN_CALL)
    with jali.sparse_processor_mode(pipe, 0.9, warmup_frac=0, when="auto") as run:
        out = tiny.generate(pipe, tiny.WAN_CALL)
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    assert "sparse would not be faster at 1280 tokens on cpu" in run.summary()
    assert run.stats().cost == 1


def test_auto_asks_for_the_budget_of_each_call(monkeypatch: Any) -> None:
    """The mean of a falling run would be faster; its first sparse steps are not."""
    monkeypatch.setattr(forecast, "attention_speedup", lambda *, cost, **_: 0.7 / cost)
    pipe = tiny.wan(4)
    with jali.sparse_processor_mode(pipe, total=0.5, when="auto") as run:
        tiny.generate(pipe, tiny.WAN_CALL, steps=8)
    budgets = [row[0] for row in jali.Curve(0.5).budgets(8, 4)]
    assert sum(0.7 < budget < 1 for budget in budgets) == 1
    stats = run.stats()
    for row in stats.rows:
        slower = row.reason is not None and "would not be faster" in row.reason
        assert slower == (0.7 < budgets[row.step] < 1)
    assert run.summary().count("would not be faster") == 1
    assert stats.cost > 0.5


def test_an_explicit_call_is_sparse_and_warns_once(caplog: Any) -> None:
    pipe = tiny.wan(2)
    with jali.sparse_processor_mode(pipe, 0.9, warmup_frac=0) as run:
        tiny.generate(pipe, tiny.WAN_CALL)
    assert caplog.text.count("not expected to be faster") == 1
    assert "× per attention call, by the cost model)" in caplog.text
    assert run.stats().sparse_cost is not None


def test_the_forecast_is_that_of_the_size_at_hand() -> None:
    """A size that was met before, after another one."""
    model, found = tiny.wan_transformer(2), []
    handle = jali.apply_sparse_attention(model, "entropy", mean_budget=0.3, warmup_frac=0)
    for frames in (2, 5, 2):
        with torch.no_grad():
            model(
                hidden_states=torch.randn(1, 16, frames, 32, 32), timestep=torch.tensor([5]),
                encoder_hidden_states=torch.randn(1, 8, 32),
            )  # fmt: skip
        found.append(handle.stats().predicted)
        handle.run.finish()
    assert found[0] == found[2] != found[1]


def test_auto_is_sparse_where_it_pays(monkeypatch: Any) -> None:
    monkeypatch.setattr(forecast, "attention_speedup", lambda **_: 1.5)
    model = tiny.wan_transformer(2)
    with torch.no_grad(), jali.sparse_processor_mode(model, 0.3, warmup_frac=0, when="auto") as run:
        model(
            hidden_states=torch.randn(1, 16, 5, 32, 32), timestep=torch.tensor([5]),
            encoder_hidden_states=torch.randn(1, 8, 32),
        )  # fmt: skip
    assert run.stats().sparse_cost is not None


def test_auto_goes_by_what_is_asked_and_a_threshold_asks_for_no_share() -> None:
    """Its blocks are as many as it takes: no cost is known before, so nothing is foretold."""
    model = tiny.wan_transformer(2)
    method = jali.AdaBsa(cdf_threshold=0.5)
    handle = jali.apply_sparse_attention(model, method, when="auto")
    with torch.no_grad():
        model(
            hidden_states=torch.randn(1, 16, 5, 32, 32), timestep=torch.tensor([5]),
            encoder_hidden_states=torch.randn(1, 8, 32),
        )  # fmt: skip
    stats = handle.stats()
    handle.remove()
    assert stats.budget is None
    assert stats.sparse_cost is not None


ROOT = Path(__file__).parents[2]
WAN = json.loads((ROOT / "benchmarks/results/wan-h200.json").read_text("utf-8"))["rows"]
ASKED = {"entropy 0.5": 0.5, "entropy 0.3": 0.3, "rf_v2 sparsity 0.8": 0.2, "psa cost 0.15": 0.15}


@pytest.mark.parametrize(
    "row",
    [r for r in WAN if r["part"] == "forward" and r["model"].startswith("wan")],
    ids=lambda r: f"{r['model']}-{r['method']}",
)
def test_near_whole_models_too(row: dict[str, Any], monkeypatch: Any) -> None:
    """Rows of whole Wan transformers, which the constants were not fitted to."""
    monkeypatch.setattr(forecast, "device_name", lambda _: "NVIDIA H200")
    predicted = forecast.model_speedup(
        heads=12, head_dim=128, tokens=row["tokens"], batch=1, cost=ASKED[row["method"]],
        sparse_share=row["sparse_calls"] / row["calls"], layers=30, weights=1_418_996_800,
        device="cpu", backend=row["backend"],
    )  # fmt: skip
    assert predicted == pytest.approx(row["speedup"], rel=0.1)
