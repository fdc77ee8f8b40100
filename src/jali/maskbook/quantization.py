"""Importance in 8 bits: how many times smaller than the largest of its row, in even steps.

What decides a plan is the order of small numbers, which a linear code would round to nothing. In a
logarithmic one every value keeps the same relative error, down to a millionth of the row's largest.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

STEPS = 254  # codes 1..255; 0 is nothing
OCTAVES = 20.0
# Half a step, as a factor: no value above 2⁻²⁰ of its row's largest is off by more.
ERROR = 2.0 ** (OCTAVES / STEPS / 2) - 1.0


def quantize(importance: Tensor) -> tuple[Tensor, Tensor]:
    """fp32 [..., N] >= 0 -> codes uint8 [..., N] and the rows' largest values fp32 [...]."""
    peak = importance.amax(-1)
    below = -torch.log2(importance / peak.clamp_min(torch.finfo(torch.float32).tiny)[..., None])
    code = 255 - (below * (STEPS / OCTAVES)).round()  # −inf where there is nothing
    return code.clamp(0, 255).nan_to_num(0).to(torch.uint8), peak


def dequantize(code: Tensor, peak: Tensor) -> Tensor:
    """The other way. fp32 [..., N]."""
    return _values(code.device)[code.int()] * peak[..., None]


@functools.lru_cache(maxsize=8)
def _values(device: torch.device) -> Tensor:
    code = torch.arange(256, dtype=torch.float64)
    value = torch.exp2((code - 255) * (OCTAVES / STEPS))
    value[0] = 0
    return value.float().to(device)
