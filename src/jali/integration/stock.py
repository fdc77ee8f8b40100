"""Attention exactly as the model would do it without us."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from diffusers.models.attention_dispatch import _AttentionBackendRegistry as _Registry
from torch import Tensor

from jali.integration.families import Family


def attention(
    family: Family, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None,
    backend: Any,
) -> Tensor:  # fmt: skip
    """[B, S, H, D] -> like q, by the backend the user chose in diffusers (None: its default)."""
    if family.attention_call == "cogvideox":  # never asks the dispatcher
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=scale
        )
        return out.transpose(1, 2)
    if mask is not None and mask.dim() == 2:  # HunyuanVideo 1.5 hides padded pairs on both sides
        mask = mask[:, None, None, :] & mask[:, None, :, None]
    if backend is None and _Registry._active_backend.value == "jali":
        backend = AttentionBackendName.NATIVE  # dense means dense, whatever the process default is
    return dispatch_attention_fn(
        q, k, v, attn_mask=mask, dropout_p=0.0, is_causal=False, scale=scale, backend=backend
    )
