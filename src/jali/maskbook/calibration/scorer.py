"""What is recorded: how important each key block is to each query block (rows sum to 1), or what
reading it less finely would do."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from torch import Tensor

from jali.methods import Query, RateDistortion
from jali.planning.scoring import antidiagonal_scores, mean_scores, sample_positions, sampled_scores
from jali.value import check_count


@runtime_checkable
class Scorer(Protocol):
    """Anything that scores blocks; `name` goes into the book."""

    @property
    def name(self) -> str: ...

    def __call__(self, query: Query) -> Tensor:
        """fp32 [B, H, M, N], finite and not negative."""
        ...


@dataclass(frozen=True)
class Sampled:
    """entropy's: the softmax mass that a few evenly spread queries give to each key block."""

    samples: int = 4

    def __post_init__(self) -> None:
        check_count("samples", self.samples)

    @property
    def name(self) -> str:
        return f"sampled-{self.samples}"

    def __call__(self, query: Query) -> Tensor:
        layout = query.layout
        at = sample_positions(layout.q.tokens, layout.blocks.q, self.samples, query.q.device)
        return sampled_scores(query.q, query.k, layout, query.scale, at, query.padding)


@dataclass(frozen=True)
class Antidiagonal:
    """ada_bsa's: softmax over antidiagonal sums of stride × stride tiles."""

    stride: int = 8

    def __post_init__(self) -> None:
        check_count("stride", self.stride)

    @property
    def name(self) -> str:
        return f"antidiagonal-{self.stride}"

    def __call__(self, query: Query) -> Tensor:
        return antidiagonal_scores(
            query.q, query.k, query.layout, query.scale, query.padding, self.stride
        )


@dataclass(frozen=True)
class BlockMeans:
    """rf_v2's: softmax over the products of block means."""

    @property
    def name(self) -> str:
        return "block-means"

    def __call__(self, query: Query) -> Tensor:
        scores = mean_scores(query.q, query.k, query.layout, query.scale, query.padding)
        return scores.softmax(-1).nan_to_num(0.0)


@dataclass(frozen=True)
class TableErrors:
    """rd's: what reading each block at every level does to the output. fp32 [B, H, M, N, L]."""

    method: RateDistortion

    @property
    def name(self) -> str:
        # Its other options say what is done with the errors, or stand in the book by themselves.
        other = {
            "budget", "price", "costs", "levels", "keep", "q_block", "k_block", "order", "tail",
            "probes",
        }  # fmt: skip
        own = {f.name: getattr(self.method, f.name) for f in fields(self.method)}
        return " ".join(["rd", *(f"{n}={x}" for n, x in own.items() if n not in other)])

    def __call__(self, query: Query) -> Tensor:
        return self.method.table(query).errors()
