"""Where in a generation an attention call happens."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Site:
    """Step and layer (both from 0), guidance branch and transformer of one attention call."""

    step: int = 0
    steps: int = 1
    layer: int = 0
    layers: int = 1
    branch: str = "cond"
    transformer: str = "transformer"

    def __post_init__(self) -> None:
        if 0 <= self.step < self.steps and 0 <= self.layer < self.layers:
            return
        for index, count in (("step", "steps"), ("layer", "layers")):
            i, n = getattr(self, index), getattr(self, count)
            if n < 1 or not 0 <= i < n:
                raise ValueError(f"need 0 <= {index} < {count}, got {index}={i}, {count}={n}")
