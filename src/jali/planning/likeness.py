"""How alike the tokens of a block are: whether its mean says what is in it."""

from __future__ import annotations

import torch
from torch import Tensor

from jali.planning.cost import read_sizes
from jali.planning.distortion import numbers_at_once
from jali.planning.scoring import block_means
from jali.tokens.layout import BlockLayout
from jali.tokens.padding import KeyPadding


def block_likeness(
    x: Tensor, block: int, valid: Tensor | None = None, centred: bool = False
) -> Tensor:
    """Mean cosine over all pairs of real tokens of each block, a token with itself included.
    [B, H, S, D] -> fp32 [B, H, blocks], 0 for a block without a real token.

    `valid` bool [B, S] says which tokens are real; `centred` takes their mean away from all first.
    The mean over pairs is the squared length of the mean unit vector.
    """
    each = max(1, numbers_at_once(x.device) // (x.shape[0] * x.shape[2] * x.shape[3]))
    found = []
    dtype = torch.promote_types(x.dtype, torch.float32)
    for part in x.split(each, dim=1):
        # A factor in fp32 makes the product so: the part itself is never copied for that.
        tokens = part if valid is None else part.masked_fill(~valid[:, None, :, None], 0)
        if centred:
            tokens = tokens - block_means(part, part.shape[2], valid)
        length = torch.linalg.vector_norm(tokens, dim=-1, keepdim=True, dtype=dtype)
        unit = tokens * length.clamp_min_(1e-12).reciprocal_()
        found.append(block_means(unit, block, valid).square().sum(-1))
    return torch.cat(found, dim=1)


def pair_likeness(
    q: Tensor, k: Tensor, layout: BlockLayout, padding: KeyPadding | None = None
) -> tuple[Tensor, Tensor]:
    """That of query blocks, of key blocks where all keys are less their mean, in every head: fp32
    [B, H, M, 1], [B, H, 1, N]. What holds no real key is alike."""
    valid = None if padding is None else padding.valid(layout.k.tokens)
    rows = block_likeness(q, layout.blocks.q)
    keys = block_likeness(k, layout.blocks.k, valid, centred=True)
    empty = read_sizes(layout, (1,), padding)[0] == 0
    keys = keys.masked_fill(empty[:, None], 1)
    keys = keys.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    return rows[..., None], keys[:, :, None]
