"""A run in a host that brings its own model, sampler and attention calls."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from jali.attend import Attended, PreparedCall, attend_densely, prepare
from jali.backends import check_name
from jali.checks import check_call, check_padding
from jali.integration.choice import chosen_method
from jali.integration.recipe import Recipe, check_alone
from jali.integration.stats import CallLog, CallRecord, Stats
from jali.methods import FastestDense, Method, Schedule
from jali.methods.schedule import why_never_sparse
from jali.name import USUAL
from jali.planning.site import Site
from jali.planning.tables import Tables
from jali.tokens.grid import TokenGrid
from jali.tokens.heads import heads_first, heads_last
from jali.tokens.padding import KeyPadding
from jali.value import check_choice, check_count

log = logging.getLogger("jali")

LAYOUTS = ("bhsd", "bshd")  # [batch, heads, tokens, head_dim], [batch, tokens, heads, head_dim]
FASTEST = FastestDense()
Grid = TokenGrid | Sequence[int] | str


class Run:
    """Sparse attention in a host: the method with its schedule, what it keeps between steps, and
    what came of the latest generation.

    A generation begins where the step falls, or with `begin()`, and needs no end; `finish()` gives
    memory back and logs one line.

    Args:
        method: a method's name (`options` are its own) or a `Method`; `rd` where there is none.
        mean_budget, total, curve, warmup_frac, dense_first_layer: as for `apply_sparse_attention`.
        recipe: instead of all these, a `Recipe` or its file. The host has to check that the model
            is the recipe's: a run never sees it.
        min_tokens: shorter sequences stay dense.
        backend: "auto", or a name, which never falls back.

    Raises ValueError or TypeError for what cannot be run, by name.

    Example:
        >>> run = Run("rd", total=0.4)
        >>> out = attention(q, k, v, layout="bhsd", grid=(5, 8, 12), step=0, steps=30, layer=0,
        ...                 layers=8, run=run)
        >>> run.stats().cost
    """

    def __init__(
        self,
        method: str | Method | None = None,
        *,
        mean_budget: float | None = None,
        total: float | None = None,
        curve: str | tuple[float, ...] | None = None,
        warmup_frac: float | int | None = None,
        dense_first_layer: bool | None = None,
        recipe: Recipe | str | os.PathLike[str] | None = None,
        min_tokens: int = 0,
        backend: str = "auto",
        **options: Any,
    ) -> None:
        check_name(backend)
        check_count("min_tokens", min_tokens, least=0)
        if recipe is not None:
            check_alone(
                method=method, mean_budget=mean_budget,
                total=total, curve=curve, warmup_frac=warmup_frac,
                dense_first_layer=dense_first_layer, **options,
            )  # fmt: skip
            recipe = recipe if isinstance(recipe, Recipe) else Recipe.read(recipe)
            method = recipe.scheduled
        chosen = chosen_method(
            USUAL if method is None else method,
            mean_budget,
            warmup_frac,
            dense_first_layer,
            None,
            options,
            total,
            curve,
        )
        if min_tokens:
            own = chosen if isinstance(chosen, Schedule) else Schedule(chosen)
            chosen = replace(own, min_tokens=max(own.min_tokens, min_tokens))
        self.method: Method = chosen
        self.recipe: Recipe | None = recipe
        self.backend = backend
        self.watch: Callable[[CallRecord], None] | None = None  # shown every call as it is noted
        self._told: set[str] = set()
        self.begin()

    # One generation after the other

    def begin(self) -> None:
        """A generation begins: nothing of the one before is used in it."""
        self.records = CallLog()
        self.tables = Tables()
        self._step = -1
        self._prepared: dict[Any, PreparedCall] = {}

    def finish(self) -> None:
        """A generation is over, or was given up: memory is given back, statistics stay."""
        self.tables.clear()
        self._prepared.clear()
        self._step, begun = -1, self._step >= 0
        if begun and len(self.records):
            log.info("jali: %s", self.summary())

    def _arrive(self, site: Site) -> None:
        """The host has come to this step."""
        if site.step == self._step:
            return
        if site.step < self._step or (self._step < 0 and len(self.records)):
            self.begin()
        if self._step < 0:
            never = why_never_sparse(self.method, site.steps)
            other = None if self.recipe is None else self.recipe.warning({"steps": site.steps})
            for what in filter(None, (never, other)):
                self._tell(what)
        self._step = site.step
        self._prepared.clear()

    def stats(self) -> Stats:
        """The latest generation: asked and achieved cost, a row for every attention call. Waits
        for the device."""
        return Stats(
            method=self.method.base.name,
            budget=self.method.mean_budget if self.method.total is None else None,
            rows=self.records.rows(),
            total=self.method.total,
            older=self.records.older,
        )

    def summary(self) -> str:
        """The latest generation in one line. Waits for the device."""
        return self.stats().line()

    def __repr__(self) -> str:
        return f"<run of {self.method}>"

    # One attention call

    def why_dense(self, site: Site, tokens: int) -> str | None:
        """Why the method leaves a call dense, in words; None where it is sparse."""
        return self.method.why_dense(site, tokens)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid, site: Site,
        scale: float | None, padding: KeyPadding | None,
    ) -> Tensor:  # fmt: skip
        """A sparse call of one branch. [B, H, S, D] -> like q."""
        method = self.method.at(site)
        key = q.shape, k.shape, q.dtype, q.device, grid, scale
        prepared = None if padding is not None else self._prepared.get(key)
        if prepared is None or prepared.method is not method:
            call = check_call(q, k, v, method, grid, scale=scale, padding=padding)
            prepared = self._prepared[key] = prepare(call, method, self.backend)
        result = prepared.run(q, k, v, site, self.tables)
        self.note(site, q, None, result, prepared.padding)
        return result.out

    def note(
        self, site: Site, q: Tensor, why: str | None, ran: Attended | None = None,
        padding: KeyPadding | None = None, keys: int | None = None,
    ) -> None:  # fmt: skip
        """Keep what came of a call of q [B, H, S, D] for the statistics. `why` it was dense, None
        where it was not."""
        B, H, S, D = q.shape
        each = S if keys is None else keys
        read = None if ran is None or ran.executed is None else ran.executed.pairs_read
        record = CallRecord(
            site.transformer, site.layer, site.step, site.branch, S,
            "host" if ran is None else ran.backend, why, read, None, B, H, D,
            B * each if padding is None else padding.total(each),
            0.0 if ran is None else ran.planning,
        )  # fmt: skip
        self.records.append(record)
        if self.watch is not None:
            self.watch(record)

    def _tell(self, what: str) -> None:
        """Say something once, as a warning."""
        if what not in self._told:
            self._told.add(what)
            log.warning("jali: %s", what)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    layout: str,
    grid: Grid,
    step: int,
    steps: int,
    layer: int,
    layers: int,
    run: Run,
    branch: str | Sequence[str] = "cond",
    transformer: str = "transformer",
    scale: float | None = None,
    key_length: Tensor | Sequence[int] | None = None,
    key_mask: Tensor | None = None,
    dense: Callable[[], Tensor] | None = None,
) -> Tensor:
    """One attention call of a host, sparse where the run says so.

    Args:
        q, k, v: after rotary embedding, [B, H, S, D] ("bhsd") or [B, S, H, D] ("bshd").
        layout: which of the two.
        grid: what the tokens are: a `TokenGrid`, (frames, height, width), or a sentence why they
            are none; then the call is dense, and the statistics say so.
        step, steps: where the sampler is. A step may be called more than once; never count calls.
        layer, layers: which self-attention of the model.
        run: method, schedule, tables and statistics.
        branch: of guidance; several where a batch holds them one after the other, in equal shares.
        transformer: which of a model's, where it has several.
        scale: of the logits; None is D ** -0.5.
        key_length, key_mask: which keys are real, as for `attend`.
        dense: the host's own attention, in this layout; called where the call stays dense. Without
            it that is done by jali's fastest.

    Returns:
        Like q, in the same layout.

    Raises:
        ValueError, TypeError: tensors, grid or site that do not fit, before any work.
    """
    check_choice("layout", layout, LAYOUTS)
    last = layout == "bshd"
    if last:
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
    branches = (branch,) if isinstance(branch, str) else tuple(branch)
    if not branches or q.shape[0] % len(branches):
        raise ValueError(
            f"a batch of {q.shape[0]} does not hold {len(branches)} branches in equal shares, got "
            f"branch={branch!r}"
        )
    sites = [Site(step, steps, layer, layers, name, transformer) for name in branches]
    run._arrive(sites[0])
    padding = check_padding(key_length, key_mask, k)
    known = grid if isinstance(grid, str) else TokenGrid.of(grid)
    why = "not self-attention" if q.shape[2] != k.shape[2] else None
    if why is None and isinstance(known, str):
        why = known
    if why is None:
        tokens = q.shape[2]
        why = next((w for site in sites if (w := run.why_dense(site, tokens)) is not None), None)
    if why is not None:
        return _densely(q, k, v, known, sites, run, scale, padding, dense, why, last)
    assert isinstance(known, TokenGrid)
    if len(sites) == 1:
        out = run.attend(q, k, v, known, sites[0], scale, padding)
    else:
        # Each branch for itself: whatever else is in its batch, it gets the same plan, and finds
        # its own table again.
        qs, ks, vs = (_shares(x, len(sites), last) for x in (q, k, v))
        real = _of_branches(padding, len(sites))
        out = torch.cat(
            [
                run.attend(qs[i], ks[i], vs[i], known, site, scale, real[i])
                for i, site in enumerate(sites)
            ]
        )
    return heads_last(out) if last else out


def _shares(x: Tensor, count: int, last: bool) -> Sequence[Tensor]:
    """The rows of each branch, as views that know the host's own order."""
    return [heads_first(part) for part in heads_last(x).chunk(count)] if last else x.chunk(count)


def _of_branches(padding: KeyPadding | None, count: int) -> Sequence[KeyPadding | None]:
    return [None] * count if padding is None else padding.split(count)


def _densely(
    q: Tensor, k: Tensor, v: Tensor, grid: TokenGrid | str, sites: Sequence[Site], run: Run,
    scale: float | None, padding: KeyPadding | None, dense: Callable[[], Tensor] | None, why: str,
    last: bool,
) -> Tensor:  # fmt: skip
    result = None
    if dense is None:
        known = grid if isinstance(grid, TokenGrid) and grid.tokens == q.shape[2] else None
        call = check_call(q, k, v, FASTEST, known, scale=scale, padding=padding)
        result = attend_densely(q, k, v, call)
    rows = q.shape[0] // len(sites)
    for site, real in zip(sites, _of_branches(padding, len(sites)), strict=True):
        run.note(site, q[:rows], why, result, real, k.shape[2])
    if result is None:
        assert dense is not None
        return dense()
    return heads_last(result.out) if last else result.out
