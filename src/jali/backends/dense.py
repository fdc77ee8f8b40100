"""Full attention: the stock operation, and the fastest one at hand."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from jali.backends import fa4
from jali.backends.backend import Task
from jali.tokens.padding import KeyPadding


def stock(
    q: Tensor, k: Tensor, v: Tensor, scale: float, padding: KeyPadding | None = None,
    causal: bool = False,
) -> Tensor:  # fmt: skip
    """PyTorch's own attention, called as a model would call it. [B, H, S, D]."""
    gqa = q.shape[1] != k.shape[1]
    if k.shape[2] == 0:  # no sample has a key
        return torch.zeros_like(q)
    if padding is None:
        return F.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, enable_gqa=gqa
        )
    real = padding.valid(k.shape[2])[:, None, None]
    k, v = padding.zeroed(k), padding.zeroed(v)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=real, scale=scale, enable_gqa=gqa)
    # Some kernels average over all keys where none is real; such a row is zero everywhere here.
    return out.masked_fill(~real.any(-1, keepdim=True), 0)


@functools.lru_cache(maxsize=256)
def _fa4_runs(task: Task) -> bool:
    return not fa4.Fa4().why_not(task)


# What a sparse run would lose on its dense steps if they ran on whatever is the default.
FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


def fastest(
    q: Tensor, k: Tensor, v: Tensor, scale: float, task: Task,
    padding: KeyPadding | None = None, causal: bool = False,
) -> tuple[Tensor, str]:  # fmt: skip
    """The same attention by the fastest kernel there is, and that kernel's name."""
    if padding is None and not causal and task.k_tokens and _fa4_runs(task):
        return fa4.dense(q, k, v, scale), "fa4 dense"
    if not q.is_cuda:
        return stock(q, k, v, scale, padding, causal), "stock"
    with sdpa_kernel(FASTEST_FIRST, set_priority=True):
        return stock(q, k, v, scale, padding, causal), "stock"
