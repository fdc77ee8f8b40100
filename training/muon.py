"""Momentum whose steps are orthogonal matrices.

Matrices of one shape are orthogonalised together, so a step is a few dozen launches, not
thousands.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor, nn


class Muon(torch.optim.Optimizer):
    """For the matrices of a transformer; `lr` means what it means for AdamW."""

    def __init__(
        self,
        parameters: Iterable[nn.Parameter],
        lr: float,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(
            list(parameters), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        )
        for group in self.param_groups:
            if any(p.dim() != 2 for p in group["params"]):
                raise ValueError("Muon steps matrices only; give everything else to AdamW")

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # noqa: ARG002
        for group in self.param_groups:
            alike: dict[torch.Size, list[nn.Parameter]] = defaultdict(list)
            for p in group["params"]:
                if p.grad is not None:
                    alike[p.shape].append(p)
            for shape, some in alike.items():
                grads = torch.stack([p.grad for p in some])  # type: ignore[misc]
                state = self.state[some[0]]
                if "momentum" not in state:
                    state["momentum"] = torch.zeros_like(grads)
                held = state["momentum"]
                held.lerp_(grads, 1 - group["momentum"])
                steps = orthogonal(grads.lerp(held, group["momentum"]))
                # So that a step moves weights as far as AdamW's would.
                size = 0.2 * max(shape) ** 0.5 * group["lr"]
                weights: list[Tensor] = [p.data for p in some]
                torch._foreach_mul_(weights, 1 - group["lr"] * group["weight_decay"])
                torch._foreach_add_(weights, list((-size * steps).to(weights[0].dtype).unbind()))


def orthogonal(matrices: Tensor, rounds: int = 5) -> Tensor:
    """The nearest (about) orthogonal matrices, by Newton and Schulz: [n, rows, columns]."""
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[1] > x.shape[2]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    a, b, c = 3.4445, -4.7750, 2.0315  # steep at zero, flat near one
    for _ in range(rounds):
        square = x @ x.mT
        x = a * x + (b * square + c * square @ square) @ x
    return x.mT if tall else x
