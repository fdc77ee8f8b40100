"""What every method is: a frozen value that turns q and k into a plan."""

from __future__ import annotations

import abc
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import BlockLayout, Blocks, block_layout
from jali.tokens.order import Order
from jali.tokens.padding import KeyPadding


class Query(NamedTuple):
    """Everything a plan may depend on, in arranged order. q [B, H, Sq, D], k [B, Hkv, Sk, D]."""

    q: Tensor
    k: Tensor
    layout: BlockLayout
    site: Site
    scale: float
    padding: KeyPadding | None = None
    causal: bool = False


def check_count(name: str, value: int | None, least: int = 1) -> None:
    """A count is an int, at least `least`; None means that it is left to others."""
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, got {value!r}")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}")


class Method(abc.ABC):
    """A method *is* its configuration. Deterministic in its inputs; never reads v, never waits."""

    name: ClassVar[str]
    can_be_causal: ClassVar[bool] = False

    def active(self, site: Site, tokens: int) -> bool:  # noqa: ARG002
        """Whether this call is sparse at all."""
        return True

    def why_dense(self, site: Site, tokens: int) -> str | None:
        """Why it is not, in words; None where it is."""
        return None if self.active(site, tokens) else f"method {self.name}"

    def at(self, site: Site) -> Method:  # noqa: ARG002
        """The method for this site; wrappers hand over to what they wrap."""
        return self

    @property
    @abc.abstractmethod
    def ratios(self) -> tuple[int, ...]:
        """The ratios its plans may contain."""

    @property
    @abc.abstractmethod
    def token_order(self) -> Order:
        """The order in which it cuts tokens into blocks."""

    @abc.abstractmethod
    def blocks(self, preferred: Blocks) -> Blocks:
        """Its blocks, given those the backend likes best."""

    def layout(
        self,
        q_grid: TokenGrid,
        k_grid: TokenGrid | None,
        offset: int | None,
        blocks: Blocks,
        device: torch.device,
    ) -> BlockLayout:
        return block_layout(q_grid, k_grid, self.token_order, blocks, offset, device)

    @abc.abstractmethod
    def plan(self, query: Query) -> BlockPlan: ...

    def for_rank(self, rank: int, ranks: int) -> Method:  # noqa: ARG002
        """The method for one of several ranks that share the heads of a layer."""
        return self

    @property
    def asked(self) -> float | None:
        """The asked share of the work; None where it depends on the scores or on the step."""
        return None

    @abc.abstractmethod
    def with_budget(self, mean: float) -> Method:
        """The same method, asked for this share of the work."""
