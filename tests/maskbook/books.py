"""Made-up books."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from jali.maskbook import Fingerprint, Header, MaskBook, write_book
from jali.maskbook.error_book import ErrorBook
from jali.maskbook.header import Errors
from jali.planning import plan as levels
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Raster

SMALL = Header(
    fingerprints={"transformer": Fingerprint("WanTransformer3DModel", "0" * 64, {"w": (0.5, -1)})},
    grid=TokenGrid.video(3, 4, 9),
    order=Raster(),
    blocks=Blocks(16, 8),
    layers=2,
    heads=3,
    noise=(1.0, 0.8, 0.5, 0.1),
    noise_kind="sigma",
    transformers=("transformer",) * 4,
    branches=("mean",),
    budgets=(0.3, 0.5),
    prompts=("a" * 32,),
    jali="0.1.0",
)


def slabs(header: Header, seed: int = 0) -> torch.Tensor:
    """Importance [steps, layers, branches, H, M, N] whose rows sum to 1, some heads sharper."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(header.steps, header.layers, *header.slab, generator=g)
    sharp = 1 + 3 * torch.rand(header.steps, header.layers, *header.slab[:2], 1, 1, generator=g)
    return (logits * sharp).softmax(-1)


def make(
    path: Path | None = None, header: Header = SMALL, seed: int = 0, **changes: Any
) -> MaskBook:
    header = replace(header, **changes)
    x = slabs(header, seed)
    return write_book(path, header, lambda step, layer: x[step, layer])


# Of rd: 4 steps in 3 parts of a run.
OF_RD = replace(
    SMALL, budgets=(), importance=False, errors=Errors((2, 4, 8, levels.MEAN, levels.SKIP), 0.3)
)


def errors(header: Header, seed: int = 0) -> torch.Tensor:
    """Errors [places, layers, branches, H, M, N, L], larger the coarser the level; some are 0."""
    g = torch.Generator().manual_seed(seed)
    found = torch.randn(*header.outer, *header.slab, generator=g).mul(3).exp()
    found = found.sort(-1).values
    return found * (torch.rand(*found.shape[:-1], 1, generator=g) > 0.1)


def make_errors(
    path: Path | None = None, header: Header = OF_RD, seed: int = 0, **changes: Any
) -> ErrorBook:
    header = replace(header, **changes)
    x = errors(header, seed)
    made = write_book(path, header, lambda place, layer: x[place, layer])
    assert isinstance(made, ErrorBook)
    return made
