"""One book out of two: the mean over the prompts of both."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from jali.maskbook.container import FilePath
from jali.maskbook.header import Header
from jali.maskbook.write import write_book

if TYPE_CHECKING:
    from jali.maskbook.book import MaskBook

# What two books must have in common, and of it what resampling can change.
SAME = (
    "grid", "blocks", "order", "steps", "layers", "heads", "branches", "scorer", "sharpness",
    "transformers", "noise_kind", "errors",
)  # fmt: skip
RESAMPLED = ("grid", "blocks", "steps")


def merge(
    book: MaskBook, other: MaskBook, output: FilePath | None, device: torch.device | str
) -> MaskBook:
    """See `MaskBook.merge`."""
    a, b = book.header, other.header
    for one in (book, other):
        if one.header.errors is None:
            one.need_importance("it cannot be merged")
    if a.format != b.format:
        raise ValueError("one of the books holds importance, the other one the errors of rd")
    _check_same(a, b)
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
        return other.slab(step, layer).lerp(book.slab(step, layer), share)

    return write_book(output, new, slab, device)


def _check_same(a: Header, b: Header) -> None:
    """Refuse books that do not speak of the same blocks, naming both values."""
    if set(a.fingerprints) != set(b.fingerprints):
        raise ValueError(f"one book is of {[*a.fingerprints]}, one of {[*b.fingerprints]}")
    for name, known in a.fingerprints.items():
        found = b.fingerprints[name]
        problem = known.other_model(found) or known.other_weights(found)
        if problem:
            raise ValueError(f"these are books of two models: {problem}")
    for name in SAME:
        mine, theirs = getattr(a, name), getattr(b, name)
        if mine != theirs:
            can = name in RESAMPLED and a.errors is None
            hint = "; resample one of them first" if can else ""
            raise ValueError(f"{name} is {mine} in one book and {theirs} in the other{hint}")
    if not np.allclose(a.noise, b.noise, rtol=1e-3, atol=1e-6):
        raise ValueError(
            f"the steps are at other noise levels: {a.noise[0]:.4g}…{a.noise[-1]:.4g} and "
            f"{b.noise[0]:.4g}…{b.noise[-1]:.4g}; resample one of them with the other's levels"
        )
