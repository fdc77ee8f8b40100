"""One book out of two: the mean over the prompts of both."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from jali.maskbook.write import write_book

if TYPE_CHECKING:
    from jali.maskbook.book import MaskBook


def merge(
    book: MaskBook,
    other: MaskBook,
    output: str | os.PathLike[str] | None,
    device: torch.device | str = "cpu",
) -> MaskBook:
    """See `MaskBook.merge`."""
    a, b = book.header, other.header
    for one in (book, other):
        one._need_importance("it cannot be merged")
    _check_same(book, other)
    twice = set(a.prompts) & set(b.prompts)
    if twice:
        raise ValueError(
            f"{len(twice)} of the prompts are in both books and would count twice; merge books of "
            f"different prompts or seeds"
        )
    new = replace(
        a,
        budgets=tuple(sorted({*a.budgets, *b.budgets})),
        prompts=(*a.prompts, *b.prompts),
        costs=(),
        importance_error=None,
        history=(*a.history, f"merged: {len(a.prompts)} prompts and {len(b.prompts)} more"),
    )
    share = len(a.prompts) / len(new.prompts) if new.prompts else 0.5

    def slab(step: int, layer: int) -> Tensor:
        return torch.stack(
            [
                torch.lerp(
                    other.importance(step, layer, branch),
                    book.importance(step, layer, branch),
                    share,
                )
                for branch in a.branches
            ]
        )

    return write_book(output, new, slab, device)


def _check_same(book: MaskBook, other: MaskBook) -> None:
    """Refuse books that do not speak of the same blocks, naming both values."""
    a, b = book.header, other.header
    if set(a.fingerprints) != set(b.fingerprints):
        raise ValueError(
            f"one book is of {sorted(a.fingerprints)}, one of {sorted(b.fingerprints)}"
        )
    for name, mark in a.fingerprints.items():
        found = b.fingerprints[name]
        problem = mark.other_model(found) or mark.other_weights(found)
        if problem:
            raise ValueError(f"these are books of two models: {problem}")
    pairs = {
        "grid": (str(a.grid), str(b.grid)),
        "blocks": (str(a.blocks), str(b.blocks)),
        "order": (a.order, b.order),
        "steps": (a.steps, b.steps),
        "layers": (a.layers, b.layers),
        "heads": (a.heads, b.heads),
        "branches": (a.branches, b.branches),
        "scorer": (a.scorer, b.scorer),
        "sharpness": (a.sharpness, b.sharpness),
        "transformers": (a.transformers, b.transformers),
        "noise_kind": (a.noise_kind, b.noise_kind),
    }
    for name, (mine, theirs) in pairs.items():
        if mine != theirs:
            hint = "; resample one of them first" if name in ("grid", "blocks", "steps") else ""
            raise ValueError(f"{name} is {mine} in one book and {theirs} in the other{hint}")
    if not np.allclose(a.noise, b.noise, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"the steps are at other noise levels: {a.noise[0]:.4g}…{a.noise[-1]:.4g} and "
            f"{b.noise[0]:.4g}…{b.noise[-1]:.4g}; resample one of them with the other's levels"
        )
