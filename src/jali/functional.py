"""`sparse_attention(...)`: the tensor-level API, with the names and defaults of MindIE-SD."""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import NoneType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.attend import attend
from jali.checks import check_scale, check_tensors
from jali.methods import AdaBsa, Entropy, Method, Psa, RfV2
from jali.planning.budget import Budget
from jali.tokens.grid import Text, TokenGrid
from jali.value import check_share, suggest

LAYOUTS = ("BNSD", "BSND")
SPARSE_TYPES = (None, "rf_v2", "ada_bsa", "entropy", "psa")

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
        latent_shape_q, latent_shape_k: [frames, height, width]; without one, a single row.
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
        known = [p for p in sparse_attention.__code__.co_varnames if p not in ("unknown",)][:20]
        raise TypeError(f"sparse_attention has no option {name!r}{suggest(name, known)}")
    # The operator's own complaints would be RuntimeErrors about its schema.
    for kinds, what, given in (
        ((Tensor,), "a tensor", {"q": q, "k": k, "v": v}),
        ((Tensor, NoneType), "a tensor", {"attn_mask": attn_mask}),
        ((int, float, NoneType), "a number", {"scale": scale}),
        ((int, float), "a number", {"sparsity": sparsity, "cdf_threshold": cdf_threshold}),
        ((bool,), "a bool", {"is_causal": is_causal, "keep_sink": keep_sink,
                             "keep_recent": keep_recent, "compat": compat}),
        ((int, torch.SymInt), "an int", {"head_num": head_num, "inner_precise": inner_precise,
                                         "txt_len": txt_len, "block_size": block_size}),
        ((str,), "a word", {"input_layout": input_layout, "backend": backend}),
        ((str, NoneType), "a word", {"sparse_type": sparse_type}),
        ((list, tuple, NoneType), "[frames, height, width]",
         {"latent_shape_q": latent_shape_q, "latent_shape_k": latent_shape_k}),
    ):  # fmt: skip
        for name, value in given.items():
            if not isinstance(value, kinds):
                raise TypeError(f"{name} must be {what}, got {value!r}")
    for name, shape in (("latent_shape_q", latent_shape_q), ("latent_shape_k", latent_shape_k)):
        if shape is not None and not all(isinstance(n, int | torch.SymInt) for n in shape):
            raise TypeError(f"{name} must be three ints, got {shape!r}")
    check_tensors(q, k, v)
    return torch.ops.jali.sparse_attention(
        q, k, v, attn_mask, scale, is_causal, head_num, input_layout, inner_precise, sparse_type,
        txt_len, block_size, latent_shape_q, latent_shape_k, keep_sink, keep_recent,
        cdf_threshold, sparsity, compat, backend,
    )  # fmt: skip


@torch.library.custom_op("jali::sparse_attention", mutates_args=())
def _sparse_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    scale: float | None,
    is_causal: bool,
    head_num: int,
    input_layout: str,
    inner_precise: int,
    sparse_type: str | None,
    txt_len: int,
    block_size: int,
    latent_shape_q: Sequence[int] | None,
    latent_shape_k: Sequence[int] | None,
    keep_sink: bool,
    keep_recent: bool,
    cdf_threshold: float,
    sparsity: float,
    compat: bool,
    backend: str,
) -> Tensor:
    given = {
        "keep_sink": keep_sink,
        "keep_recent": keep_recent,
        "cdf_threshold": cdf_threshold,
        "compat": compat,
        "block_size": block_size,
    }
    _check_options(sparse_type, input_layout, inner_precise, sparsity, given)
    if input_layout == "BSND":
        q, k, v = (x.transpose(1, 2) if x.dim() == 4 else x for x in (q, k, v))
    check_tensors(q, k, v)
    _check_heads(q, head_num, input_layout)
    q_grid = _grid(latent_shape_q, txt_len, q.shape[2], "latent_shape_q")
    k_grid = None
    if latent_shape_k is not None or k.shape[2] != q.shape[2]:
        k_grid = _grid(latent_shape_k, txt_len, k.shape[2], "latent_shape_k")
    if sparse_type is None:
        out = _dense(q, k, v, attn_mask, scale, is_causal, backend)
    else:
        out = attend(
            q,
            k,
            v,
            method=_method(sparse_type, 1 - sparsity, given),
            grid=q_grid,
            key_grid=k_grid,
            backend=backend,
            scale=scale,
            key_mask=_key_mask(attn_mask, q.shape[0], k.shape[2]),
            causal=is_causal,
        ).out
    if input_layout == "BSND":
        out = out.transpose(1, 2)
    return out.contiguous()


@_sparse_attention.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _method(sparse_type: str, budget: float, given: dict[str, Any]) -> Method:
    sparsity, size = 1 - budget, given["block_size"]
    if sparse_type == "rf_v2":
        return RfV2(sparsity=sparsity, block_size=size, compat=given["compat"])
    if sparse_type == "ada_bsa":
        return AdaBsa(
            sparsity=sparsity,
            cdf_threshold=given["cdf_threshold"],
            keep_sink=given["keep_sink"],
            keep_recent=given["keep_recent"],
            block_size=size,
            compat=given["compat"],
        )
    if sparse_type == "psa":
        return Psa().with_budget(budget)
    return Entropy(Budget(budget), k_block=size)


def _check_options(
    sparse_type: str | None,
    layout: str,
    inner_precise: int,
    sparsity: float,
    given: dict[str, Any],
) -> None:
    if layout not in LAYOUTS:
        raise ValueError(f"input_layout must be 'BNSD' or 'BSND', got {layout!r}")
    if sparse_type not in SPARSE_TYPES:
        known = ["None", *SPARSE_TYPES[1:]]
        raise ValueError(f"unknown sparse_type {sparse_type!r}{suggest(str(sparse_type), known)}")
    if inner_precise not in (0, 1):
        raise ValueError(
            f"inner_precise must be 0 or 1 (both use an fp32 softmax), got {inner_precise}"
        )
    check_share("sparsity", sparsity)
    check_share("cdf_threshold", given["cdf_threshold"])
    for name, (default, owners) in _OPTIONS.items():
        if given[name] != default and sparse_type not in owners:
            raise ValueError(
                f"{name}={given[name]!r} is an option of {' and '.join(map(str, owners))}, "
                f"not of sparse_type={sparse_type!r}; leave it at {default!r}"
            )


def _check_heads(q: Tensor, head_num: int, layout: str) -> None:
    if head_num not in (1, q.shape[1]):
        raise ValueError(
            f"head_num={head_num}, but the tensor has {q.shape[1]} heads in layout {layout}; "
            f"check input_layout and head_num"
        )


def _grid(shape: Sequence[int] | None, text: int, tokens: int, name: str) -> TokenGrid:
    if text < 0 or text > tokens:
        raise ValueError(f"txt_len must be in 0..{tokens}, the number of tokens; got {text}")
    if shape is None:
        if text == tokens:
            return TokenGrid((Text(text),))
        shape = (1, 1, tokens - text)
    if len(shape) != 3:
        raise ValueError(f"{name} is [frames, height, width], got {list(shape)}")
    if any(n < 1 for n in shape) or math.prod(shape) + text != tokens:
        raise ValueError(
            f"{name} {list(shape)} and txt_len {text} make {math.prod(shape) + text} tokens, "
            f"but the tensor has {tokens}"
        )
    return TokenGrid.video(*shape, text=text, text_side="front")


def _key_mask(mask: Tensor | None, B: int, Sk: int) -> Tensor | None:
    if mask is None or _is_key_mask(mask, B, Sk):
        return None if mask is None else mask.reshape(B, Sk)
    raise ValueError(
        f"attn_mask must be a bool mask of real keys, [{B}, {Sk}] or [{B}, 1, 1, {Sk}]; "
        f"got {mask.dtype} {list(mask.shape)} (sparse attention takes no other masks)"
    )


def _is_key_mask(mask: Tensor, B: int, Sk: int) -> bool:
    return mask.dtype == torch.bool and tuple(mask.shape) in ((B, Sk), (B, 1, 1, Sk))


def _dense(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None, causal: bool,
    backend: str,
) -> Tensor:  # fmt: skip
    """The stock operation. It alone also takes masks of query and key pairs."""
    (B, H, Sq, D), Sk = q.shape, k.shape[2]
    if mask is None or _is_key_mask(mask, B, Sk):
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
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, scale=check_scale(scale, D), enable_gqa=k.shape[1] != H
    )
