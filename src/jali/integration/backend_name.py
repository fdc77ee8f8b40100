"""`set_attention_backend("jali")`: sparse attention by name, with defaults."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
from diffusers.models.attention_dispatch import AttentionBackendName, dispatch_attention_fn
from torch import Tensor, nn

from jali.functional import sparse_attention
from jali.integration.attachment import unwrapped
from jali.integration.families import family_of
from jali.integration.registration import add_backend_name

log = logging.getLogger("jali")

NAME = "jali"
SPARSITY = 0.5
MIN_TOKENS = 1024

# Families, by how jali reaches them, where a name is not enough.
_BEYOND = {
    "cogvideox": "never asks diffusers' attention dispatcher, so no backend name reaches it",
    "hunyuan15": "masks pairs of tokens in every call, so by name its attention would stay dense",
}


def register_backend(target: Any = None) -> None:
    """Make `transformer.set_attention_backend("jali")` possible. Once more does nothing.

    It runs `entropy` at a budget of 0.5 in every long self-attention, with or without a mask of
    keys, and everything else dense; it knows neither step, layer nor grid.
    `apply_sparse_attention` does. Give a pipeline or transformer as `target` to be told where a
    name cannot make its attention sparse.
    """
    add_backend_name(NAME, attend_by_name)
    if target is None:
        return
    module = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
    family = family_of(unwrapped(module))
    if family.attention_call in _BEYOND:
        raise ValueError(
            f"{family.name} {_BEYOND[family.attention_call]}; use jali.apply_sparse_attention or "
            f"jali.sparse_processor_mode"
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
    """[B, S, H, D] -> like query: sparse where it is self-attention, long, and a mask, if there is
    one, hides keys from all queries alike."""
    if return_lse or _parallel_config is not None:
        raise ValueError(
            "the attention backend 'jali' takes no parallel configuration; "
            "use jali.apply_sparse_attention, which does Ulysses"
        )
    batch, tokens = query.shape[:2]
    own = tokens == key.shape[1] and not (is_causal or dropout_p)
    if own and tokens >= MIN_TOKENS:
        if attn_mask is None or _hides_keys(attn_mask, batch, tokens):
            return sparse_attention(
                query, key, value, attn_mask, scale, head_num=query.shape[2],
                input_layout="BSND", sparse_type="entropy", sparsity=SPARSITY,
            )  # fmt: skip
        if not torch.compiler.is_compiling():
            _tell_of_masks()
    return dispatch_attention_fn(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        backend=AttentionBackendName.NATIVE,
    )  # fmt: skip


def _hides_keys(mask: Tensor, batch: int, tokens: int) -> bool:
    shapes = (batch, tokens), (batch, 1, 1, tokens)
    return mask.dtype == torch.bool and tuple(mask.shape) in shapes


@functools.cache
def _tell_of_masks() -> None:
    """Once a process: a backend knows no run that could say it."""
    log.warning(
        "jali: the backend by name leaves self-attention with a mask of pairs of tokens, or one "
        "that is added to the scores, dense"
    )
