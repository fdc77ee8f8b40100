"""Nothing of size S × S is allocated outside the reference, and extra memory stays small."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from jali import AdaBsa, Budget, Entropy, Local, Method, Psa, Random, RfV2, attend
from oracle import tensors

S, H, D = 4096, 2, 32


class Largest(TorchDispatchMode):
    """The most elements of any tensor with storage of its own."""

    numel = 0
    name = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            if isinstance(x, torch.Tensor):
                size = x.untyped_storage().nbytes() // x.element_size()
                if size > self.numel:
                    self.numel, self.name = size, f"{func} {tuple(x.shape)}"
        return out


@pytest.mark.parametrize(
    "method",
    [Entropy(Budget(0.3)), Psa(), Psa(k_block=32, similarity=(0.7, 0.65, 0.6)), RfV2(0.7),
     RfV2(0.7, compat=True), AdaBsa(0.7), AdaBsa(0.0, 0.9), AdaBsa(0.7, compat=True),
     Random(Budget(0.3)), Local(Budget(0.3))],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("padded", [False, True])
def test_nothing_of_size_s_by_s(method: Method, padded: bool) -> None:
    if padded and getattr(method, "compat", False):
        pytest.skip("the original knows no padding")
    q, k, v = tensors(S, H=H, D=D)
    length = [S - 100] if padded else None
    with Largest() as largest:
        attend(q, k, v, method=method, grid=(4, 32, 32), backend="torch", key_length=length)
    assert largest.numel < S * S, largest.name


def test_scores_go_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the chunk, the plan is the same."""
    import jali.planning.scoring

    q, k, v = tensors(700, B=2, H=4, kv=2)
    methods = (Entropy(Budget(0.3), q_block=32, k_block=16), Psa(q_block=32, k_block=16),
               AdaBsa(0.5, block_size=16))  # fmt: skip
    plans = [attend(q, k, v, method=m).plan.levels for m in methods]  # type: ignore[union-attr]
    for size in (1, 100_000):
        monkeypatch.setattr(jali.planning.scoring, "CHUNK_BYTES", size)
        for method, wanted in zip(methods, plans, strict=True):
            found = attend(q, k, v, method=method).plan
            assert found is not None
            assert torch.equal(found.levels, wanted)
