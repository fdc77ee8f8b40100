"""The whole data path: q, k, v to sparse attention."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from jali import checks
from jali.backends import Backend, check_name, choose, dense
from jali.methods import Dense, Method, Query, make_method
from jali.planning.plan import BlockPlan, full_plan
from jali.planning.site import Site
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import BlockLayout, Blocks, block_layout
from jali.tokens.padding import KeyPadding

HERE = Site()


@dataclass(frozen=True, eq=False)
class Attended:
    """What came of a call. Reading a plan's cost waits for the device; nothing else does.

    `plan` is what the method asked for, `executed` what the backend ran (coarser where it has
    larger blocks); both are None where the call was dense.
    """

    out: Tensor
    arranged_lse: Tensor | None = None  # log-sum-exps in the order of the plan
    plan: BlockPlan | None = None
    executed: BlockPlan | None = None
    backend: str = "stock"

    @functools.cached_property
    def lse(self) -> Tensor | None:
        """Log-sum-exps fp32 [B, H, Sq] in the caller's order; put there when someone asks."""
        if self.arranged_lse is None or self.plan is None:
            return self.arranged_lse
        return self.plan.layout.q.restore(self.arranged_lse)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: str | Method = "entropy",
    grid: TokenGrid | Sequence[int] | None = None,
    key_grid: TokenGrid | Sequence[int] | None = None,
    offset: int | None = None,
    site: Site = HERE,
    backend: str = "auto",
    scale: float | None = None,
    key_length: Tensor | Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    lse: bool = False,
) -> Attended:
    """Sparse attention. q [B, H, Sq, D], k and v [B, Hkv, Sk, D] -> out like q.

    `grid` says what the tokens are (none: one row of unknown geometry), `key_grid` the same of
    the keys where they are another sequence, and `offset` where the queries lie in it (a chunk in
    a cache). Keys beyond `key_length` [B] or outside `key_mask` [B, Sk] are not real. `lse=True`
    asks for the log-sum-exp [B, H, Sq] of dense calls too; sparse ones always have it.
    """
    check_name(backend)
    call = checks.check(
        q, k, v, grid, key_grid, offset, scale, key_length, key_mask, causal, make_method(method)
    )
    if not call.method.active(site, call.q_grid.tokens):
        return _dense(q, k, v, call, backend, causal, lse)
    return follow(way_of(call, call.method.at(site), backend, q.device), q, k, v, site)


class Way(NamedTuple):
    """How a sparse call goes: all that is known before any of its numbers is."""

    method: Method
    backend: Backend
    layout: BlockLayout
    executed: Blocks
    scale: float
    padding: KeyPadding | None
    causal: bool


def way_of(call: checks.Call, method: Method, backend: str, device: torch.device) -> Way:
    """The way of a checked call. Calls of the same values go the same way."""
    task = call.task
    chosen = choose(backend, task)
    blocks = method.blocks(chosen.preferred(task))
    layout = method.layout(call.q_grid, call.k_grid, call.offset, blocks, device)
    padding = call.padding and call.padding.arranged(layout.k)
    if padding is not None and padding.kind != task.padding:
        # The order scattered the padding: what knows lengths only cannot run this any more.
        chosen = choose(backend, replace(task, padding=padding.kind))
    executed = chosen.fitting(blocks, task)
    return Way(method, chosen, layout, executed, call.scale, padding, task.causal)


def follow(way: Way, q: Tensor, k: Tensor, v: Tensor, site: Site) -> Attended:
    """Rearrange, plan, attend, and put back."""
    method, backend, layout, blocks, scale, padding, causal = way
    q, k, values = layout.arrange(q, k, v)
    plan = method.plan(Query(q, k, layout, site, scale, padding, causal))
    executed = plan.coarsen(blocks)
    out_buffer = None if layout.q.index is None else q  # the rearranged copy has no other use
    out, lse = backend.attend(q, k, values(), executed, scale, padding, out_buffer)
    del q, k, values, out_buffer
    return Attended(layout.q.restore(out), lse, plan, executed, backend.name)


def _dense(
    q: Tensor, k: Tensor, v: Tensor, call: checks.Call, backend: str, causal: bool, lse: bool
) -> Attended:
    """Everything, in the caller's own order. The method `dense` means the stock operation; the
    dense calls of a sparse run take the fastest one."""
    # The stock operation counts causality from the first key, a chunk of a cache from its offset.
    if lse or (causal and call.offset):
        chosen = choose(backend, call.full_task)
        blocks = chosen.preferred(call.full_task)
        layout = block_layout(call.q_grid, call.k_grid, None, blocks, call.offset, q.device)
        whole = full_plan(layout, causal)
        out, found_lse = chosen.attend(q, k, v, whole, call.scale, call.padding)
        return Attended(out, found_lse, backend=chosen.name)
    if isinstance(call.method, Dense):
        return Attended(dense.stock(q, k, v, call.scale, call.padding, causal))
    out, name = dense.fastest(q, k, v, call.scale, call.full_task, call.padding, causal)
    return Attended(out, backend=name)
