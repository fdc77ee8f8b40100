"""Full attention: the stock operation, and the fastest one at hand."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from jali.padding import KeyPadding


def stock(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    padding: KeyPadding | None = None,
    causal: bool = False,
) -> Tensor:
    """PyTorch's own attention, called as a model would call it. [B, H, S, D]."""
    if padding is None:
        return F.scaled_dot_product_attention(
            q, k, v, scale=scale, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
        )
    real = padding.valid(k.shape[2])[:, None, None]
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=real, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    # Some kernels average over all keys where none is real; such a row is zero everywhere here.
    return out.masked_fill(~real.any(-1, keepdim=True), 0)
