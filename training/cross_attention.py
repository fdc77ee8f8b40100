"""Cross-attention over a padded text, without the padding.

WanPipeline pads every prompt with zeros to 512 positions, and the model attends to all of them. The
zeros give one and the same key and value, so one of them stands for all: its score is raised by the
logarithm of their number. That is exact, and a picture has 256 tokens.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


class UnpaddedCrossAttention:
    """A processor for `attn2` of Wan blocks; the text's last position stands for `copies`."""

    def __init__(self, copies: int) -> None:
        self.lift = math.log(copies)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor,
        attention_mask: Tensor | None = None,  # noqa: ARG002
        rotary_emb: Any = None,  # noqa: ARG002
    ) -> Tensor:
        heads = (attn.heads, -1)
        q = attn.norm_q(attn.to_q(hidden_states)).unflatten(2, heads).transpose(1, 2)
        k = attn.norm_k(attn.to_k(encoder_hidden_states)).unflatten(2, heads).transpose(1, 2)
        v = attn.to_v(encoder_hidden_states).unflatten(2, heads).transpose(1, 2)
        last = torch.arange(k.shape[2], device=k.device) == k.shape[2] - 1
        lift = torch.where(last, self.lift, 0.0).to(q.dtype).view(1, 1, 1, -1)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=lift)
        return attn.to_out[1](attn.to_out[0](out.transpose(1, 2).flatten(2).type_as(q)))


def attend_without_padding(transformer: Any, length: int, padded: int) -> None:
    """Let the blocks attend to texts of `length` as if they were padded to `padded`."""
    for block in transformer.blocks:
        block.attn2.set_processor(UnpaddedCrossAttention(padded - length + 1))
