"""What every backend is: it executes plans, and says in words which ones it cannot."""

from __future__ import annotations

import abc
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from jali.planning.plan import BlockPlan
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding


@dataclass(frozen=True, slots=True)
class Task:
    """The static facts of a call: all that decides whether a backend can run it.

    Known before any planning, so that method and backend can agree on blocks first. `ratios`: the
    ratios a plan may use, ascending. `padding`: None, "mask", "length" (known to the device only)
    or "host length".
    """

    device: torch.device
    dtype: torch.dtype
    head_dim: int
    heads: int
    kv_heads: int
    q_tokens: int
    k_tokens: int
    ratios: tuple[int, ...] = (1,)
    padding: str | None = None
    causal: bool = False


class Backend(abc.ABC):
    """Executes plans. An empty `why_not` promises a result within `tolerance` of the reference.

    >>> layout = block_layout(TokenGrid.flat(512), blocks=Blocks(128, 64))
    >>> levels = torch.ones(1, 1, layout.M, layout.N)
    >>> q, k, v = torch.randn(3, 1, 4, 512, 64)
    >>> out, lse = BACKENDS["torch"].attend(
    ...     q, k, v, BlockPlan.from_levels(levels, layout), scale=64**-0.5
    ... )
    >>> out.shape, lse.shape
    (torch.Size([1, 4, 512, 64]), torch.Size([1, 4, 512]))
    """

    name: ClassVar[str]
    # Largest relative error ‖out − ref‖ / ‖ref‖ against fp32 attention on the same inputs.
    tolerance: ClassVar[Mapping[torch.dtype, float]]
    blocks: ClassVar[Blocks] = Blocks(256, 128)
    # What a block takes at a pooled level, as a share of reading it in full; where nothing was
    # measured, its share of the work.
    level_times: ClassVar[Mapping[int, float]] = MappingProxyType({})

    @abc.abstractmethod
    def why_not(self, task: Task) -> list[str]:
        """The reasons it cannot run this, each a sentence; empty when it can."""

    def preferred(self, task: Task) -> Blocks:  # noqa: ARG002
        """The blocks it likes best."""
        return self.blocks

    def fitting(self, blocks: Blocks, task: Task) -> Blocks:  # noqa: ARG002
        """Blocks it can run, as near to these as it gets; the plan is coarsened to them."""
        return blocks

    @abc.abstractmethod
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, out_buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Attention over the plan, in arranged order.

        q [B, H, Sq, D], k and v [B, Hkv, Sk, D] -> out like q, and the log-sum-exp fp32
        [B, H, Sq]. A row without a single real key gives zeros and −inf. Padded keys and values may
        hold anything, NaN included: not a bit of the result depends on it. `out_buffer` is memory
        like q that the result may be written to; it may be q itself, when q is a copy that nobody
        needs.
        """


HALF_PRECISION = {torch.float16: 2e-3, torch.bfloat16: 1e-2}  # the tolerance of most backends


def common_reasons(
    task: Task, dtypes: Collection[torch.dtype], head_dims: range, *, pools: bool = True
) -> list[str]:
    """Why kernels for these dtypes and head dims, which may read pooled keys, cannot run this."""
    reasons = []
    if task.dtype not in dtypes:
        names = ", ".join(str(d).removeprefix("torch.") for d in dtypes)
        got = str(task.dtype).removeprefix("torch.")
        reasons.append(f"needs {names}, the tensors are {got}")
    if task.head_dim not in head_dims:
        steps = "" if head_dims.step == 1 else f" in steps of {head_dims.step}"
        reasons.append(
            f"needs a head dim of {head_dims[0]}..{head_dims[-1]}{steps}, got {task.head_dim}"
        )
    if not pools and task.ratios != (1,):
        reasons.append("reads keys at full resolution only, this plan pools them")
    if task.causal:
        reasons.append("has no causal plans here")
    return reasons


def multiples(blocks: Blocks, q: int, k: int) -> Blocks:
    """The smallest blocks of a multiple of q queries and of k keys that are not below these."""
    return Blocks(-(-blocks.q // q) * q, -(-blocks.k // k) * k)


def contiguous_rows(x: Tensor) -> Tensor:
    """Kernels read whole rows; any other strides they take as they are."""
    return x if x.stride()[3] == 1 else x.contiguous()
