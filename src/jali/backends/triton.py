"""jali's own Triton kernel: every plan, every NVIDIA GPU from Ampere on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from jali import kernels
from jali.backends.backend import (
    HALF_PRECISION,
    Backend,
    Task,
    common_reasons,
    contiguous_rows,
    multiples,
)  # fmt: skip
from jali.planning.plan import BlockPlan
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding


class Triton(Backend):
    """One online softmax over all levels; pooled keys are built on the way."""

    name: ClassVar[str] = "triton"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-3, **HALF_PRECISION}
    blocks: ClassVar[Blocks] = Blocks(128, 128)

    def why_not(self, task: Task) -> list[str]:
        reasons = [*kernels.why_unavailable(task.device)]
        reasons += common_reasons(task, self.tolerance, range(16, 257))
        if task.padding == "mask":
            reasons.append("knows key lengths, not key masks")
        return reasons

    def fitting(self, blocks: Blocks, task: Task) -> Blocks:  # noqa: ARG002
        """Multiples of 16: the narrowest tile of a tensor core."""
        return multiples(blocks, 16, 16)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, out_buffer: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        q, k, v = contiguous_rows(q), contiguous_rows(k), contiguous_rows(v)
        length = None if padding is None else padding.length
        found: tuple[Tensor, Tensor] = kernels.load("attention").block_sparse_attention(
            q, k, v, plan.lists, plan.blocks.q, plan.blocks.k, scale, length
        )
        return found
