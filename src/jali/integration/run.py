"""An applied run: what it is, where it stands, what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from jali import checks
from jali.attend import attend as attend_to_plan
from jali.attend import follow, way_of
from jali.backends import Task, choose
from jali.integration import forecast, stock
from jali.integration.clock import Clock
from jali.integration.masks import Keys, read_mask
from jali.integration.operator import enter
from jali.integration.parallel import (
    Ranks,
    across_ranks,
    joint_order,
    tensor_ranks,
    ulysses_ranks,
)
from jali.integration.scene import Course, Scene, Seen, Stage
from jali.integration.stats import CallRecord, CallWork, Stats, first_not_finite, read_records
from jali.integration.stopwatch import Stopwatch, now
from jali.methods import Dense, Entropy, Method, Schedule
from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.presets import Preset
from jali.tokens.grid import TokenGrid
from jali.tokens.heads import heads_first, heads_last

log = logging.getLogger("jali")

# A method that is never active: its dense calls take the fastest kernel, as a sparse run's should.
NEVER = Schedule(Entropy(), min_tokens=2**62)


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
    stages: list[Stage] = field(default_factory=list)
    places: list[tuple[int, int]] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    dense_choice: Any = None
    chosen: bool = False
    watch: Callable[[Seen], None] | None = None  # shown every call that goes through `attend`
    preset: Preset | None = None  # its statements about the grid are checked against every call
    unknown_masks: str = "raise"

    def __post_init__(self) -> None:
        self.number = enter(self)
        self.records: list[CallRecord] = []
        self._ended = False
        self._told: set[str] = set()
        self._methods: dict[Ranks, Method] = {}
        self._speedups: dict[tuple[Any, ...], float | None] = {}
        self._shape: tuple[Any, ...] | None = None
        self._times = Stopwatch()

    def choose_dense(self, backend: Any) -> None:
        """The user names a diffusers backend while the run is on: it does the dense calls."""
        self.dense_choice, self.chosen = backend, True

    # One transformer call

    def begin(
        self, stage: int, timestep: Tensor | float | None, numbers: Sequence[int],
        tensors: Sequence[Tensor],
    ) -> None:  # fmt: skip
        """A transformer call begins."""
        here = self.stages[stage]
        if self._ended:
            self._restart()
        before = None if here.scene is None else here.scene.moment.step
        moment = self.clock.tick(timestep, here.hook.context, here.family.branches)
        again = moment.step == 0 and moment.branch in here.opened
        if again or (before is not None and moment.step < before):
            self._restart()  # an interrupted run, or one without a pipeline, begins again
        if moment.step == 0:
            here.opened.add(moment.branch)
        boxes = here.family.geometry.boxes(numbers, tensors)
        here.scene = Scene(moment, boxes, tensor_ranks(here.module()))
        here.scene.started = now(timestep)

    def end(self, stage: int, output: Any) -> None:
        """A transformer call is over."""
        here = self.stages[stage]
        scene = here.scene
        if scene is None:
            return
        if scene.calls == 0:
            self._tell(
                "no self-attention of this transformer came by: its processors were replaced after "
                "sparse attention was applied (fuse projections first, or apply again)"
            )
        out = output[0] if isinstance(output, tuple) else getattr(output, "sample", output)
        if isinstance(out, Tensor):
            self._times.add(scene.sparse, scene.started, now(out))
            if self.finite != "off":
                moment = scene.moment
                total = out.detach().sum(dtype=torch.float32)
                self.records.append(
                    CallRecord(here.name, -1, moment.step, moment.branch, 0, "", "", None, total)
                )

    def finish(self) -> None:
        """A generation is over: say what came of it, and let no broken output pass in silence."""
        if self._ended or not self.records:
            return
        self._ended = True
        self.clock.restart()
        log.info("jali: %s", self.summary())
        self.check()

    def check(self) -> None:
        """Raise or warn where something was not finite, naming the first place."""
        if self.finite == "off" or (bad := first_not_finite(self.records)) is None:
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
        self.records = []
        self._ended = False
        self._times = Stopwatch()
        for stage in self.stages:
            stage.scene = None
            stage.opened.clear()

    # One attention call

    def attend(
        self, place: int, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        scale: float | None, ranks: int, rank: int,
    ) -> Tensor:  # fmt: skip
        """[B, S, H, D] -> like q."""
        index, layer = self.places[place]
        stage = self.stages[index]
        scene = stage.scene
        if scene is None:
            return stock.attention(stage.family, q, k, v, mask, scale, self.dense_choice)
        moment = scene.moment
        scene.calls += 1
        site = Site(moment.step, moment.steps, layer, stage.layers, moment.branch, stage.name)
        if isinstance(self.method, Dense):
            return self._attend_as_stock(stage, site, q, k, v, mask, scale, "method dense")
        tokens = q.shape[1]
        grid = scene.grids.get(tokens) or self._grid(stage, scene, tokens)
        keys = scene.keys
        if keys is None or not keys.fits(mask):
            keys = self._keys(stage, scene, mask)
        why: str | None
        if tokens != k.shape[1]:
            why = "not self-attention"
        elif (why := keys.problem or self.method.why_dense(site, tokens)) is None:
            course = self._course(stage, scene, site, grid, keys, q, k, v, scale, ranks, rank)
            if isinstance(course, Course):
                return self._attend_sparsely(stage, scene, site, course, q, k, v, scale)
            why = course
        if keys.problem or self.dense_choice is not None:
            return self._attend_as_stock(stage, site, q, k, v, mask, scale, why)
        return self._attend_densely(stage, site, grid, keys, q, k, v, scale, why)

    def _attend_sparsely(
        self, stage: Stage, scene: Scene, site: Site, course: Course,
        q: Tensor, k: Tensor, v: Tensor, scale: float | None,
    ) -> Tensor:  # fmt: skip
        order = course.order
        if order is not None:
            q, k, v = (x.index_select(1, order) for x in (q, k, v))
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        result = follow(course.way, q, k, v, site)
        if self.watch is not None:
            self.watch(Seen(stage.name, site, course.grid, q, k, v, course.keys, scale, result))
        scene.sparse = True
        out = heads_last(result.out)
        self._record(stage, site, out, result.backend, None, result.executed)
        return out if order is None else out.index_select(1, order.argsort())

    def _attend_densely(
        self, stage: Stage, site: Site, grid: TokenGrid | str, keys: Keys,
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, why: str,
    ) -> Tensor:  # fmt: skip
        q, k, v = heads_first(q), heads_first(k), heads_first(v)
        some_k, some_v, some = keys.cut(k, v)
        result = attend_to_plan(
            q, some_k, some_v, method=NEVER, grid=None if isinstance(grid, str) else grid,
            site=site, scale=scale, key_length=some.length, key_mask=some.mask,
        )  # fmt: skip
        if self.watch is not None:
            self.watch(Seen(stage.name, site, grid, q, k, v, keys, scale, result))
        out = heads_last(result.out)
        self._record(stage, site, out, result.backend, why)
        return out

    def _attend_as_stock(
        self, stage: Stage, site: Site, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None,
        scale: float | None, why: str,
    ) -> Tensor:  # fmt: skip
        out = stock.attention(stage.family, q, k, v, mask, scale, self.dense_choice)
        self._record(stage, site, out, "stock", why)
        return out

    # What the calls of a scene have in common, found when the first of them asks

    def _grid(self, stage: Stage, scene: Scene, tokens: int) -> TokenGrid | str:
        grid = scene.grids[tokens] = stage.family.grid(scene.boxes, tokens)
        if self.preset is not None and isinstance(grid, TokenGrid):
            self.preset.check(grid)
        return grid

    def _keys(self, stage: Stage, scene: Scene, mask: Tensor | None) -> Keys:
        keys = scene.keys = read_mask(mask)
        if keys.problem and self.unknown_masks == "raise":
            raise ValueError(
                f"{stage.family.name} hands its attention {keys.problem}, which no plan can keep; "
                f"leave out what needs that mask, or pass unknown_masks='dense' to compute such "
                f"calls densely"
            )
        if keys.problem:
            self._tell(keys.problem)
        return keys

    def _course(
        self, stage: Stage, scene: Scene, site: Site, grid: TokenGrid | str, keys: Keys,
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, ranks: int, rank: int,
    ) -> Course | str:  # fmt: skip
        """How a call goes where the method is active, or why it is dense all the same."""
        shape = q.shape, k.shape, v.shape, q.dtype, q.device
        found = scene.courses.get(shape)
        if isinstance(found, str):
            return found
        sharded = scene.sharded if ranks == 1 else ulysses_ranks(ranks, rank)
        method = (self.method if sharded is None else self._across(sharded)).at(site)
        if found is not None and found.fits(method, keys, scale):
            return found
        why = grid if isinstance(grid, str) else self._why_slower(q, stage)
        if why is not None:
            scene.courses[shape] = self._tell(why)
            return why
        assert isinstance(grid, TokenGrid)
        order = None if ranks == 1 else joint_order(stage.family, grid, ranks, q.device)
        moved = keys.moved(order, k.shape[1])
        call = checks.check(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), grid, None, None, scale,
            moved.length, moved.mask, False, method,
        )  # fmt: skip
        way = way_of(call, method, self.backend, q.device)
        course = scene.courses[shape] = Course(way, grid, keys, moved, scale, order)
        return course

    def _why_slower(self, q: Tensor, stage: Stage) -> str | None:
        """Why a sparse call stays dense, where it would be slower and nobody insists on it."""
        faster = self._forecast(q, stage)
        if faster is None or faster >= 1:
            return None
        tokens = f"{q.shape[1]} tokens on {q.device.type}"
        if self.when == "auto":
            return f"sparse would not be faster at {tokens} ({faster:.2f}×)"
        self._tell(f"sparse is not expected to be faster at {tokens} ({faster:.2f}×)")
        return None

    def _across(self, ranks: Ranks) -> Method:
        if ranks not in self._methods:
            self._methods[ranks] = across_ranks(self.method, ranks)
        return self._methods[ranks]

    def _forecast(self, q: Tensor, stage: Stage) -> float | None:
        """Expected speed-up of a sparse call of this shape; None where nothing was measured."""
        B, S, H, D = q.shape
        key = (stage.index, B, S, H, D, q.device)
        if key not in self._speedups:
            task = Task(q.device, q.dtype, D, H, H, S, S, self.method.ratios)
            self._speedups[key] = forecast.attention_speedup(
                heads=B * H, head_dim=D, tokens=S, cost=self.budget, device=q.device,
                backend=choose(self.backend, task).name,
            )  # fmt: skip
            self._shape = key
        return self._speedups[key]

    def _tell(self, what: str) -> str:
        """Say something once, as a warning."""
        if what not in self._told:
            self._told.add(what)
            log.warning("jali: %s", what)
        return what

    def _record(
        self, stage: Stage, site: Site, out: Tensor, backend: str,
        why: str | None, ran: BlockPlan | None = None,
    ) -> None:  # fmt: skip
        _, tokens, heads, _ = out.shape
        work = None if ran is None else CallWork(ran.ratios, ran.tally, ran.layout.pairs)
        total = None if self.finite == "off" else out.sum(dtype=torch.float32)
        self.records.append(
            CallRecord(
                stage.name, site.layer, site.step, site.branch, tokens, backend, why, work, total,
                heads,
            )
        )  # fmt: skip

    # What came of it

    @property
    def budget(self) -> float | None:
        """The share of the work that was asked for, where the method names one."""
        return self.method.asked

    def stats(self) -> Stats:
        """The latest generation. Waits for the device."""
        rows = read_records([r for r in self.records if r.layer >= 0])
        return Stats(
            method=_name(self.method),
            budget=self.budget,
            rows=rows,
            predicted=self._predicted(),
            measured=self._times.speedup(),
            notes=tuple(sorted(self.clock.said)) + tuple(self.left_out),
            seconds=self._times.total(),
        )

    def summary(self) -> str:
        """The latest generation in one line. Waits for the device."""
        return self.stats().line()

    def _predicted(self) -> float | None:
        """Of the whole generation: dense calls included. None where nothing was measured."""
        calls = [r for r in self.records if r.layer >= 0]
        sparse = [r for r in calls if r.reason is None]
        if not sparse or self._shape is None:
            return None
        index, B, S, H, D, device = self._shape
        stage = self.stages[index]
        return forecast.model_speedup(
            heads=H, head_dim=D, tokens=S, batch=B, cost=self.budget,
            sparse_share=len(sparse) / len(calls), layers=stage.layers, weights=stage.weights,
            device=device, backend=sparse[0].backend,
        )  # fmt: skip


def _name(method: Method) -> str:
    return _name(method.inner) if isinstance(method, Schedule) else method.name
