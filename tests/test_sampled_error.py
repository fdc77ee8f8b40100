"""The error that benchmarks state is against the plan as the reference reads it."""

from __future__ import annotations

import pytest
import torch

from jali import AdaBsa, Entropy, Method, Psa, RateDistortion, attend
from jali.evaluation.bench.measure import sampled_error


@pytest.mark.parametrize(
    "method",
    [
        Entropy(q_block=32, k_block=16),
        Psa(q_block=32, k_block=16),
        RateDistortion(0.2, q_block=32, k_block=16, probes=0),
        AdaBsa(0.8, block_size=24, tail=True),
    ],
    ids=lambda method: method.name,
)
def test_an_exact_backend_has_no_error(method: Method) -> None:
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 200, 16, generator=make) for _ in range(3))
    found = attend(q, k, v, method=method, backend="reference")
    layout = found.executed.layout
    arranged = [layout.q.arrange(q), layout.k.arrange(k), layout.k.arrange(v)]
    error = sampled_error(*arranged, layout.q.arrange(found.out), found.executed, 0.25)
    assert error < 1e-5
