"""torch.nn.attention.flex_attention with a BlockMask: the fallback people already have."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor

from jali.backends.backend import HALF_PRECISION, Backend, Task, common_reasons, multiples
from jali.planning.plan import BlockPlan
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding


class Flex(Backend):
    """Compiled once per shape; the first call of a shape takes some seconds."""

    name: ClassVar[str] = "flex"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-3, **HALF_PRECISION}
    blocks: ClassVar[Blocks] = Blocks(128, 128)

    def why_not(self, task: Task) -> list[str]:
        reasons = common_reasons(task, self.tolerance, range(16, 257), pools=False)
        if task.device.type != "cuda":
            reasons.append("skips blocks on CUDA only; elsewhere it would compute all of them")
        if importlib.util.find_spec("triton") is None:
            reasons.append("triton is not installed: pip install 'jali[triton]'")
        if task.padding is not None:
            reasons.append("has no key padding here")
        return reasons

    def fitting(self, blocks: Blocks, task: Task) -> Blocks:  # noqa: ARG002
        """Its tiles of 128 × 128 (or smaller ones) must divide the blocks."""
        return multiples(blocks, 128, 128)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, out_buffer: Tensor | None = None,  # noqa: ARG002
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert padding is None
        mask = block_mask(plan, q.shape[0], q.shape[1])
        with _many_shapes():
            gqa = q.shape[1] != k.shape[1]
            out, lse = _compiled()(
                q, k, v, block_mask=mask, scale=scale, enable_gqa=gqa, return_lse=True
            )
        return out, lse


def _many_shapes() -> AbstractContextManager[Any]:
    """Past a handful of shapes the compiler would give up and, silently, compute everything."""
    config: Any = torch._dynamo.config
    renamed = hasattr(config, "recompile_limit")  # since PyTorch 2.6
    return config.patch({"recompile_limit" if renamed else "cache_size_limit": 1024})


def block_mask(plan: BlockPlan, B: int, H: int) -> Any:
    """The plan as a BlockMask whose blocks are all full: no mask function runs on any of them."""
    from torch.nn.attention.flex_attention import BlockMask

    listed = plan.lists[1]
    counts = listed.counts.expand(B, H, -1).contiguous()
    indices = listed.indices.expand(B, H, -1, -1).contiguous()
    none = torch.zeros_like(counts)
    return BlockMask.from_kv_blocks(
        none,
        torch.zeros_like(indices),
        full_kv_num_blocks=counts,
        full_kv_indices=indices,
        BLOCK_SIZE=(plan.blocks.q, plan.blocks.k),
        seq_lengths=(plan.layout.q.tokens, plan.layout.k.tokens),
    )


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)
