"""The definition of correct: the plan written out as a token mask, in fp32."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from jali.backends.backend import Backend, Task
from jali.backends.pyramid import pool
from jali.kernels.lists import group_size
from jali.planning.plan import BlockPlan
from jali.tokens.padding import KeyPadding


class Reference(Backend):
    """One softmax over the keys of every level, held in full: for tests and small inputs."""

    name: ClassVar[str] = "reference"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float64: 1e-12, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3,
    }  # fmt: skip

    def why_not(self, task: Task) -> list[str]:  # noqa: ARG002
        return []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, out_buffer: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        share = q.shape[1] // k.shape[1]
        if padding is not None:
            k, v = padding.zeroed(k), padding.zeroed(v)
        queries = q.to(dtype)
        k, v = (x.to(dtype).repeat_interleave(share, dim=1) for x in (k, v))
        levels = token_levels(plan)
        logits, values = [], []
        for level in plan.ratios:
            ratio = group_size(level, plan.blocks.k)
            keys, means, count = pool(k, v, ratio, padding)
            log_count = count.to(dtype).log()[:, None, None]  # −inf where no key is real
            logit = queries @ keys.transpose(-1, -2) * scale + log_count
            if plan.causal:
                logit = logit.masked_fill(_after(plan, ratio, q.device), -torch.inf)
            read = levels[..., ::ratio] == level
            logits.append(logit.masked_fill(~read, -torch.inf))
            values.append(means)
        logit = torch.cat(logits, dim=-1)
        lse = logit.logsumexp(-1)
        nothing = (lse == -torch.inf)[..., None]  # a row that reads no real key
        weight = logit.softmax(-1).masked_fill(nothing, 0)
        return (weight @ torch.cat(values, dim=-2)).to(q.dtype), lse.float()


def token_levels(plan: BlockPlan) -> Tensor:
    """The level of every token pair. uint8 [B|1, H|1, Sq, Sk]."""
    layout = plan.layout
    levels = plan.levels.repeat_interleave(plan.blocks.q, dim=2)[:, :, : layout.q.tokens]
    return levels.repeat_interleave(plan.blocks.k, dim=3)[..., : layout.k.tokens]


def _after(plan: BlockPlan, ratio: int, device: torch.device) -> Tensor:
    """Keys (or pooled keys, by their last token) after the query. bool [Sq, ⌈Sk / ratio⌉]."""
    layout = plan.layout
    assert layout.offset is not None
    query = torch.arange(layout.q.tokens, device=device)[:, None] + layout.offset
    groups = -(-layout.k.tokens // ratio)
    last = (torch.arange(1, groups + 1, device=device) * ratio).clamp_max(layout.k.tokens) - 1
    return last > query
