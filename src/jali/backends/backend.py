"""What every backend is: it executes plans, and says in words which ones it cannot."""

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from jali.planning.plan import BlockPlan
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding


@dataclass(frozen=True, slots=True)
class Task:
    """The static facts of a call: all that decides whether a backend can run it.

    Known before any planning, so that method and backend can agree on blocks first.
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
    """An empty `why_not` promises a result within `tolerance` of the reference."""

    name: ClassVar[str]
    # Largest relative error ‖out − ref‖ / ‖ref‖ against fp32 attention on the same inputs.
    tolerance: ClassVar[Mapping[torch.dtype, float]]

    @abc.abstractmethod
    def why_not(self, task: Task) -> list[str]:
        """The reasons it cannot run this, each a sentence; empty when it can."""

    @abc.abstractmethod
    def preferred(self, task: Task) -> Blocks:
        """The blocks it likes best."""

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
        [B, H, Sq]. A row without a single real key gives zeros and −inf. `out_buffer` is
        memory like q that the result may be written to; it may be q itself, when q is a copy that
        nobody needs.
        """


FLOATS = (torch.float32, torch.float16, torch.bfloat16)


def dtype_reasons(task: Task, known: tuple[torch.dtype, ...] = FLOATS) -> list[str]:
    if task.dtype in known:
        return []
    names = ", ".join(str(d).removeprefix("torch.") for d in known)
    return [f"needs {names}, the tensors are {str(task.dtype).removeprefix('torch.')}"]


def contiguous_rows(x: Tensor) -> Tensor:
    """Kernels read whole rows; any other strides they take as they are."""
    return x if x.stride()[3] == 1 else x.contiguous()
