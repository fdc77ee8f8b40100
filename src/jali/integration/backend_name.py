"""Names of ours among diffusers' attention backends: `set_attention_backend("jali")`."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from diffusers import __version__ as diffusers_version
from diffusers.models import attention_dispatch
from torch import Tensor, nn

from jali.functional import is_key_mask, sparse_attention
from jali.integration.config import BUDGET
from jali.integration.families import family_of

log = logging.getLogger("jali")

NAME = "jali"
MIN_TOKENS = 1024

# Families, by how their attention is called, where a name is not enough.
_BEYOND = {
    "cogvideox": "never asks diffusers' attention dispatcher, so no backend name reaches it",
    "hunyuan15": "masks pairs of tokens in every call, so by name its attention would stay dense",
}


def add_backend_name(
    name: str, function: Callable[..., Any], context_parallel: bool = False
) -> Any:
    """The enum member of `name`, made the first time.

    diffusers has a closed enum and no call to extend it; adding a member by hand is what other
    libraries do too. Nothing else of diffusers changes, and no default does.
    """
    try:
        names = attention_dispatch.AttentionBackendName
        registry = attention_dispatch._AttentionBackendRegistry
        if name in names._value2member_map_:
            return names._value2member_map_[name]
        member = str.__new__(names, name)
        member._name_, member._value_ = name.upper(), name
        register = registry.register(member, supports_context_parallel=context_parallel)
        register(function)
        names._member_map_[name.upper()] = member
        names._member_names_.append(name.upper())
        names._value2member_map_[name] = member
    except (AttributeError, TypeError) as error:  # pragma: no cover
        raise RuntimeError(
            f"diffusers {diffusers_version} keeps its attention backends in a way that jali does "
            f"not know (it knows 0.36 to 0.42): {error}"
        ) from error
    return member


def register_backend(target: Any = None) -> None:
    """Make `transformer.set_attention_backend("jali")` possible. Once more does nothing.

        jali.register_backend(pipe)
        pipe.transformer.set_attention_backend("jali")

    It runs `entropy` at a budget of 0.5 in every self-attention of at least 1,024 tokens, with or
    without a mask of keys, and everything else dense; it knows neither step, layer nor grid.
    `apply_sparse_attention` does.

    Args:
        target: a pipeline or transformer to ask about; `ValueError` where a name cannot make its
            attention sparse (CogVideoX, HunyuanVideo 1.5), or jali does not know it.

    Raises:
        RuntimeError: this version of diffusers keeps its backends in a way that jali does not know.
    """
    from jali.integration.attachment import unwrapped

    add_backend_name(NAME, attend_by_name)
    if target is None:
        return
    module = target if isinstance(target, nn.Module) else getattr(target, "transformer", None)
    family = family_of(unwrapped(module))
    if problem := _BEYOND.get(family.attention_call):
        raise ValueError(
            f"{family.name} {problem}; use jali.apply_sparse_attention or "
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
        if attn_mask is None or is_key_mask(attn_mask, batch, tokens):
            return sparse_attention(
                query, key, value, attn_mask, scale, head_num=query.shape[2],
                input_layout="BSND", sparse_type="entropy", sparsity=1 - BUDGET,
            )  # fmt: skip
        if not torch.compiler.is_compiling():
            _tell_of_masks()
    return attention_dispatch.dispatch_attention_fn(
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa,
        backend=attention_dispatch.AttentionBackendName.NATIVE,
    )  # fmt: skip


@functools.cache
def _tell_of_masks() -> None:
    """Once a process: a backend knows no run that could say it."""
    log.warning(
        "jali: the backend by name leaves self-attention with a mask of pairs of tokens, or one "
        "that is added to the scores, dense"
    )
