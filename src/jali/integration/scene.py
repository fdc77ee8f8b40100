"""Where a run stands: its transformers, the call each is in, and how attention goes there."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from jali.attend import Attended, Way
from jali.integration.clock import ContextHook, Moment
from jali.integration.families import Family
from jali.integration.geometry import Patch
from jali.integration.masks import Keys
from jali.integration.parallel import Ranks
from jali.methods import Method
from jali.planning.site import Site
from jali.tokens.grid import Box, TokenGrid


@dataclass(eq=False)
class Stage:
    """One transformer of a run, and the call it is in."""

    name: str
    index: int
    family: Family
    patch: Patch
    parameters: tuple[str, ...]
    layers: int
    weights: int
    hook: ContextHook
    module: weakref.ReferenceType[nn.Module]
    scene: Scene | None = None
    opened: set[str] = field(default_factory=set)  # branches that have had their step 0


@dataclass(eq=False)
class Scene:
    """One transformer call: where it stands, and what its layers have in common."""

    moment: Moment
    boxes: tuple[Box, ...]
    sharded: Ranks | None  # where each rank has some of the heads
    grids: dict[int, TokenGrid | str] = field(default_factory=dict)
    keys: Keys | None = None
    courses: dict[Any, Course | str] = field(default_factory=dict)
    calls: int = 0
    sparse: bool = False
    started: Any = None


@dataclass(frozen=True, eq=False)
class Course:
    """How the sparse calls of one shape go in one transformer call."""

    way: Way
    grid: TokenGrid
    source: Keys  # as the model has them
    keys: Keys  # in the order of the grid
    scale: float | None
    order: Tensor | None  # where each token of the grid lies; None where it is in order

    def fits(self, method: Method, keys: Keys, scale: float | None) -> bool:
        return self.way.method is method and self.source is keys and self.scale == scale


@dataclass(frozen=True, eq=False)
class Seen:
    """One attention call as the method gets it: q, k, v [B, H, S, D] in the caller's order, all
    keys included, and what came of it.

    The tensors are the model's own and hold these numbers during the call only: a compiled model
    writes its next results into the same memory. What is to be kept has to be `copied`. (Plans and
    log-sum-exps are jali's, and stay.)
    """

    transformer: str
    site: Site
    grid: TokenGrid | str
    q: Tensor
    k: Tensor
    v: Tensor
    keys: Keys
    scale: float | None
    result: Attended

    def copied(self) -> Seen:
        """The same call in memory of its own."""
        q, k, v = (x.clone() for x in (self.q, self.k, self.v))
        result = replace(self.result, out=self.result.out.clone())
        return replace(self, q=q, k=k, v=v, result=result)


def picked(stage: Stage, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a transformer call by name."""
    return {**dict(zip(stage.parameters, args, strict=False)), **kwargs}


def weights_of(module: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in module.parameters())
