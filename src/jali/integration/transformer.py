"""Where a run stands: its transformers, the call each is in, and one attention call of it."""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor, nn

from jali.attend import Attended, PreparedCall
from jali.integration.clock import ContextHook, Moment
from jali.integration.families import Family
from jali.integration.geometry import Patch
from jali.integration.masks import MaskReading
from jali.integration.parallel import Ranks
from jali.integration.stopwatch import RanAttention
from jali.planning.site import Site
from jali.tokens.grid import Box, TokenGrid
from jali.tokens.padding import KeyPadding


@dataclass(eq=False)
class RunTransformer:
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
    call: TransformerCall | None = None
    branches_begun: set[str] = field(default_factory=set)  # those that have had their step 0
    attended: bool = False  # whether any self-attention of this generation came by
    reached: int = 0  # self-attentions that have our processor
    judged: int = 0  # of the first ones, those by which a cache decides what it skips

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a call by name."""
        return {**dict(zip(self.parameters, args, strict=False)), **kwargs}


@dataclass(eq=False)
class TransformerCall:
    """One call of a transformer: which step it is, and what its layers have in common."""

    moment: Moment
    boxes: tuple[Box, ...]
    ranks: Ranks | None  # those that share the heads of every layer
    grids: dict[int, TokenGrid | str] = field(default_factory=dict)
    mask: MaskReading | None = None
    prepared: dict[Any, PreparedCall | str] = field(default_factory=dict)  # or why it is dense
    ran: list[RanAttention] = field(default_factory=list)
    started: Any = None


@dataclass(frozen=True, eq=False)
class AttentionCall:
    """One attention call as the method gets it: q, k, v [B, H, S, D] in the caller's order, all
    keys included, and what came of it. `grid` is a sentence where the sequence has none.

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
    padding: KeyPadding | None
    scale: float | None
    result: Attended

    def copied(self) -> AttentionCall:
        """The same call in memory of its own."""
        q, k, v = (x.clone() for x in (self.q, self.k, self.v))
        result = replace(self.result, out=self.result.out.clone())
        return replace(self, q=q, k=k, v=v, result=result)


def count_weights(module: nn.Module) -> int:
    return sum(math.prod(p.shape) for p in module.parameters())
