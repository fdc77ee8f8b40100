"""`set_attention_backend("jali")`: sparse attention by name, with defaults."""

from __future__ import annotations

import logging
from typing import Any

from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor, nn

from jali.functional import sparse_attention
from jali.integration.attachment import unwrapped
from jali.integration.families import family_of
from jali.integration.registration import enrol

log = logging.getLogger("jali")

NAME = "jali"
SPARSITY = 0.5
MIN_TOKENS = 1024


def register_backend(target: Any = None) -> None:
    """Make `transformer.set_attention_backend("jali")` possible. Once more does nothing.

    It runs `entropy` at a budget of 0.5 in every self-attention without a mask, and everything
    else dense; it knows neither step, layer nor grid. `apply_sparse_attention` does. Give a
    pipeline or transformer as `target` to be told where a name cannot reach its attention.
    """
    enrol(NAME, attend_by_name)
    if target is None:
        return
    module = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
    family = family_of(unwrapped(module))
    if family.reach == "cogvideox":
        raise ValueError(
            f"{family.name} never asks diffusers' attention dispatcher, so no backend name "
            f"reaches it; use jali.apply_sparse_attention or jali.sparse_processor_mode"
        )


def attend_by_name(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    _parallel_config: Any = None,
) -> Tensor:
    """[B, S, H, D] -> like query: sparse where it is self-attention without a mask and long."""
    if return_lse or _parallel_config is not None:
        raise ValueError(
            "the attention backend 'jali' takes no parallel configuration; "
            "use jali.apply_sparse_attention, which does Ulysses"
        )
    own = query.shape[1] == key.shape[1] and attn_mask is None
    if own and not (is_causal or dropout_p) and query.shape[1] >= MIN_TOKENS:
        return sparse_attention(
            query, key, value, scale=scale, head_num=query.shape[2], input_layout="BSND",
            sparse_type="entropy", sparsity=SPARSITY,
        )  # fmt: skip
    return dispatch_attention_fn(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        backend=AttentionBackendName.NATIVE,
    )  # fmt: skip
