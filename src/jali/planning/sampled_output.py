"""How far the output of a few rows moves where they see only some keys."""

from __future__ import annotations

import torch
from torch import Tensor

from jali.planning.distortion import numbers_at_once
from jali.planning.scoring import at_least_fp32
from jali.tokens.padding import KeyPadding

PART = 1024


def squared_errors(
    q: Tensor, k: Tensor, v: Tensor, scale: float, seen: Tensor, padding: KeyPadding | None = None
) -> Tensor:
    """Mean squared error of the rows q [B, H, R, D] under each of the masks `seen` bool [K, R, Sk],
    over the query heads of every key head. fp32 [K, B, Hkv]."""
    B, H, R, _ = q.shape
    kv, Sk = k.shape[1:3]
    share = H // kv
    rows = q.unflatten(1, (kv, share)).flatten(2, 3)  # [B, Hkv, share · R, D]
    errors = rows.new_empty(len(seen), B, kv, dtype=torch.promote_types(q.dtype, torch.float32))
    each = max(1, numbers_at_once(q.device) // (B * share * R * Sk))
    for start in range(0, kv, each):
        some = slice(start, start + each)
        keys, values = at_least_fp32(k[:, some]), at_least_fp32(v[:, some])
        logits = at_least_fp32(rows[:, some]) * scale @ keys.mT
        if padding is not None:
            logits.masked_fill_(~padding.valid(Sk)[:, None, None], -torch.inf)
        weight = logits.softmax(-1).nan_to_num_(0.0)
        exact = long_product(weight, values)
        for error, mask in zip(errors, seen, strict=True):
            left = (weight.unflatten(2, (share, R)) * mask).flatten(2, 3)
            total = left.sum(-1, keepdim=True).clamp_min(torch.finfo(left.dtype).tiny)
            error[:, some] = (long_product(left, values) / total - exact).square().mean((2, 3))
    return errors


def long_product(weight: Tensor, values: Tensor) -> Tensor:
    """weight @ values over many keys, in parts: few rows leave most of a GPU without work."""
    keys = values.shape[-2]
    whole = keys // PART * PART
    parts = weight[..., :whole].unflatten(-1, (-1, PART)).transpose(-3, -2)
    product = (parts @ values[..., :whole, :].unflatten(-2, (-1, PART))).sum(-3)
    return product + weight[..., whole:] @ values[..., whole:, :]
