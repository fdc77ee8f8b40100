"""`sparse_attention(...)`: the tensor-level API, with the names and defaults of MindIE-SD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jali.attend import attend
from jali.checks import check_scale, check_tensors
from jali.methods import AdaBsa, Entropy, Method, Psa, RfV2
from jali.planning.budget import Budget
from jali.tokens.grid import Text, TokenGrid
from jali.tokens.padding import KeyPadding
from jali.value import check_choice, check_share, suggest

LAYOUTS = ("BNSD", "BSND")
SPARSE_TYPES = (None, "rf_v2", "ada_bsa", "entropy", "psa")

# The operator's arguments, those of `sparse_attention` in their order, by the types of its schema.
_ARGUMENTS = {
    "q": "Tensor", "k": "Tensor", "v": "Tensor", "attn_mask": "Tensor?", "scale": "float?",
    "is_causal": "bool", "head_num": "SymInt", "input_layout": "str", "inner_precise": "SymInt",
    "sparse_type": "str?", "txt_len": "SymInt", "block_size": "SymInt",
    "latent_shape_q": "SymInt[]?", "latent_shape_k": "SymInt[]?", "keep_sink": "bool",
    "keep_recent": "bool", "cdf_threshold": "float", "sparsity": "float", "compat": "bool",
    "backend": "str",
}  # fmt: skip
# What is taken as each of them. The operator's own complaints would be RuntimeErrors.
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    "Tensor": ((Tensor,), "a tensor"),
    "bool": ((bool,), "a bool"),
    "float": ((int, float), "a number"),
    "str": ((str,), "a word"),
    "SymInt": ((int, torch.SymInt), "an int"),
    "SymInt[]": ((list, tuple), "[frames, height, width]"),
}
_TYPES |= {f"{name}?": ((*kinds, NoneType), words) for name, (kinds, words) in _TYPES.items()}
# Options that belong to some methods only. Elsewhere they must keep their default.
_OPTIONS: dict[str, tuple[Any, tuple[str | None, ...]]] = {
    "keep_sink": (True, ("ada_bsa",)),
    "keep_recent": (True, ("ada_bsa",)),
    "cdf_threshold": (1.0, ("ada_bsa",)),
    "compat": (False, ("rf_v2", "ada_bsa")),
    "block_size": (128, ("rf_v2", "ada_bsa", "entropy")),
}


def sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    head_num: int = 1,
    input_layout: str = "BNSD",
    inner_precise: int = 0,
    sparse_type: str | None = None,
    txt_len: int = 0,
    block_size: int = 128,
    latent_shape_q: Sequence[int] | None = None,
    latent_shape_k: Sequence[int] | None = None,
    keep_sink: bool = True,
    keep_recent: bool = True,
    cdf_threshold: float = 1.0,
    sparsity: float = 0.0,
    *,
    compat: bool = False,
    backend: str = "auto",
    **unknown: Any,
) -> Tensor:
    """Attention that skips the `sparsity` least important work, with MindIE-SD's names.

    Runs under torch.compile(fullgraph=True) as one operator.

    Args:
        q, k, v: [B, heads, tokens, head_dim] ("BNSD") or [B, tokens, heads, head_dim] ("BSND").
            The sequence is `txt_len` text tokens, then frames × height × width latent tokens.
        attn_mask: bool mask of real keys, [B, Sk] or [B, 1, 1, Sk]; dense calls take any.
        scale: of the logits; None is head_dim ** -0.5.
        is_causal: for ada_bsa, entropy and dense attention.
        head_num: the number of query heads (1 is taken as "not given").
        input_layout: "BNSD" or "BSND".
        inner_precise: 0 and 1 both mean an fp32 softmax.
        sparse_type: None (dense), "rf_v2", "ada_bsa", "entropy" or "psa".
        txt_len: text tokens before the latent ones.
        block_size: of rf_v2, ada_bsa and entropy.
        latent_shape_q, latent_shape_k: [frames, height, width], ints (of numpy too); without one,
            a single row.
        keep_sink, keep_recent, cdf_threshold: of ada_bsa.
        sparsity: share of the key blocks that is skipped.
        compat: the originals' decisions, of rf_v2 and ada_bsa.
        backend: "auto", or a name, which never falls back.

    Returns:
        A tensor like q.

    Raises:
        ValueError, TypeError: an option of another method, a shape or a value that does not fit,
            named with its rule, before any work.

    Example:
        >>> sparse_attention(q, k, v, head_num=8, sparse_type="rf_v2", sparsity=0.8,
        ...                  latent_shape_q=[21, 30, 52])
    """
    if unknown:
        name = next(iter(unknown))
        raise TypeError(f"sparse_attention has no option {name!r}{suggest(name, _ARGUMENTS)}")
    given = (
        q, k, v, attn_mask, scale, is_causal, head_num, input_layout, inner_precise, sparse_type,
        txt_len, block_size, latent_shape_q, latent_shape_k, keep_sink, keep_recent,
        cdf_threshold, sparsity, compat, backend,
    )  # fmt: skip
    taken = [_taken(*about, value) for about, value in zip(_ARGUMENTS.items(), given, strict=True)]
    check_choice("input_layout", input_layout, LAYOUTS)
    check_tensors(*_heads_first(input_layout, q, k, v))
    return torch.ops.jali.sparse_attention(*taken)


def _taken(name: str, declared: str, value: Any) -> Any:
    """The value as the operator takes it: numbers and arrays of numpy are numbers and lists."""
    kinds, words = _TYPES[declared]
    taken = value if isinstance(value, kinds) else _plain(value)
    if not isinstance(taken, kinds):
        raise TypeError(f"{name} must be {words}, got {value!r}")
    if isinstance(taken, list | tuple) and not _are_ints(taken):
        taken = [_plain(n) for n in taken]
        if not _are_ints(taken):
            raise TypeError(f"{name} must be three ints, got {value!r}")
    return taken


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else value


def _are_ints(values: Sequence[Any]) -> bool:
    return all(isinstance(n, int | torch.SymInt) for n in values)


_SCHEMA = ", ".join(f"{declared} {name}" for name, declared in _ARGUMENTS.items())


@torch.library.custom_op("jali::sparse_attention", mutates_args=(), schema=f"({_SCHEMA}) -> Tensor")
def _sparse_attention(*values: Any) -> Tensor:
    given: Any = SimpleNamespace(**dict(zip(_ARGUMENTS, values, strict=True)))
    _check_options(given)
    q, k, v = _heads_first(given.input_layout, given.q, given.k, given.v)
    _check_heads(q, given.head_num, given.input_layout)
    q_grid = _grid(given.latent_shape_q, given.txt_len, q, "latent_shape_q")
    k_grid = None
    if given.latent_shape_k is not None or k.shape[2] != q.shape[2]:
        k_grid = _grid(given.latent_shape_k, given.txt_len, k, "latent_shape_k")
    mask, scale, causal, backend = given.attn_mask, given.scale, given.is_causal, given.backend
    if given.sparse_type is None:
        out = _dense(q, k, v, mask, scale, causal, backend)
    else:
        real = _key_mask(mask, q.shape[0], k.shape[2])
        out = attend(
            q, k, v, method=_method(given), grid=q_grid, key_grid=k_grid, backend=backend,
            scale=scale, key_mask=real, causal=causal,
        ).out  # fmt: skip
    return _heads_first(given.input_layout, out)[0].contiguous()


@_sparse_attention.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _heads_first(layout: str, *tensors: Tensor) -> tuple[Tensor, ...]:
    """From the caller's layout to BNSD, or back: it is the same."""
    if layout == "BNSD":
        return tensors
    return tuple(x.transpose(1, 2) if x.dim() == 4 else x for x in tensors)


def _method(given: Any) -> Method:
    sparsity, size = given.sparsity, given.block_size
    if given.sparse_type == "rf_v2":
        return RfV2(sparsity, size, compat=given.compat)
    if given.sparse_type == "ada_bsa":
        own = given.cdf_threshold, given.keep_sink, given.keep_recent
        return AdaBsa(sparsity, *own, block_size=size, compat=given.compat)
    if given.sparse_type == "psa":
        return Psa().with_budget(1 - sparsity)
    return Entropy(Budget(1 - sparsity), k_block=size)


def _check_options(given: Any) -> None:
    kind = given.sparse_type
    if kind not in SPARSE_TYPES:
        known = ["None", *SPARSE_TYPES[1:]]
        raise ValueError(f"unknown sparse_type {kind!r}{suggest(str(kind), known)}")
    if given.inner_precise not in (0, 1):
        raise ValueError(
            f"inner_precise must be 0 or 1 (both use an fp32 softmax), got {given.inner_precise}"
        )
    check_share("sparsity", given.sparsity)
    check_share("cdf_threshold", given.cdf_threshold)
    for name, (default, owners) in _OPTIONS.items():
        value = getattr(given, name)
        if value != default and kind not in owners:
            raise ValueError(
                f"{name}={value!r} is an option of {' and '.join(map(str, owners))}, "
                f"not of sparse_type={kind!r}; leave it at {default!r}"
            )


def _check_heads(q: Tensor, head_num: int, layout: str) -> None:
    if head_num not in (1, q.shape[1]):
        raise ValueError(
            f"head_num={head_num}, but the tensor has {q.shape[1]} heads in layout {layout}; "
            f"check input_layout and head_num"
        )


def _grid(shape: Sequence[int] | None, text: int, x: Tensor, name: str) -> TokenGrid:
    heads, tokens = x.shape[1], x.shape[2]
    if text < 0 or text > tokens:
        raise ValueError(f"txt_len must be in 0..{tokens}, the number of tokens; got {text}")
    if shape is None:
        if text == tokens:
            return TokenGrid((Text(text),))
        shape = (1, 1, tokens - text)
    if len(shape) != 3:
        raise ValueError(f"{name} is [frames, height, width], got {list(shape)}")
    if any(n < 1 for n in shape) or math.prod(shape) + text != tokens:
        swapped = math.prod(shape) + text == heads
        hint = "; heads and tokens are swapped: transpose(1, 2), or the other input_layout"
        raise ValueError(
            f"{name} {list(shape)} and txt_len {text} make {math.prod(shape) + text} tokens, "
            f"but the tensor has {tokens}{hint * swapped}"
        )
    return TokenGrid.video(*shape, text=text, text_side="front")


def _key_mask(mask: Tensor | None, B: int, Sk: int) -> Tensor | None:
    if mask is None or is_key_mask(mask, B, Sk):
        return None if mask is None else mask.reshape(B, Sk)
    raise ValueError(
        f"attn_mask must be a bool mask of real keys, [{B}, {Sk}] or [{B}, 1, 1, {Sk}]; "
        f"got {mask.dtype} {list(mask.shape)} (sparse attention takes no other masks)"
    )


def is_key_mask(mask: Tensor, B: int, Sk: int) -> bool:
    """Whether a mask says which of Sk keys are real, to all queries alike."""
    return mask.dtype == torch.bool and tuple(mask.shape) in ((B, Sk), (B, 1, 1, Sk))


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool,
    backend: str,
) -> Tensor:  # fmt: skip
    """The stock operation. It alone also takes masks of query and key pairs."""
    (B, H, Sq, D), Sk = q.shape, k.shape[2]
    if mask is None or is_key_mask(mask, B, Sk):
        real = _key_mask(mask, B, Sk)
        return attend(
            q, k, v, method="dense", backend=backend, scale=scale, key_mask=real, causal=causal
        ).out
    fits = all(n in (1, m) for n, m in zip(mask.shape[::-1], (Sk, Sq, H, B), strict=False))
    if causal or mask.dim() > 4 or not fits or mask.dtype not in (torch.bool, q.dtype):
        raise ValueError(
            f"attn_mask must be bool or {q.dtype}, broadcastable to {[B, H, Sq, Sk]}, and not "
            f"causal as well; got {mask.dtype} {list(mask.shape)}"
        )
    mask = mask[(None,) * (4 - mask.dim())]
    # Keys that no query sees are padding, whatever they hold.
    hidden = (~mask if mask.dtype == torch.bool else mask == -torch.inf).all(2).all(1)
    padding = KeyPadding(mask=~hidden.expand(B, Sk))
    k, v = padding.zeroed(k), padding.zeroed(v)
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=check_scale(scale, D), enable_gqa=k.shape[1] != H
    )
