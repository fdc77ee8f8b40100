"""An applied run: what it is, where it stands, what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from jali.attend import PreparedCall, attend_densely, prepare
from jali.backends import Task, choose
from jali.checks import check_call
from jali.integration import forecast, stock
from jali.integration.cache import judged_layers, unseen_cache, warning_of_judged
from jali.integration.clock import Clock, Moment
from jali.integration.dealing import Dealing
from jali.integration.masks import MaskReading, read_mask
from jali.integration.operator import number_of
from jali.integration.parallel import Ranks, across_ranks, joint_order, tensor_ranks, ulysses_ranks
from jali.integration.recipe import Recipe
from jali.integration.stats import CallLog, CallRecord, Stats
from jali.integration.steering import Steered
from jali.integration.stopwatch import RanAttention, Stopwatch, now
from jali.integration.transformer import AttentionCall, RunTransformer, TransformerCall
from jali.methods import Dense, FastestDense, Method
from jali.methods.schedule import why_never_sparse
from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.planning.tables import Tables
from jali.presets import Preset
from jali.tokens.grid import Box, TokenGrid
from jali.tokens.heads import heads_first, heads_last
from jali.tokens.padding import KeyPadding

log = logging.getLogger("jali")

FASTEST = FastestDense()
BRANCHES = 16  # more than any model has; a call without end at one timestep has ever new ones


@dataclass(eq=False)
class Run:
    """Sparse attention applied to one pipeline. Reading statistics waits for the device; running
    does not, but for the timestep, key lengths and randomly drawn samples, once a transformer call
    each."""

    method: Method
    backend: str
    when: str
    finite: str
    clock: Clock
    transformers: list[RunTransformer] = field(default_factory=list)
    layers: list[tuple[int, int]] = field(default_factory=list)  # (transformer, layer) of each
    left_out: list[str] = field(default_factory=list)
    dense_backend: Any = None  # diffusers' own, where the user has set one
    dense_backend_chosen: bool = False  # while the run was on
    watch: Callable[[AttentionCall], None] | None = None  # shown every call that is not stock
    preset: Preset | None = None  # its statements about the grid are checked against every call
    recipe: Recipe | None = None  # other runs than those it was found with are warned of
    recipe_box: Box | None = None  # the tokens of such a run
    steered: Steered | None = None  # budgets follow the error of a few rows
    unknown_masks: str = "raise"
    notes: tuple[str, ...] = ()  # what a summary has to say besides
    forewarned: bool = False  # who made the run has said already that no step will be sparse

    def __post_init__(self) -> None:
        self.number = number_of(self)
        self.records = CallLog()
        self._ended = False
        self._told: set[str] = set()
        self._methods: dict[Ranks, Method] = {}
        self._speedups: dict[tuple[Any, ...], float | None] = {}
        self._shape: tuple[Any, ...] | None = None
        self._times = Stopwatch()
        self._skipped = 0  # self-attentions that a cache of the model left out
        self._dealing = Dealing()
        self._sharing: Ranks | None = None  # those of Ulysses, of the latest call
        self.tables = Tables()
        self._last_branches: set[str] = set()  # whose call of the last step is over

    def choose_dense_backend(self, backend: Any) -> None:
        """The user names a diffusers backend while the run is on: it does the dense calls."""
        self.dense_backend, self.dense_backend_chosen = backend, True

    # One transformer call

    def begin(
        self, index: int, timestep: Tensor | float | None, numbers: Sequence[int],
        tensors: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """A transformer call begins."""
        here = self.transformers[index]
        if self._ended:
            self._restart()
        before = None if here.call is None else here.call.moment.step
        moment = self.clock.tick(timestep, here.hook.context, here.family.branches)
        again = moment.step == 0 and moment.branch in here.branches_begun
        if again or (before is not None and moment.step < before):
            self._restart()  # an interrupted run, or one without a pipeline, begins again
        if moment.step == 0 and len(here.branches_begun) < BRANCHES:
            here.branches_begun.add(moment.branch)
            never = why_never_sparse(self.method, moment.steps)
            if never is not None and self.clock.knows_steps and not self.forewarned:
                self._tell(never)
        if here.call is None:
            self._times.why_not = self._times.why_not or unseen_cache(here)
            here.judged = judged_layers(here)
        if self._sharing is not None:
            self._dealing.exchange(self._sharing)
        boxes = here.family.geometry.boxes(numbers, tensors)
        if moment.step == 0:
            self._tell_other_run(moment, boxes)
        here.call = TransformerCall(moment, boxes, tensor_ranks(here.module()))
        here.call.started = now(timestep)

    def _tell_other_run(self, moment: Moment, boxes: Sequence[Box]) -> None:
        """Where a recipe was found with another size or number of steps."""
        if self.recipe is None or self.forewarned:
            return
        steps = {"steps": moment.steps} if self.clock.knows_steps else {}
        here, known = boxes[0] if len(boxes) == 1 else None, self.recipe_box
        apart = here is not None and known is not None and here != known
        other = self.recipe.warning(steps, f"{here} tokens, not {known}" if apart else None)
        if other is not None:
            self._tell(other)

    def end(self, index: int, output: Any) -> None:
        """A transformer call is over."""
        here = self.transformers[index]
        call = here.call
        if call is None:
            return
        here.attended = here.attended or bool(call.ran)
        if here.attended:
            self._skipped += max(here.reached - len(call.ran), 0)
        if not here.attended:  # a cache, which may skip all of a call, lets the first one run
            self._tell(
                "no self-attention of this transformer came by: its processors were replaced after "
                "sparse attention was applied (fuse projections first, or apply again)"
            )
        out = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
        if isinstance(out, Tensor):
            self._times.add(here.name, tuple(call.ran), call.started, now(out))
            if self.finite != "off":
                moment = call.moment
                total = out.detach().sum(dtype=torch.float32)
                self.records.append(
                    CallRecord(here.name, -1, moment.step, moment.branch, 0, "", "", None, total)
                )
        self._free_tables(call.moment)

    def _free_tables(self, ended: Moment) -> None:
        """After the last step give back what only further steps would read: decoding needs room.

        The last call is known by the branches: those of the first step have all been there. Where
        a run leaves one out, or its steps are only counted, its end frees them (`finish`). A call
        that comes all the same makes its table anew.
        """
        if ended.step < ended.steps - 1 or not self.clock.knows_steps:
            return
        self._last_branches.add(ended.branch)
        first = set().union(*(each.branches_begun for each in self.transformers))
        if first and first <= self._last_branches:
            self.tables.clear()

    def finish(self) -> None:
        """A generation is over: say what came of it, and let no broken output pass in silence."""
        if self._ended or not self.records:
            return
        self._ended = True
        self.tables.clear()
        self.clock.restart()
        log.info("jali: %s", self.summary())
        self.check()

    def check(self) -> None:
        """Raise or warn where something was not finite, naming the first place."""
        if self.finite == "off" or (bad := self.records.first_not_finite()) is None:
            return
        where = "the model's output" if bad.layer < 0 else f"the attention of layer {bad.layer}"
        kind = "" if bad.layer < 0 else f" ({'sparse' if bad.reason is None else 'dense'})"
        text = (
            f"{where}{kind} of {bad.transformer} is not finite at step {bad.step}, "
            f"branch {bad.branch}: the first of this run"
        )
        if self.finite == "raise":
            raise FloatingPointError(text)
        log.warning("jali: %s", text)

    def _restart(self) -> None:
        self.records = CallLog()
        self._ended = False
        self.tables = Tables()
        self._last_branches.clear()
        self._times = Stopwatch()
        self._skipped = 0
        self._dealing.restart()
        if self.steered is not None:
            self.steered.restart()
        for transformer in self.transformers:
            transformer.call = None
            transformer.branches_begun.clear()
            transformer.attended = False

    # One attention call

    def attend(
        self, index: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        scale: float | None, ranks: int, rank: int,
    ) -> Tensor:  # fmt: skip
        """The self-attention with this number among those of the run. [B, S, H, D] -> like q."""
        number, layer = self.layers[index]
        here = self.transformers[number]
        call = here.call
        if call is None:
            return stock.attention(here.family, q, k, v, mask, scale, self.dense_backend)
        moment = call.moment
        site = Site(moment.step, moment.steps, layer, here.layers, moment.branch, here.name)
        if type(self.method) is Dense:
            return self._attend_as_stock(here, site, q, k, v, mask, scale, "method dense")
        tokens = q.shape[1]
        grid = call.grids.get(tokens) or self._grid(here, call, tokens)
        reading = call.mask
        if reading is None or not reading.is_of(mask):
            reading = self._read_mask(here, call, mask)
        why: str | None
        if tokens != k.shape[1]:
            why = "not self-attention"
        elif (why := reading.problem or self.method.why_dense(site, tokens)) is None:
            prepared = self._prepare(here, call, site, grid, q, k, v, scale, ranks, rank)
            if isinstance(prepared, PreparedCall):
                order = None
                if ranks > 1:
                    order = joint_order(here.family, prepared.call.q_grid, ranks, q.device)
                if order is not None:
                    q, k, v = (x.index_select(1, order) for x in (q, k, v))
                q, k, v = heads_first(q), heads_first(k), heads_first(v)
                dealt = self._dealing.current((number, layer)) if ranks > 1 else None
                result = prepared.run(q, k, v, site, self.tables, dealt)
                if ranks > 1 and self.deals_heads and result.executed is not None:
                    self._sharing = ulysses_ranks(ranks, rank)
                    read, heads = result.executed.pairs_read, q.shape[1]
                    self._dealing.note((number, layer), site.branch, read, heads)
                if self.steered is not None:
                    self.steered.see(site, q, k, v, scale, prepared.call.padding, result.out)
                if self.watch is not None:
                    seen = prepared.call.q_grid, q, k, v, prepared.call.padding, scale, result
                    self.watch(AttentionCall(here.name, site, *seen))
                out = heads_last(result.out)
                keys = k.shape[2], prepared.padding
                self._record(
                    here, site, out, result.backend, None, keys, result.executed, result.planning
                )
                return out if order is None else out.index_select(1, order.argsort())
            why = prepared
        if reading.problem or self.dense_backend is not None:
            return self._attend_as_stock(here, site, q, k, v, mask, scale, why, reading.padding)
        return self._attend_densely(here, site, grid, reading, q, k, v, scale, why)

    @property
    def deals_heads(self) -> bool:
        """Whether ranks of Ulysses get heads by their cost: where the method lets heads do unequal
        parts of the work."""
        return self.method.base.uneven_heads

    def dealt_order(self, index: int) -> Tensor | None:
        """The heads of a self-attention in the order in which ranks get them; None as they are."""
        number, layer = self.layers[index]
        here = self.transformers[number]
        if here.call is None or self.watch is not None:
            return None
        moment = here.call.moment
        site = Site(moment.step, moment.steps, layer, here.layers, moment.branch, here.name)
        return self._dealing.order((number, layer), self.method.period(site))

    def _attend_densely(
        self, here: RunTransformer, site: Site, grid: TokenGrid | str, reading: MaskReading,
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, why: str,
    ) -> Tensor:  # fmt: skip
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        known = None if isinstance(grid, str) else grid
        call = check_call(q, k, v, FASTEST, known, scale=scale, padding=reading.padding)
        result = attend_densely(q, k, v, call)
        if self.watch is not None:
            seen = grid, q, k, v, reading.padding, scale, result
            self.watch(AttentionCall(here.name, site, *seen))
        out = heads_last(result.out)
        self._record(here, site, out, result.backend, why, (k.shape[2], reading.padding))
        return out

    def _attend_as_stock(
        self, here: RunTransformer, site: Site, q: Tensor, k: Tensor, v: Tensor,
        mask: Tensor | None, scale: float | None, why: str, padding: KeyPadding | None = None,
    ) -> Tensor:  # fmt: skip
        out = stock.attention(here.family, q, k, v, mask, scale, self.dense_backend)
        self._record(here, site, out, "stock", why, (k.shape[1], padding))
        return out

    # What the attention calls of a transformer call share, found when the first of them asks

    def _grid(self, here: RunTransformer, call: TransformerCall, tokens: int) -> TokenGrid | str:
        grid = call.grids[tokens] = here.family.grid(call.boxes, tokens)
        if self.preset is not None and isinstance(grid, TokenGrid):
            self.preset.check(grid)
        return grid

    def _read_mask(
        self, here: RunTransformer, call: TransformerCall, mask: Tensor | None
    ) -> MaskReading:
        call.prepared.clear()  # it was prepared for other keys
        reading = call.mask = read_mask(mask)
        if reading.problem and self.unknown_masks == "raise":
            raise ValueError(
                f"{here.family.name} hands its attention {reading.problem}, which no plan can "
                f"keep; leave out what needs that mask, or pass unknown_masks='dense' to compute "
                f"such calls densely"
            )
        if reading.problem:
            self._tell(reading.problem)
        return reading

    def _prepare(
        self, here: RunTransformer, call: TransformerCall, site: Site, grid: TokenGrid | str,
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, ranks: int, rank: int,
    ) -> PreparedCall | str:  # fmt: skip
        """A call where the method is active, or why it is dense all the same."""
        shape = q.shape, k.shape, v.shape, q.dtype, q.device, scale
        found = call.prepared.get(shape)
        if isinstance(found, str):
            return found
        sharing = call.ranks if ranks == 1 else ulysses_ranks(ranks, rank)
        method = (self.method if sharing is None else self._across(sharing)).at(site)
        if self.steered is not None:
            if sharing is not None:
                raise ValueError("steering needs every head in one process: leave it out")
            method = self.steered.at(method, site)
        if found is not None and found.method is method:
            return found
        if isinstance(grid, str):
            call.prepared[shape] = self._tell(grid)
            return grid
        if (why := self._why_slower(q, here, method)) is not None:
            return self._tell(why)
        assert call.mask is not None
        padding = call.mask.padding
        order = None if ranks == 1 else joint_order(here.family, grid, ranks, q.device)
        if padding is not None and order is not None:
            padding = padding.reordered(order)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        checked = check_call(q, k, v, method, grid, scale=scale, padding=padding)
        prepared = call.prepared[shape] = prepare(checked, method, self.backend)
        return prepared

    def _why_slower(self, q: Tensor, here: RunTransformer, method: Method) -> str | None:
        """Why a sparse call stays dense, where it would be slower and nobody insists on it. Then
        its own budget counts; a warning is of the whole run."""
        B, S, H, D = q.shape
        self._shape = shape = here.index, B, S, H, D, q.device
        cost = method.mean_budget if self.when == "auto" else self.budget
        key = *shape, cost
        if key not in self._speedups:
            task = Task(q.device, q.dtype, D, H, H, S, S, self.method.executed_ratios)
            self._speedups[key] = forecast.attention_speedup(
                heads=B * H, head_dim=D, tokens=S, cost=cost, device=q.device,
                backend=choose(self.backend, task).name,
            )  # fmt: skip
        faster = self._speedups[key]
        if faster is None or faster >= 1:
            return None
        at = f"{S} tokens on {q.device.type}"
        if self.when == "auto":
            return f"sparse would not be faster at {at} with its budget, by the cost model"
        gain = f"{faster:.2f}× per attention call, by the cost model"
        self._tell(f"{forecast.SLOWER} at {at} ({gain})")
        return None

    def _across(self, ranks: Ranks) -> Method:
        if ranks not in self._methods:
            self._methods[ranks] = across_ranks(self.method, ranks)
        return self._methods[ranks]

    def _tell(self, what: str) -> str:
        """Say something once, as a warning."""
        if what not in self._told:
            self._told.add(what)
            log.warning("jali: %s", what)
        return what

    def _record(
        self, here: RunTransformer, site: Site, out: Tensor, backend: str,
        why: str | None, keys: tuple[int, KeyPadding | None], ran: BlockPlan | None = None,
        planning: float = 0.0,
    ) -> None:  # fmt: skip
        samples, tokens, heads, head_dim = out.shape
        read = None if ran is None else ran.pairs_read
        each, padding = keys
        real = samples * each if padding is None else padding.total(each)
        total = None if self.finite == "off" else out.sum(dtype=torch.float32)
        if here.call is not None:
            here.call.ran.append(RanAttention(site.layer, tuple(out.shape), backend, why is None))
        if why is None and site.layer < here.judged:
            self._tell(warning_of_judged(here.judged))
        self.records.append(
            CallRecord(
                here.name, site.layer, site.step, site.branch, tokens, backend, why, read, total,
                samples, heads, head_dim, real, planning,
            )
        )  # fmt: skip

    # What came of it

    @property
    def budget(self) -> float | None:
        """The share of the work that was asked for, where the method names one."""
        return self.method.mean_budget

    def stats(self) -> Stats:
        """The latest generation. Waits for the device."""
        gain = self._times.speedup()
        stats = Stats(
            method=self.method.base.name,
            budget=self.budget,
            rows=self.records.rows(),
            measured=None if isinstance(gain, str) else gain,
            why_not_measured=gain if isinstance(gain, str) else "",
            notes=(*sorted(self.clock.said), *self.left_out, *self.notes, *self._kept_tables()),
            total=self.method.total,
            seconds=self._times.total(),
            seconds_first_call=self._times.first(),
            older=self.records.older,
            skipped=self._skipped,
        )
        notes = stats.notes
        if stats.older.calls:
            notes = (*notes, f"rows are of the latest {len(stats.rows)} calls, sums of all")
        return replace(stats, predicted=self._predicted(stats), notes=notes)

    def _kept_tables(self) -> list[str]:
        size = self.tables.largest / 2**20
        said = [f"tables kept between steps took {size:.0f} MB"] if size >= 1 else []
        words = None if self.steered is None else self.steered.words()
        return said if words is None else [*said, words]

    def errors(self) -> tuple[float, ...]:
        """The relative error of the attention's output by step, as the probe rows of a `Steering`
        have it; 0 where nothing was sparse. Waits for the device."""
        if self.steered is None:
            raise ValueError("errors are measured with steering=Steering()")
        return self.steered.errors()

    def summary(self) -> str:
        """The latest generation in one line. Waits for the device."""
        return self.stats().line()

    def _predicted(self, stats: Stats) -> float | None:
        """Of the whole generation: dense calls included. None where nothing was measured, and where
        a cache skipped calls: nobody says how much of the other work it skipped with them."""
        if stats.skipped:
            return None
        backend = next((row.backend for row in stats.rows if row.reason is None), None)
        if backend is None or self._shape is None:
            return None
        index, B, S, H, D, device = self._shape
        here = self.transformers[index]
        return forecast.model_speedup(
            heads=H, head_dim=D, tokens=S, batch=B, cost=self.budget,
            sparse_share=stats.sums.sparse_work / max(stats.sums.work, 1), layers=here.layers,
            weights=here.weights, device=device, backend=backend,
        )  # fmt: skip
