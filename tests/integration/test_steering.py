"""Control while running: what probe rows measure is true, and budgets follow it within bounds."""

from __future__ import annotations

from typing import Any

import pytest
import tiny
import torch

import jali
from jali import Curve, Entropy, Schedule
from jali.integration.steering import Steering
from jali.methods import Sta

METHOD = Schedule(Entropy(q_block=8, k_block=8), curve=Curve(0.6, "linear"))
STEPS = 5


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan(2)


def run(pipe: Any, steering: Steering | None, method: Any = METHOD) -> tuple[Any, Any]:
    with jali.sparse_processor_mode(pipe, method=method, steering=steering) as handle:
        out = tiny.generate(pipe, tiny.WAN_CALL, STEPS)
        return out, handle


def test_measuring_alone_changes_nothing(pipe: Any) -> None:
    plain, _ = run(pipe, None)
    seen, handle = run(pipe, Steering(rows=4))
    assert torch.equal(plain, seen)
    errors = handle.run.errors()
    assert len(errors) == STEPS
    assert errors[0] == 0  # dense
    assert all(error > 0 for error in errors[1:])
    assert set(handle.run.steered.factors.values()) == {1.0}


def test_rows_measure_the_true_error(pipe: Any) -> None:
    """All rows: what the outputs of all sparse calls show beside dense ones."""
    sums: dict[int, list[float]] = {}

    def watch(seen: Any) -> None:
        if seen.result.plan is not None:
            exact = torch.nn.functional.scaled_dot_product_attention(seen.q, seen.k, seen.v)
            own = sums.setdefault(seen.site.step, [0.0, 0.0])
            own[0] += float((seen.result.out - exact).square().sum())
            own[1] += float(exact.square().sum())

    with jali.sparse_processor_mode(pipe, method=METHOD, steering=Steering(rows=10**6)) as handle:
        handle.run.watch = watch
        tiny.generate(pipe, tiny.WAN_CALL, STEPS)
        found = handle.run.errors()
    for step, (wrong, all_of_it) in sums.items():
        assert found[step] == pytest.approx((wrong / all_of_it) ** 0.5, rel=1e-3)


def test_budgets_follow_within_bounds(pipe: Any) -> None:
    _, measured = run(pipe, Steering())
    usual, cost = measured.run.errors(), measured.stats().cost
    as_ever = run(pipe, Steering(usual))[1]
    assert as_ever.stats().cost == pytest.approx(cost, abs=0.02)
    _, more = run(pipe, Steering(tuple(error / 10 for error in usual)))
    _, less = run(pipe, Steering(tuple(error * 10 for error in usual)))
    assert less.stats().cost < cost < more.stats().cost
    assert more.run.steered.factors[STEPS - 1] == 1.5
    assert less.run.steered.factors[STEPS - 1] == 0.7
    # The first sparse step has nothing before it.
    assert more.run.steered.factors[1] == 1
    # Every layer of a step has the same method, so that calls are prepared once.
    assert len(set(more.run.steered.factors.values())) <= STEPS
    assert "budgets were multiplied by 1 to 1.5" in more.summary()


def test_every_generation_begins_anew(pipe: Any) -> None:
    _, measured = run(pipe, Steering())
    usual = tuple(error / 10 for error in measured.run.errors())
    with jali.sparse_processor_mode(pipe, method=METHOD, steering=Steering(usual)) as handle:
        first = tiny.generate(pipe, tiny.WAN_CALL, STEPS)
        again = tiny.generate(pipe, tiny.WAN_CALL, STEPS)
        assert torch.equal(first, again)
        assert handle.run.steered.factors[1] == 1


def test_other_numbers_of_steps_read_by_position() -> None:
    steering = Steering((0.0, 0.1, 0.2, 0.3))
    assert [steering.usual(step, 8) for step in range(8)] == [0, 0, 0.1, 0.1, 0.2, 0.2, 0.3, 0.3]
    assert Steering().usual(3, 8) == 0


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"lowest": 1.2}, "need 0 < lowest <= 1 <= highest, got 1.2 and 1.5"),
        ({"highest": 0.5}, "need 0 < lowest <= 1 <= highest"),
        ({"rows": 0}, "rows must be at least 1, got 0"),
        ({"gain": -1.0}, "gain"),
        ({"errors": (0.1, -0.1)}, "every one of errors"),
    ],
)
def test_what_cannot_be_is_refused(asked: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        Steering(**asked)


def test_a_method_without_budgets_is_refused(pipe: Any) -> None:
    with pytest.raises(ValueError, match="steering moves budgets, and sta has none"):
        jali.apply_sparse_attention(pipe, Sta(), steering=Steering((0.1,)))
    with pytest.raises(TypeError, match="steering is a Steering"):
        jali.apply_sparse_attention(pipe, steering=0.5)
    assert not hasattr(pipe.transformer, "_diffusers_hook")
