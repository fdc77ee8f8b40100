"""What share of the work a method asks for: what is told to users, and what forecasts go by."""

from __future__ import annotations

from typing import Any

import pytest

from jali import AdaBsa, Budget, Dense, Draft, Entropy, Mass, Psa, RfV2, Schedule, Sol, Sparge
from jali.integration.choice import chosen_method
from jali.methods import Local, Method, Random


@pytest.mark.parametrize(
    ("method", "share"),
    [
        (Dense(), 1.0),
        (Entropy(Budget(0.3)), 0.3),
        (Random(Budget(0.4)), 0.4),
        (Local(Budget(0.4)), 0.4),
        (RfV2(sparsity=0.8), 0.2),
        (AdaBsa(sparsity=0.7), 0.3),
        (AdaBsa(sparsity=0.7, cdf_threshold=0.6), 0.3),  # at most
        (AdaBsa(cdf_threshold=0.6), None),  # as many as it takes
        (Sol(tau=1.3), None),  # as many as stand out
        (Sol().with_budget(0.3), 0.3),
        (Sparge(), None),
        (Sparge(topk=0.4), 0.4),
        (Draft(0.75), 0.25),
        (Mass(0.95), None),
        (Mass(0.95).with_budget(0.3), 0.3),
        (Psa().with_budget(0.3), 0.3),
        (Psa(mode="thresholdbound"), None),
        (Schedule(Entropy(Budget(0.3)), dense_steps=0.5), 0.3),
        (Schedule(Entropy(), budgets=(0.5, 0.3)), 0.4),
        (Schedule(AdaBsa(cdf_threshold=0.6)), None),
    ],
    ids=str,
)
def test_the_asked_share(method: Method, share: float | None) -> None:
    assert method.mean_budget == (None if share is None else pytest.approx(share))


@pytest.mark.parametrize(
    ("name", "options", "method"),
    [
        ("sol", {"tau": 1.3}, Sol(1.3)),
        ("sol", {}, Sol()),
        ("sparge", {"topk": 0.4}, Sparge(topk=0.4)),
        ("sparge", {"cdfthreshd": 0.9}, Sparge(cdfthreshd=0.9)),
        ("draft", {"sparsity_ratio": 0.75}, Draft(0.75)),
        ("mass", {"theta": 0.95}, Mass(0.95)),
        ("entropy", {}, Entropy(Budget(0.5))),
        ("rf_v2", {"sparsity": 0.8}, RfV2(0.8)),
    ],
)
def test_a_method_by_name_keeps_what_was_said_of_it(
    name: str, options: dict[str, Any], method: Method
) -> None:
    asked = chosen_method(name, None, None, None, None, options)
    assert asked.base == method
    assert chosen_method(name, 0.3, None, None, None, {}).base.mean_budget == pytest.approx(0.3)
