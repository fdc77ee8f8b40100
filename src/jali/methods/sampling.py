"""Where to sample tokens: spread over a block, at random inside each stretch of it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jali.site import Site


def jittered_positions(
    tokens: int, block: int, per_block: int, seed: int, site: Site, device: torch.device
) -> Tensor:
    """One token out of each of `per_block` equal stretches of every block. int64 [blocks, P].

    The choice follows from (seed, layer, step) alone: neither the global generator nor earlier
    calls matter, and every block draws its own offsets, so structure cannot alias with them.
    """
    return _positions(tokens, block, per_block, seed, site.layer, site.step, torch.device(device))


# A pipeline asks for the same positions once per guidance branch.
@functools.lru_cache(maxsize=128)
def _positions(
    tokens: int,
    block: int,
    per_block: int,
    seed: int,
    layer: int,
    step: int,
    device: torch.device,
) -> Tensor:
    start = torch.arange(0, tokens, block)
    size = (tokens - start).clamp_max(block)[:, None]
    generator = torch.Generator().manual_seed(hash((seed, layer, step)) % 2**63)
    jitter = torch.rand(len(start), per_block, generator=generator, dtype=torch.float64)
    stretch = (torch.arange(per_block) + jitter) / per_block
    return (start[:, None] + (stretch * size).long().clamp_max(size - 1)).to(device)
