"""The two operators a compiled model sees: one attends, one tells the run about a call.

Python state is found by the run's number, a 0-d CPU tensor: read as a number inside the body it
waits for nothing, and as a graph input it makes no layer different from another, so blocks
compile once.
"""

from __future__ import annotations

import itertools
import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from jali.integration.run import Run

_runs: weakref.WeakValueDictionary[int, Run] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def enter(run: Run) -> Tensor:
    """A number for the run, as a 0-d CPU tensor."""
    number = next(_numbers)
    _runs[number] = run
    return torch.tensor(number)


def _run(number: Tensor) -> Run:
    run = _runs.get(int(number))
    if run is None:
        raise RuntimeError(
            "this attention belongs to a sparse run that is over; apply sparse attention again"
        )
    return run


@torch.library.custom_op("jali::attend", mutates_args=())
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    run: Tensor,
    place: Tensor,
    ranks: int,
    rank: int,
) -> Tensor:
    """q, k, v [B, S, H, D] -> like q. `place` counts the self-attentions of the run; with several
    `ranks`, this one (`rank`) has its share of the heads and the whole sequence."""
    out = _run(run).attend(int(place), q, k, v, mask, scale, ranks, rank)
    out = out.contiguous()
    # An operator may not hand back its input (a stock attention of one key can).
    return out.clone() if out.data_ptr() == v.data_ptr() else out


@attend.register_fake
def _(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


@torch.library.custom_op("jali::observe", mutates_args=())
def observe(
    timestep: Tensor, run: Tensor, stage: int, numbers: list[int], tensors: list[Tensor]
) -> Tensor:
    """Tell the run that transformer `stage` begins a call. Returns the timestep, so that a graph
    cannot drop the call, nor attend before it."""
    _run(run).begin(stage, timestep, numbers, tensors)
    return timestep.clone()


@observe.register_fake
def _(timestep: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(timestep)
