"""How large a book of rd will be, told before anything slow."""

from __future__ import annotations

import math
from dataclasses import replace

from jali.integration.models.registry import model_card
from jali.maskbook.header import Errors
from jali.tokens.layout import Blocks

LIMIT = 64 * 2**30  # bytes of a file


def parts_of_run(errors: Errors, steps: int, transformers: int) -> int:
    """How many tables a layer has at most: one more for every transformer that takes over in the
    middle of a part."""
    return len({errors.bucket(step, steps) for step in range(steps)}) + transformers - 1


def expected_bytes(
    model: str,
    errors: Errors,
    blocks: Blocks,
    branches: str = "mean",
    steps: int | None = None,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
) -> int:
    """Of all errors of a book for a model of the registry, a byte each; the file has little
    besides. Needs no weights."""
    card = model_card(model)
    at = replace(
        card, height=height or card.height, width=width or card.width,
        frames=num_frames or card.frames,
    )  # fmt: skip
    pairs = math.prod(-(-at.tokens // block) for block in (blocks.q, blocks.k))
    heads = sum(card.layers) * card.heads * (2 if branches == "separate" else 1)
    parts = parts_of_run(errors, steps or card.steps, card.experts)
    return pairs * len(errors.levels) * heads * parts


def check_limit(size: int) -> None:
    """Refuse a book that nobody can want."""
    if size > LIMIT:
        raise ValueError(
            f"the book would have {size / 1e9:,.0f} GB, and eight times as much would lie beside "
            f"it while it is made; at most {LIMIT / 1e9:.0f} GB are allowed: take larger blocks, "
            f"fewer levels, a larger keep, or branches='mean'"
        )
