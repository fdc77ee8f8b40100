"""What the threshold methods score by kernels, against the same in plain torch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali import Blocks, Site, Sol, Sparge, TokenGrid, block_layout, kernels
from jali.methods.method import Query
from jali.planning.mass import exact_masses, pooled_masses
from jali.planning.scoring import use_kernels
from jali.tokens.padding import KeyPadding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SCORES = {
    "exact masses": lambda q, k, layout, padding: exact_masses(q, k, layout, 0.2, padding),
    "pooled masses": lambda q, k, layout, padding: pooled_masses(q, k, layout, 0.2, padding, 2),
    "sol": lambda *query: score(Sol(), *query),
    "sparge": lambda *query: score(Sparge(0.1), *query),
}


def score(method: Sol | Sparge, q: Tensor, k: Tensor, layout: object, padding: object) -> Tensor:
    return method.score(Query(q, k, layout, Site(), 0.2, padding))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SCORES)
@pytest.mark.parametrize("padded", [False, True])
def test_kernels_and_torch_agree(name: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make = torch.Generator().manual_seed(0)
    q = torch.randn(2, 87, 4, 32, generator=make).to(DEVICE).transpose(1, 2)
    k = torch.randn(2, 87, 2, 32, generator=make).to(DEVICE).transpose(1, 2)
    layout = block_layout(TokenGrid.flat(87), blocks=Blocks(32, 16), device=DEVICE)
    padding = None
    if padded:
        padding = KeyPadding(length=torch.tensor([87, 55], dtype=torch.int32, device=DEVICE))
    monkeypatch.setattr(kernels, "available", lambda _: False)
    wanted = SCORES[name](q, k, layout, padding)
    monkeypatch.setattr(kernels, "available", lambda _: True)
    assert use_kernels(q, k, 0.2, padding, causal=False)
    found = SCORES[name](q, k, layout, padding)
    torch.testing.assert_close(found, wanted, atol=1e-4, rtol=1e-4)
