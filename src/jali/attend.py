"""The whole data path: q, k, v to sparse attention.

    check_call ─▶ prepare ─▶ PreparedCall.run ─▶ Attended
                                ├ query    q and k in the layout's order
                                ├ plan     which blocks are read: the method decides
                                ├ attend   the backend's kernel
                                └ correct  by a few dense rows, where the method has probes

Everything that plans or attends comes through here: `attend`, a diffusers run, a calibration, and
what `jali inspect` judges.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from jali.backends import Backend, check_name, choose, dense
from jali.checks import Call, check_call, check_padding, check_tensors
from jali.correction import correct, correction_share, probe
from jali.methods import Dense, Method, Query, make_method
from jali.planning.plan import BlockPlan, full_plan
from jali.planning.site import Site
from jali.planning.tables import Tables
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import BlockLayout, Blocks, block_layout
from jali.tokens.order import PerHead
from jali.tokens.padding import KeyPadding

ONE_CALL = Site()


@dataclass(frozen=True, eq=False)
class Attended:
    """What came of a call. Reading a plan's cost waits for the device; nothing else does.

    `out` is like q. `plan` is what the method asked for, `executed` what the backend ran (coarser
    where it has larger blocks); both are None where the call was dense. `backend` is the name of
    the backend that ran, "stock" for PyTorch's own attention.
    """

    out: Tensor
    arranged_lse: Tensor | None = None  # log-sum-exps in the order of the plan
    plan: BlockPlan | None = None
    executed: BlockPlan | None = None
    backend: str = "stock"
    planning: float = 0.0  # the arithmetic of the plan, as a share of dense attention's

    @functools.cached_property
    def lse(self) -> Tensor | None:
        """Log-sum-exps fp32 [B, H, Sq] in the caller's order; put there when someone asks."""
        if self.arranged_lse is None or self.plan is None:
            return self.arranged_lse
        return self.plan.restore(self.arranged_lse)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    method: str | Method = "entropy",
    grid: TokenGrid | Sequence[int] | None = None,
    key_grid: TokenGrid | Sequence[int] | None = None,
    offset: int | None = None,
    site: Site = ONE_CALL,
    backend: str = "auto",
    scale: float | None = None,
    key_length: Tensor | Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    causal: bool = False,
    lse: bool = False,
    tables: Tables | None = None,
) -> Attended:
    """Attention of q [B, H, Sq, D] over k and v [B, Hkv, Sk, D], sparse by a method.

    Args:
        q, k, v: one device, one dtype (fp16, bf16, fp32 or fp64), no gradients. H is a multiple
            of Hkv.
        method: the name of one of `jali.methods.METHODS` with its defaults ("entropy", "rd", "psa",
            …), or a `Method` such as `Entropy(Budget(0.3))`.
        grid: what the tokens are: a `TokenGrid`, or (frames, height, width). None: one row of
            unknown geometry.
        key_grid: the same of the keys, where they are another sequence.
        offset: where the first query lies among the keys (a chunk of a cache).
        site: step and layer of the call, for schedules and seeded samples.
        backend: "auto" takes the fastest that can run this; a name never falls back.
        scale: of the logits; None is D ** -0.5.
        key_length: int [B], the first keys of each sample that are real.
        key_mask: bool [B, Sk], True where a key is real; one of the two.
        causal: hide keys after a query.
        lse: also of a dense call the log-sum-exp; sparse calls always have it.
        tables: what `rd`, `mass` and `svg2` keep from one step to the next; None plans every call
            anew.

    Returns:
        `Attended`: `.out` like q, `.plan`, `.executed`, `.backend`, `.lse` fp32 [B, H, Sq].

    Raises:
        ValueError, TypeError: tensors, grid or options that do not fit, naming value and rule; a
            named backend that cannot run the call, with all its reasons. Before any work.

    Example:
        >>> q, k, v = (torch.randn(1, 4, 3 * 16 * 16, 64) for _ in range(3))
        >>> found = attend(q, k, v, method=Entropy(Budget(0.3)), grid=(3, 16, 16))
        >>> found.out.shape, round(found.plan.cost, 2)
    """
    check_name(backend)
    method = make_method(method)
    if tables is not None and not isinstance(tables, Tables):
        raise TypeError(f"tables must be a Tables(), the same in every step; got {tables!r}")
    padding = None
    if key_length is not None or key_mask is not None:
        check_tensors(q, k, v)
        padding = check_padding(key_length, key_mask, k)
    call = check_call(q, k, v, method, grid, key_grid, offset, scale, padding, causal)
    if not method.active(site, call.q_grid.tokens):
        return attend_densely(q, k, v, call, backend, lse)
    return prepare(call, method.at(site), backend).run(q, k, v, site, tables)


class PreparedCall(NamedTuple):
    """A sparse call as far as it is settled before any of its numbers is known.

    The layers of a transformer call share one. `blocks` are those that the backend runs.
    """

    call: Call
    method: Method
    backend: Backend
    layout: BlockLayout
    blocks: Blocks
    padding: KeyPadding | None  # in the layout's order

    def query(
        self, q: Tensor, k: Tensor, v: Tensor, site: Site, tables: Tables | None = None,
        dealt: Tensor | None = None,
    ) -> tuple[Query, Callable[[], Tensor]]:  # fmt: skip
        """What the method gets to see, and the values, both in the layout's order."""
        q, k, values = self.layout.arrange(q, k, v)
        call = self.call
        query = Query(
            q, k, self.layout, site, call.scale, self.padding, call.task.causal, tables=tables,
            level_times=self.backend.level_times,
            dealt=dealt,
        )  # fmt: skip
        if self.method.needs_values or self.method.orders_heads:
            v = values()
            query = query._replace(v=v)
            if self.method.orders_heads:
                query, v = self._in_orders_of_heads(query, v)
            return query, lambda: v
        return query, values

    def _in_orders_of_heads(self, query: Query, v: Tensor) -> tuple[Query, Tensor]:
        orders, padding = self.method.head_orders(query), query.padding
        if padding is not None:
            orders, padding = orders.with_padding_last(padding, self.layout.k_grid.placed)
        q, k, v = orders.take(query.q, query.k, v)
        return query._replace(q=q, k=k, v=v, padding=padding, orders=orders), v

    def plan(self, query: Query) -> tuple[BlockPlan, BlockPlan]:
        """Which blocks the method wants read, and the same on the backend's own blocks."""
        plan = self.method.plan(query)
        if self.method.tail:
            plan = plan.with_tail()
        if query.padding is not None or query.orders is not None:
            # What is not real costs nothing.
            plan = replace(plan, padding=query.padding, orders=query.orders)
        return plan, plan.coarsen(self.blocks)

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, site: Site, tables: Tables | None = None,
        dealt: Tensor | None = None,
    ) -> Attended:  # fmt: skip
        """Rearrange, plan, attend, and put the result into the caller's order. `dealt` is the order
        in which ranks hold the heads of a layer, where that is not their own."""
        made = None if tables is None else tables.made
        query, values = self.query(q, k, v, site, tables, dealt)
        plan, executed = self.plan(query)
        kept = self.method.keeps_tables and tables is not None and tables.made == made
        planning = 0.0 if kept else self.method.planning_share(self.layout)
        arranged_v = values()
        probes = None
        if self.method.probes:
            probes = probe(query, arranged_v, executed, self.method.probes)
            planning += correction_share(self.layout, self.method.probes, q.shape[3])
        # A rearranged copy has no other use than to hold the result.
        rearranged = self.layout.q.index is not None or query.orders is not None
        out_buffer = query.q if rearranged else None
        out, lse = self.backend.attend(
            query.q, query.k, arranged_v, executed, query.scale, query.padding, out_buffer
        )
        del query, values, arranged_v, out_buffer  # copies must not lie beside the result's own
        if probes is not None:
            out = correct(out, probes)
        out = plan.restore(out)
        return Attended(out, lse, plan, executed, self.backend.name, planning)


def prepare(call: Call, method: Method, backend: str) -> PreparedCall:
    """Choose the backend, agree with it on blocks, lay the tokens out."""
    task = call.task
    chosen = choose(backend, task)
    blocks = method.blocks(chosen.preferred(task))
    layout = method.layout(call.q_grid, call.k_grid, call.offset, blocks, task.device)
    if isinstance(layout.order, PerHead) and not method.orders_heads:
        raise ValueError(f"{method.name} orders no heads: PerHead() is for methods that do")
    padding = call.padding and call.padding.arranged(layout.k)
    if padding is not None and padding.kind != task.padding:
        # The order scattered the padding: what knows lengths only cannot run this any more.
        chosen = choose(backend, replace(task, padding=padding.kind))
    return PreparedCall(call, method, chosen, layout, chosen.fitting(blocks, task), padding)


def attend_densely(
    q: Tensor, k: Tensor, v: Tensor, call: Call, backend: str = "auto", lse: bool = False
) -> Attended:
    """Everything, in the caller's own order. The method `dense` means the stock operation; the
    dense calls of a sparse run take the fastest one."""
    causal = call.task.causal
    # The stock operation counts causality from the first key, a chunk of a cache from its offset.
    if lse or (causal and call.offset):
        chosen = choose(backend, call.full_task)
        blocks = chosen.preferred(call.full_task)
        layout = block_layout(call.q_grid, call.k_grid, None, blocks, call.offset, q.device)
        whole = full_plan(layout, causal)
        out, found_lse = chosen.attend(q, k, v, whole, call.scale, call.padding)
        return Attended(out, found_lse, backend=chosen.name)
    task, padding = call.full_task, call.padding
    if padding is not None:
        k, v, padding = padding.cut(k, v)
        task = replace(task, k_tokens=k.shape[2], padding=None if padding is None else padding.kind)
    if type(call.method) is Dense:
        return Attended(dense.stock(q, k, v, call.scale, padding, causal))
    out, name = dense.fastest(q, k, v, call.scale, task, padding, causal)
    return Attended(out, backend=name)
