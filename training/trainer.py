"""One step after another: a clock, an average of the weights, falling rates, a log."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Clock:
    """A stage's time: how far it is, and when it is over."""

    seconds: float
    start: float = field(default_factory=time.monotonic)

    def restart(self) -> None:
        """Compiling is not training."""
        self.start = time.monotonic()

    @property
    def elapsed(self) -> float:
        return time.monotonic() - self.start

    @property
    def progress(self) -> float:
        return self.elapsed / self.seconds


class Average:
    """An exponential average of a module's weights."""

    def __init__(self, module: nn.Module, decay: float) -> None:
        self.decay = decay
        self.live = list(module.parameters())
        self.mean = [p.detach().clone() for p in self.live]
        self.steps = 0

    def update(self) -> None:
        self.steps += 1
        # Short at first, or the beginning would be remembered for too long.
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(self.mean, [p.detach() for p in self.live], 1 - decay)

    def apply(self) -> None:
        for p, mean in zip(self.live, self.mean, strict=True):
            p.data.copy_(mean)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """The module with the average for its weights, for a while."""
        live = [p.detach().clone() for p in self.live]
        self.apply()
        yield
        for p, weight in zip(self.live, live, strict=True):
            p.data.copy_(weight)


@dataclass
class Trainer:
    """Optimisers with clipping, an average of the weights, and a log.

    Rates rise for a hundred steps, stay, and fall to a twentieth in the last share (`settle`) of
    the time: what is left at the end can be used, and a next stage can start again from it.
    """

    module: nn.Module
    optimisers: list[torch.optim.Optimizer]
    clock: Clock
    decay: float = 0.999
    settle: float = 0.3
    losses: list[tuple[str, float, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.average = Average(self.module, self.decay)
        self.rates = [[g["lr"] for g in o.param_groups] for o in self.optimisers]
        self.steps = 0

    def step(self, loss: Tensor) -> None:
        progress = min(self.clock.progress, 1.0)
        factor = min(1.0, (self.steps + 1) / 100, 0.05 + 0.95 * (1 - progress) / self.settle)
        for optimiser, rates in zip(self.optimisers, self.rates, strict=True):
            for group, rate in zip(optimiser.param_groups, rates, strict=True):
                group["lr"] = rate * factor
            optimiser.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)
        for optimiser in self.optimisers:
            optimiser.step()
        self.average.update()
        self.steps += 1

    def note(self, loss: Tensor, every: int, what: str) -> None:
        if self.steps % every == 0:
            value = float(loss.detach())
            self.losses.append((what, round(self.clock.elapsed, 1), round(value, 5)))
            say(f"{what} step {self.steps} {self.clock.elapsed:.0f} s loss {value:.4f}")


def adam(parameters: Iterable[nn.Parameter], rate: float, decay: float = 0.0) -> Any:
    some = list(parameters)
    return torch.optim.AdamW(
        some, lr=rate, betas=(0.9, 0.98), weight_decay=decay, fused=some[0].is_cuda
    )


def say(text: str) -> None:
    print(text, flush=True)  # noqa: T201
