"""Pyramids at full speed: FlashAttention-4 reads the blocks at full resolution, jali's Triton
kernel the pooled ones, and their log-sum-exps tell how to add the two."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from jali.backends.backend import Backend, Task, contiguous_rows
from jali.backends.fa4 import Fa4
from jali.backends.triton import Triton
from jali.fused import kernels
from jali.layout import Blocks
from jali.padding import KeyPadding
from jali.plan import BlockPlan


class Mixed(Backend):
    """Pays off where much is read in full; the merge reads two outputs and writes one."""

    name: ClassVar[str] = "fa4+triton"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = Fa4.tolerance

    def why_not(self, task: Task) -> list[str]:
        reasons = Fa4().why_not(replace(task, ratios=(1,)))
        reasons += [reason for reason in Triton().why_not(task) if reason not in reasons]
        if task.ratios == (1,):
            reasons.append("is for plans that pool keys; this one does not")
        if task.padding is not None:
            reasons.append("has no key padding")
        return reasons

    def preferred(self, task: Task) -> Blocks:
        return Fa4().preferred(task)

    def fitting(self, blocks: Blocks, task: Task) -> Blocks:
        return Fa4().fitting(blocks, task)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, spare: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
        out, lse = Fa4().attend(q, k, v, plan, scale)
        pooled = {r: (part.counts, part.indices) for r, part in plan.lists.items() if r != 1}
        other, other_lse = kernels("attention").block_sparse_attention(
            q, k, v, pooled, plan.blocks.q, plan.blocks.k, scale
        )
        merged: tuple[Tensor, Tensor] = kernels("merge").merge_attention(out, lse, other, other_lse)
        return merged
