"""Schedule: dense first and last steps, dense layers, short sequences, budgets per step."""

from __future__ import annotations

import pytest
import torch

from jali import Budget, Dense, Entropy, Psa, RfV2, Schedule, Site, attend
from oracle import sdpa, tensors

INNER = Entropy(Budget(0.3), q_block=32, k_block=16)


def active_steps(schedule: Schedule, steps: int, layer: int = 0, layers: int = 4) -> list[int]:
    return [s for s in range(steps) if schedule.active(Site(s, steps, layer, layers), 1000)]


@pytest.mark.parametrize(
    ("first", "last", "steps", "wanted"),
    [
        (0, 0, 5, [0, 1, 2, 3, 4]),
        (2, 0, 5, [2, 3, 4]),
        (0.2, 0, 10, list(range(2, 10))),
        (0.2, 0, 4, [1, 2, 3]),  # ⌈0.8⌉ = 1
        (0.2, 0, 6, [2, 3, 4, 5]),  # ⌈1.2⌉ = 2
        (0.1, 0, 30, list(range(3, 30))),  # 0.1 · 30 is 3.0000000000000004 in floats
        (0, 2, 5, [0, 1, 2]),
        (0, 0.25, 8, [0, 1, 2, 3, 4, 5]),
        (1, 1, 3, [1]),
        (15, 0, 4, []),
        (1.0, 0, 4, []),
        (1, 0, 1, []),
    ],
)
def test_dense_steps(first: float, last: float, steps: int, wanted: list[int]) -> None:
    assert active_steps(Schedule(INNER, first, last), steps) == wanted


@pytest.mark.parametrize(
    ("layers", "dense"),
    [((0,), {0}), ((-1,), {3}), ((0, 2), {0, 2}), ((-4, 1), {0, 1}), ((), set()), ((99,), set()),
     ((4,), set()), ((-9,), set())],
)  # fmt: skip
def test_dense_layers(layers: tuple[int, ...], dense: set[int]) -> None:
    schedule = Schedule(INNER, dense_layers=layers)
    found = {n for n in range(4) if not schedule.active(Site(0, 1, n, 4), 1000)}
    assert found == dense


def test_min_tokens() -> None:
    schedule = Schedule(INNER, min_tokens=200)
    assert not schedule.active(Site(), 199)
    assert schedule.active(Site(), 200)
    q, k, v = tensors(199)
    assert attend(q, k, v, method=schedule).plan is None


@pytest.mark.parametrize("inner", [INNER, Psa(q_block=32, k_block=16), RfV2(0.7, 32)])
def test_dense_calls_are_sdpa_and_sparse_ones_are_the_inner_method(inner: object) -> None:
    q, k, v = tensors(300, H=4, kv=2)
    schedule = Schedule(inner, dense_steps=0.5, dense_layers=(0,))  # type: ignore[arg-type]
    for site in (Site(0, 4, 1, 3), Site(1, 4, 2, 3), Site(3, 4, 0, 3)):
        result = attend(q, k, v, method=schedule, site=site)
        assert torch.equal(result.out, sdpa(q, k, v))
        assert result.plan is None
    site = Site(2, 4, 1, 3)
    result = attend(q, k, v, method=schedule, site=site)
    assert torch.equal(result.out, attend(q, k, v, method=inner, site=site).out)  # type: ignore[arg-type]
    assert result.plan is not None
    assert result.plan.density < 1


def test_a_budget_per_step() -> None:
    schedule = Schedule(INNER, budgets=(0.2, 0.4, 0.8))
    q, k, v = tensors(1024)
    costs = []
    for step in range(6):
        plan = attend(q, k, v, method=schedule, site=Site(step, 6)).plan
        assert plan is not None
        costs.append(plan.cost)
    assert costs == pytest.approx([0.2, 0.2, 0.4, 0.4, 0.8, 0.8], abs=0.01)
    assert schedule.at(Site(0, 1)).budget.mean == 0.2  # type: ignore[attr-defined]


def test_budgets_of_a_pyramid_change_its_levels() -> None:
    schedule = Schedule(Psa(q_block=32, k_block=16), budgets=(0.1, 1.0))
    q, k, v = tensors(512)
    assert attend(q, k, v, method=schedule, site=Site(1, 2)).plan.cost == 1  # type: ignore[union-attr]


def test_wrappers_nest() -> None:
    schedule = Schedule(Schedule(INNER, dense_steps=1), dense_last_steps=1)
    assert active_steps(schedule, 4) == [1, 2]
    q, k, v = tensors(300)
    site = Site(1, 4)
    assert torch.equal(
        attend(q, k, v, method=schedule, site=site).out,
        attend(q, k, v, method=INNER, site=site).out,
    )


def test_with_budget_keeps_the_schedule() -> None:
    schedule = Schedule(INNER, 0.2, 1, (0, -1), 50).with_budget(0.7)
    assert schedule == Schedule(INNER.with_budget(0.7), 0.2, 1, (0, -1), 50)


def test_lists_become_tuples_so_that_methods_stay_values() -> None:
    assert hash(Schedule(INNER, dense_layers=[0, 1])) == hash(Schedule(INNER, dense_layers=(0, 1)))


def test_causality_is_that_of_the_inner_method() -> None:
    assert Schedule(INNER).can_be_causal
    assert not Schedule(RfV2()).can_be_causal
    assert Schedule(Dense()).can_be_causal
