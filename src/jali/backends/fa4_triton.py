"""Pyramids at full speed: FlashAttention-4 reads the blocks at full resolution, jali's Triton
kernel the pooled ones and adds the two: their log-sum-exps tell how."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import ClassVar

from torch import Tensor

from jali import kernels
from jali.backends import fa4
from jali.backends.backend import Task, contiguous_rows
from jali.backends.fa4 import Fa4
from jali.backends.triton import Triton
from jali.kernels.lists import MEAN
from jali.planning.plan import BlockPlan
from jali.tokens.padding import KeyPadding


@functools.cache
def pooled(ratios: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(ratio for ratio in ratios if ratio != 1)


class Fa4Triton(Fa4):
    """Pays off where much is read in full; the second kernel reads what the first wrote."""

    name: ClassVar[str] = "fa4+triton"
    # H200, 32,760 tokens of 12 heads of 128: benchmarks/results/methods-h200.json.
    level_times: ClassVar[Mapping[int, float]] = MappingProxyType(
        {2: 0.73, 4: 0.36, 8: 0.17, MEAN: 0.03}
    )

    def why_not(self, task: Task) -> list[str]:
        reasons = super().why_not(replace(task, ratios=(1,)))
        reasons += [reason for reason in Triton().why_not(task) if reason not in reasons]
        if task.ratios == (1,):
            reasons.append("is for plans that pool keys; this one does not")
        if task.padding is not None:
            reasons.append("has no key padding")
        return reasons

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, out_buffer: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
        lists, blocks = plan.lists, plan.blocks
        full = fa4.sparse(q, k, v, lists[1], blocks, scale)
        found: tuple[Tensor, Tensor] = kernels.load("attention").block_sparse_attention(
            q, k, v, lists, blocks.q, blocks.k, scale, ratios=pooled(plan.ratios), add_to=full
        )
        return found
