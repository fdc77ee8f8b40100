"""Several ranks: Ulysses and tensor parallelism give each the whole sequence and some heads."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from jali.integration import operator
from jali.integration.families import Family
from jali.methods import Entropy, Method, RateDistortion, Schedule, Thresholded
from jali.methods.method import Query
from jali.planning.budget import entropy_of, share_blocks
from jali.planning.plan import BlockPlan
from jali.planning.tradeoff import Sum
from jali.tokens.grid import Text, TokenGrid
from jali.tokens.layout import BlockLayout


@dataclass(frozen=True)
class Ranks:
    """The ranks that share the heads of a layer, and which of them this is."""

    count: int
    rank: int
    group: Any

    def sum(self, x: Tensor) -> Tensor:
        """A tensor of every rank, added up."""
        x = x.contiguous()
        dist.all_reduce(x, group=self.group)
        return x


def tensor_ranks(module: Any) -> Ranks | None:
    """The ranks of tensor parallelism: each has some heads and the whole sequence."""
    config = getattr(module, "_parallel_config", None)
    config = getattr(config, "tensor_parallel_config", None)
    mesh = getattr(config, "_mesh", None)
    if mesh is None or mesh.size() == 1:
        return None
    return Ranks(mesh.size(), mesh.get_local_rank(), mesh.get_group())


# The group of the latest Ulysses call: a graph cannot carry it, and a process has one.
_group: Any = None


def ulysses_ranks(count: int, rank: int) -> Ranks:
    """Those of the call that is going on."""
    return Ranks(count, rank, _group)


def check(config: Any) -> None:
    """Refuse, in words, what would give another result than one rank."""
    context = config.context_parallel_config
    if context.ring_degree > 1:
        raise ValueError(
            "jali does not do ring attention: a plan needs all keys, and a ring shows them in "
            "parts; use ContextParallelConfig(ulysses_degree=…)"
        )
    if getattr(context, "ulysses_anything", False):
        raise ValueError(
            "jali does not do ulysses_anything: ranks with different shares of heads have no "
            "common plan; use ulysses_degree with heads and tokens that divide"
        )


def ulysses(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, run: Tensor,
    index: Tensor, config: Any, deals: bool,
) -> Tensor:  # fmt: skip
    """Every rank's part of q, k, v [B, S / ranks, H, D] -> its part of the result.

    Where the run `deals` heads, they are exchanged in the order in which it deals them.
    """
    from diffusers.models.attention_dispatch import _templated_context_parallel_attention

    check(config)
    global _group
    context = config.context_parallel_config
    mesh = context._ulysses_mesh
    _group = mesh.get_group()
    ranks, rank = context.ulysses_degree, mesh.get_local_rank()
    order = operator.dealt_order(q, run, index) if deals and ranks > 1 else None
    if order is not None:
        q, k, v = (x.index_select(2, order) for x in (q, k, v))

    def forward(*args: Any, **_: Any) -> Tensor:
        q, k, v, mask = args[1:5]  # the first is autograd's context; what follows is fixed here
        return operator.attend(q, k, v, mask, scale, run, index, ranks, rank)

    out: Tensor = _templated_context_parallel_attention(
        q, k, v, mask, 0.0, False, scale, False, False,
        forward_op=forward, backward_op=None, _parallel_config=config,
    )  # fmt: skip
    return out if order is None else out.index_select(2, order.argsort())


def joint_order(family: Family, grid: TokenGrid, ranks: int, device: torch.device) -> Tensor | None:
    """Where each token of the grid lies in [text₀, image₀, text₁, image₁, …].

    Ranks hold a part of the text and a part of the image each, so a joint sequence comes together
    in that order. None where it is in order already.
    """
    text = sum(s.tokens for s in grid.segments if isinstance(s, Text))
    if family.text == "none" or text == 0:
        return None
    return _joint_order(text, grid.tokens - text, ranks, family.text == "front", device)


# On its device, too: a copy from the host waits for all that is under way there.
@functools.lru_cache(maxsize=32)
def _joint_order(
    text: int, image: int, ranks: int, text_first: bool, device: torch.device
) -> Tensor:
    if text % ranks or image % ranks:
        raise ValueError(f"{text} text and {image} image tokens do not divide among {ranks} ranks")
    t, i = text // ranks, image // ranks
    first, second = (t, i) if text_first else (i, t)
    slots = torch.arange(text + image).view(ranks, first + second)
    return torch.cat([slots[:, :first].reshape(-1), slots[:, first:].reshape(-1)]).to(device)


@dataclass(frozen=True)
class EntropyAcrossRanks(Entropy):
    """Entropy that shares its budget among the heads of all ranks, as one rank would."""

    ranks: Ranks | None = field(default=None, kw_only=True)

    dealt: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)

    def plan(self, query: Query) -> BlockPlan:
        if query.dealt is None or self.dealt is not None:
            return super().plan(query)
        return replace(self, dealt=query.dealt).plan(query)

    def keep(self, scores: Tensor, layout: BlockLayout) -> Tensor:
        ranks, dealt = self.ranks, self.dealt
        assert ranks is not None
        entropy = entropy_of(scores, layout.counted_rows).contiguous()
        parts = [torch.empty_like(entropy) for _ in range(ranks.count)]
        dist.all_gather(parts, entropy, group=ranks.group)
        every = torch.cat(parts, dim=1)
        if dealt is not None:  # among equal heads the lower one comes first, as on one rank
            every = every.index_select(1, dealt.argsort())
        keep = share_blocks(every, self.budget, layout.N, self.sharpness)
        if dealt is not None:
            keep = keep.index_select(1, dealt)
        heads = entropy.shape[1]
        return keep[:, ranks.rank * heads : (ranks.rank + 1) * heads]


@dataclass(frozen=True)
class RateDistortionAcrossRanks(RateDistortion):
    """Rate–distortion with one price for the heads of all ranks, as one rank would have."""

    ranks: Ranks | None = field(default=None, kw_only=True)

    @property
    def sum_over_ranks(self) -> Sum:
        assert self.ranks is not None
        return self.ranks.sum


@functools.cache
def _with_one_threshold(kind: type[Thresholded]) -> type[Any]:
    """The same kind of method, with one threshold for the heads of all ranks."""

    @dataclass(frozen=True)
    class AcrossRanks(kind):  # type: ignore[misc, valid-type]
        ranks: Ranks | None = field(default=None, kw_only=True)

        def sum_over_ranks(self, work: Tensor) -> Tensor:
            assert self.ranks is not None
            return self.ranks.sum(work)

    return AcrossRanks


def across_ranks(method: Method, ranks: Ranks) -> Method:
    """The method that plans for this rank's heads as it would plan for all of them."""
    if isinstance(method, Schedule):
        return replace(method, inner=across_ranks(method.inner, ranks))
    if type(method) is Entropy:
        return EntropyAcrossRanks(**_options(method), ranks=ranks)
    if type(method) is RateDistortion:
        return RateDistortionAcrossRanks(**_options(method), ranks=ranks)
    if isinstance(method, Thresholded):
        return _with_one_threshold(type(method))(**_options(method), ranks=ranks)
    return method.among_ranks(ranks.rank, ranks.count, ranks.sum)


def _options(method: Any) -> dict[str, Any]:
    return {f.name: getattr(method, f.name) for f in fields(method)}
