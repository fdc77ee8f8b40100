"""The operators a compiled model sees: one attends, one tells the run about a call, and one asks
it in which order ranks get heads.

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
    from jali.integration.autoregressive import ChunkState
    from jali.integration.run import Run

_runs: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count()


def number_of(run: Run | ChunkState) -> Tensor:
    """A number by which operators find the run while it lives, as a 0-d CPU tensor."""
    number = next(_numbers)
    _runs[number] = run
    return torch.tensor(number)


def _run(number: Tensor) -> Any:
    run = _runs.get(int(number))
    if run is None:
        raise RuntimeError(
            "this attention belongs to a sparse run that is over; apply sparse attention again"
        )
    return run


# Defined by hand: `torch.library.custom_op` spends 20 µs a call on what is not needed here, and a
# model calls this once for every layer.
_library = torch.library.Library("jali", "FRAGMENT")
_library.define(
    "attend(Tensor q, Tensor k, Tensor v, Tensor? mask, float? scale, Tensor run, Tensor index, "
    "int ranks, int rank) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_fixed_stride_order),
)
attend = torch.ops.jali.attend.default
"""q, k, v [B, S, H, D] -> like q. `index` counts the self-attentions of the run; with several
`ranks`, this one (`rank`) has its share of the heads and the whole sequence."""


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scale: float | None,
    run: Tensor,
    index: Tensor,
    ranks: int,
    rank: int,
) -> Tensor:
    out = _run(run).attend(int(index), q, k, v, mask, scale, ranks, rank)
    out = out.contiguous()
    # An operator may not hand back its input (a stock attention of one key can).
    return out.clone() if out.data_ptr() == v.data_ptr() else out


class _NoBackward(torch.autograd.Function):
    """Forward works where gradients are on (weights ask for them by default); backward raises."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:  # noqa: ARG004
        with torch._C._AutoDispatchBelowAutograd():
            out: Tensor = attend(*given)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # noqa: ARG004
        raise RuntimeError("jali only does inference: sparse attention has no backward pass")


def _autograd(q: Tensor, k: Tensor, v: Tensor, *more: Any) -> Tensor:
    out: Tensor
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        out = _NoBackward.apply(q, k, v, *more)  # type: ignore[no-untyped-call]
        return out
    with torch._C._AutoDispatchBelowAutograd():
        out = attend(q, k, v, *more)
    return out


def _shape(q: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def dealt_order(q: Tensor, run: Tensor, index: Tensor) -> Tensor | None:
    """The heads of q [B, S, H, D] in the order in which ranks get them; None as they are. A graph
    has one order for both."""
    if torch.compiler.is_compiling():
        order: Tensor = torch.ops.jali.dealt_order.default(q, run, index)
        return order
    found: Tensor | None = _run(run).dealt_order(int(index))
    return found


_library.define(
    "dealt_order(Tensor q, Tensor run, Tensor index) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag,),
)


def _dealt_order(q: Tensor, run: Tensor, index: Tensor) -> Tensor:
    found: Tensor | None = _run(run).dealt_order(int(index))
    return torch.arange(q.shape[2], device=q.device) if found is None else found.clone()


def _as_many_as_heads(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[2], dtype=torch.int64)


_library.impl("dealt_order", _dealt_order, "CompositeExplicitAutograd")
torch.library.register_fake("jali::dealt_order", _as_many_as_heads, lib=_library)
_library.impl("attend", _attend, "CompositeExplicitAutograd")
_library.impl("attend", _autograd, "Autograd")
torch.library.register_fake("jali::attend", _shape, lib=_library)


@torch.library.custom_op("jali::observe", mutates_args=())
def observe(
    timestep: Tensor, run: Tensor, transformer: int, numbers: list[int], tensors: list[Tensor]
) -> Tensor:
    """Tell the run that this transformer of it begins a call. Returns the timestep, so that a graph
    cannot drop the call, nor attend before it."""
    _run(run).begin(transformer, timestep, numbers, tensors)
    return timestep.clone()


@observe.register_fake
def _(timestep: Tensor, *_: Any) -> Tensor:
    return torch.empty_like(timestep)
