"""Two honest controls. A method that does not beat them has found nothing."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from jali.methods.method import Query, Scored
from jali.tokens.layout import BlockLayout
from jali.tokens.order import Order, Tiled
from jali.tokens.place import middles, places


@dataclass(frozen=True)
class Random(Scored):
    """Blocks drawn by lot, anew for every (layer, step), the same for all heads.

    Args:
        budget: share of the key blocks that is read.
        seed: another seed draws other blocks.
        q_block, k_block: tokens in a block; None is what the backend likes best.

    Example:
        >>> attend(q, k, v, method=Random(Budget(0.3)), grid=(21, 30, 52))
    """

    q_block: int | None = None
    k_block: int | None = None
    seed: int = 0

    name: ClassVar[str] = "random"

    def score(self, query: Query) -> Tensor:
        layout, site = query.layout, query.site
        seed = hash((self.seed, site.layer, site.step)) % 2**63
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.rand(1, 1, layout.M, layout.N, generator=generator)
        return drawn.to(query.q.device, non_blocking=True)


@dataclass(frozen=True)
class Local(Scored):
    """The nearest blocks in time and space.

    Args:
        budget: share of the key blocks that is read.
        window: how many tokens in t, h and w count as one step of distance.
        q_block, k_block: tokens in a block; None is what the backend likes best.

    Example:
        >>> attend(q, k, v, method=Local(Budget(0.3), window=(2, 8, 8)), grid=(21, 30, 52))
    """

    q_block: int | None = None
    k_block: int | None = None
    window: tuple[int, int, int] = (2, 8, 8)

    name: ClassVar[str] = "local"

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "window", Tiled(self.window).window)

    @property
    def token_order(self) -> Order:
        return Tiled(self.window)

    def score(self, query: Query) -> Tensor:
        return _nearness(query.layout, self.window)


@functools.lru_cache(maxsize=16)
def _nearness(layout: BlockLayout, window: tuple[int, int, int]) -> Tensor:
    """Minus the window distance between the middles of blocks. fp32 [1, 1, M, N]."""
    queries, keys = places(layout)
    size = np.array([1e-6, *window])  # another box is farther than any distance inside one
    q_middle = middles(queries, layout.blocks.q) / size
    k_middle = middles(keys, layout.blocks.k) / size
    distance = np.abs(q_middle[:, None] - k_middle[None]).max(-1)
    return torch.from_numpy(-distance).float()[None, None].to(layout.device)
