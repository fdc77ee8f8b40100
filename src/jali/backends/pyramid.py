"""Pooled keys and values: what a level above 1 reads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.tokens.padding import KeyPadding


def pool(
    k: Tensor, v: Tensor, ratio: int, padding: KeyPadding | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Means of every `ratio` neighbouring real keys and values, and the number of these.

    k, v [B, Hkv, S, D] -> [B, Hkv, G, D] twice, and int64 [B|1, G] with G = ⌈S / ratio⌉. A pooled
    key stands for as many keys as are real behind it, so the tail needs no padding. What is not
    real must be 0: see `KeyPadding.zeroed`.
    """
    S = k.shape[2]
    groups = -(-S // ratio)
    missing = groups * ratio - S
    if padding is None:
        real = torch.ones(1, S, dtype=torch.bool, device=k.device)
    else:
        real = padding.valid(S)
    if ratio == 1:
        return k, v, real.long()
    count = F.pad(real, (0, missing)).unflatten(1, (groups, ratio)).sum(-1)
    means = []
    for x in (k, v):
        exact = x if x.dtype == torch.float64 else x.float()
        if missing:
            exact = F.pad(exact, (0, 0, 0, missing))
        grouped = exact.unflatten(2, (groups, ratio))
        real_count = count.clamp_min(1)[:, None, :, None]
        mean = grouped.sum(3) / real_count
        if not mean.sum().isfinite():  # near the end of the range only parts can be added
            mean = (grouped / ratio).sum(3) / (real_count / ratio)
        means.append(mean.to(x.dtype))
    return means[0], means[1], count
