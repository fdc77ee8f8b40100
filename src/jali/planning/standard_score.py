"""How far a key block's product with a query block lies above its row's mean: Sol-Attn's score."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jali.planning.cost import read_sizes
from jali.planning.scoring import mean_pair, products
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding

LEAST = 1e-6 * math.log(2) ** 2  # added to variances: 1e-6 of logits in base 2


def standard_scores(
    q: Tensor,
    k: Tensor,
    layout: BlockLayout,
    scale: float,
    padding: KeyPadding | None = None,
    exact: bool = False,
) -> Tensor:
    """Products of block means, less their row's mean, in standard deviations of the row. fp32
    [B, H, M, N], −inf for blocks without a real key.

    The deviation is that of the products themselves (`exact`), or what it would be if the
    dimensions of the key means were independent of one another.
    """
    q_mean, k_mean = mean_pair(q, k, layout, padding)
    real = (read_sizes(layout, (1,), padding)[0] > 0)[:, None, :, None]  # [B|1, 1, N, 1]
    weight = real / real.sum(2, keepdim=True).clamp_min(1)
    # A shift of all key means moves all logits of a row alike; without it sums stay small.
    k_mean = k_mean - (k_mean * weight).sum(2, keepdim=True)
    z = products(q_mean * scale, k_mean)
    if exact:
        variance = (z.square() * weight.mT).sum(-1, keepdim=True)
    else:
        spread = (k_mean.square() * weight).sum(2, keepdim=True)
        variance = products((q_mean * scale).square(), spread)
    return (z * (variance + LEAST).rsqrt()).masked_fill_(~real.mT, -torch.inf)
