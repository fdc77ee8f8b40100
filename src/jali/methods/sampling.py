"""Where to sample tokens: spread over a block, at random inside each stretch of it."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from jali.planning.site import Site


def jittered_positions(
    tokens: int, block: int, per_block: int, seed: int, site: Site, device: torch.device
) -> Tensor:
    """One token out of each of `per_block` equal stretches of every block. int64 [blocks, P].

    The choice follows from (seed, layer, step) alone: neither the global generator nor earlier
    calls matter, and every block draws its own offsets, so structure cannot alias with them.
    """
    drawn = _of_all_layers(tokens, block, per_block, seed, site.step, site.layers, device)
    return drawn[site.layer]


# For all layers of a step at once: a copy to a GPU waits for all that is under way there. Guidance
# branches share a step; what is kept is some megabytes a step for a long video.
@functools.lru_cache(maxsize=8)
def _of_all_layers(
    tokens: int, block: int, per_block: int, seed: int, step: int, layers: int, device: torch.device
) -> tuple[Tensor, ...]:
    start = torch.arange(0, tokens, block)
    size = (tokens - start).clamp_max(block)[:, None]
    jitter = torch.empty(layers, len(start), per_block, dtype=torch.float64)
    for layer in range(layers):
        generator = torch.Generator().manual_seed(hash((seed, layer, step)) % 2**63)
        jitter[layer].uniform_(generator=generator)
    stretch = (torch.arange(per_block) + jitter) / per_block
    found = start[:, None] + (stretch * size).long().clamp_max(size - 1)
    return found.to(device).unbind()
