"""Caches between steps beside sparse attention: what they skip shifts nothing, and counts nowhere.

Every cache of `caches.py` × both orders of entering and of leaving × methods that keep state.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from statistics import fmean
from typing import Any, ClassVar

import pytest
import tiny
import torch
from caches import CACHES, FASTER_BATCHED, SMALL, STEPS, Cache, of_cache_dit
from test_memory_modes import OTHERS

import jali
from jali import Curve, RateDistortion, Schedule
from jali.integration.transformer import AttentionCall
from jali.maskbook import Fingerprint, Header, write_book
from jali.maskbook.cached import Cached
from jali.maskbook.header import Errors
from jali.methods import Mass, Method, Random
from jali.planning.budget import Budget
from jali.planning.site import Site
from jali.planning.tables import Tables
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Raster

LAYERS = 3
EVERY = STEPS * 2 * LAYERS
Place = tuple[int, int, str]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("CACHE_DIT").setLevel(logging.ERROR)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan(LAYERS)


@contextlib.contextmanager
def cached_by(pipe: Any, cache: Cache) -> Iterator[None]:
    cache.on(pipe)
    try:
        yield
    finally:
        cache.off(pipe)


@contextlib.contextmanager
def both(pipe: Any, cache: Cache, first: str, **sparse: Any) -> Iterator[jali.Handle]:
    """The cache and sparse attention, entered in this order and left in the other."""
    with contextlib.ExitStack() as stack:
        if first == "cache":
            stack.enter_context(cached_by(pipe, cache))
        handle = stack.enter_context(jali.sparse_processor_mode(pipe, **sparse))
        if first == "jali":
            stack.enter_context(cached_by(pipe, cache))
        yield handle


def make_book(of_rd: bool) -> Cached:
    """Another plan in every step and layer, so that a shifted site is seen."""
    header = Header(
        fingerprints={"transformer": Fingerprint("WanTransformer3DModel", "0" * 64)},
        grid=TokenGrid.video(2, 4, 4), order=Raster(), blocks=Blocks(8, 8), layers=LAYERS, heads=2,
        noise=tuple(1 - step / STEPS for step in range(STEPS)), noise_kind="sigma",
        transformers=("transformer",) * STEPS, branches=("mean",), prompts=(),
        budgets=() if of_rd else (0.5,), importance=not of_rd,
        errors=Errors((2, 4, 8, 0), 0.3) if of_rd else None,
    )  # fmt: skip
    g = torch.Generator().manual_seed(0)
    more = (4,) if of_rd else ()
    x = torch.randn(*header.outer, *header.slab[:4], *more, generator=g).mul(2).exp()
    x = x.sort(-1).values if of_rd else x / x.sum(-1, keepdim=True)
    return Cached(write_book(None, header, lambda step, layer: x[step, layer]), Budget(0.5))


BLOCKS: dict[str, Any] = {"q_block": 8, "k_block": 8}
# Plans of these follow from the site alone.
BY_SITE: dict[str, Callable[[], Method]] = {
    "random, falling": lambda: Schedule(Random(**BLOCKS), curve=Curve(0.5)),
    "a book": lambda: make_book(of_rd=False),
    "a book of rd": lambda: Schedule(make_book(of_rd=True), curve=Curve(0.5)),
}
# Both orders where something is kept, one for the others: `test_each_may_leave…` has all orders.
ORDERS = [
    ("random, falling", "cache"), ("a book", "jali"), ("a book of rd", "cache"),
    ("a book of rd", "jali"),
]  # fmt: skip
KEEP = 3  # steps
TABLES: dict[str, Callable[[], Method]] = {
    "rd": lambda: RateDistortion(0.5, samples=4, levels=(2, 4, "skip"), keep=KEEP, **BLOCKS),
    "mass": lambda: Mass(theta=0.7, keep=KEEP, **BLOCKS),
}


class Seen:
    """The plan of every call, by where it was."""

    def __init__(self) -> None:
        self.plans: dict[Place, torch.Tensor] = {}
        self.sites: dict[Place, Site] = {}

    def __call__(self, call: AttentionCall) -> None:
        place = call.site.layer, call.site.step, call.site.branch
        assert place not in self.plans, "a place was met twice"
        plan = call.result.plan
        self.plans[place] = torch.ones(1) if plan is None else plan.map.clone()
        self.sites[place] = call.site


def plans_of(handle: jali.Handle, pipe: Any) -> Seen:
    handle.run.watch = seen = Seen()
    tiny.generate(pipe, SMALL, steps=STEPS)
    return seen


@pytest.fixture(scope="module")
def uncached(pipe: Any) -> dict[str, tuple[Seen, dict[Place, float]]]:
    """The plans and costs of every call of a run that skips none."""
    found = {}
    for name, make in BY_SITE.items():
        with jali.sparse_processor_mode(pipe, method=make()) as handle:
            seen = plans_of(handle, pipe)
            found[name] = seen, costs(handle)
        assert len(seen.plans) == EVERY
        assert handle.stats().skipped == 0
    return found


def costs(handle: jali.Handle) -> dict[Place, float]:
    return {(row.layer, row.step, row.branch): row.cost for row in handle.stats().rows}


@pytest.mark.parametrize(("method", "first"), ORDERS)
@pytest.mark.parametrize("name", CACHES)
def test_skipped_calls_shift_nothing(
    pipe: Any, uncached: Any, name: str, method: str, first: str
) -> None:
    """A call that is made has the site, the plan and the cost that it has without the cache."""
    expected, cost = uncached[method]
    with both(pipe, CACHES[name], first, method=BY_SITE[method]()) as handle:
        seen = plans_of(handle, pipe)
        stats = handle.stats()
        assert costs(handle) == {place: cost[place] for place in seen.plans}
    # What it skipped is on neither side.
    assert stats.skipped == EVERY - len(seen.plans) > 0
    assert stats.cost == pytest.approx(fmean(cost[place] for place in seen.plans))
    assert stats.predicted is None
    assert f"a cache skipped {stats.skipped} of {EVERY} calls" in stats.line()
    for place, plan in seen.plans.items():
        assert seen.sites[place] == expected.sites[place]
        assert torch.equal(plan, expected.plans[place]), place
    after_a_gap = [p for p in seen.plans if p[1] > 2 and (p[0], p[1] - 1, p[2]) not in seen.plans]
    assert after_a_gap


class WatchedTables(Tables):
    """Which step made the table that a call was planned by."""

    def __init__(self) -> None:
        super().__init__()
        self.made_at: dict[tuple[int, str], int] = {}
        self.used: dict[Place, int] = {}

    def find(self, site: Site, *more: Any) -> Any:
        found = super().find(site, *more)
        if found is not None:
            self.used[site.layer, site.step, site.branch] = self.made_at[site.layer, site.branch]
        return found

    def keep(self, site: Site, *more: Any) -> None:
        super().keep(site, *more)
        self.made_at[site.layer, site.branch] = site.step
        self.used[site.layer, site.step, site.branch] = site.step


@pytest.mark.parametrize(("method", "first"), [("rd", "cache"), ("rd", "jali"), ("mass", "jali")])
@pytest.mark.parametrize("name", CACHES)
def test_a_table_is_made_by_the_first_call_of_its_steps_that_runs(
    pipe: Any, monkeypatch: pytest.MonkeyPatch, name: str, method: str, first: str
) -> None:
    """Where a cache skips the step that would make it, the next one does: none outlives its
    steps."""
    monkeypatch.setattr("jali.integration.run.Tables", WatchedTables)
    with both(pipe, CACHES[name], first, method=TABLES[method]()) as handle:
        seen = plans_of(handle, pipe)
        used = handle.run.tables.used  # type: ignore[attr-defined]
    assert set(used) == set(seen.plans)
    for (layer, step, branch), made in used.items():
        since = step // KEEP * KEEP
        ran = [s for s in range(since, step + 1) if (layer, s, branch) in seen.plans]
        assert made == ran[0], (layer, step, branch)


WITH: dict[str, Any] = {"mean_budget": 0.3, "warmup_frac": 0.3, **BLOCKS}
STILL = SMALL | {"num_frames": 1}


@pytest.fixture(scope="module")
def alone(pipe: Any) -> dict[str, torch.Tensor]:
    """What comes of each by itself, of both, and of neither."""
    found = {"neither": tiny.generate(pipe, STILL, steps=STEPS)}
    with jali.sparse_processor_mode(pipe, **WITH):
        found["jali"] = tiny.generate(pipe, STILL, steps=STEPS)
    for name, cache in CACHES.items():
        with cached_by(pipe, cache):
            found[name] = tiny.generate(pipe, STILL, steps=STEPS)
            with jali.sparse_processor_mode(pipe, method="dense"):
                assert torch.equal(tiny.generate(pipe, STILL, steps=STEPS), found[name])
            with jali.sparse_processor_mode(pipe, **WITH):
                found[f"{name}, jali"] = tiny.generate(pipe, STILL, steps=STEPS)
    return found


@pytest.mark.parametrize("leaves", ["cache", "jali"])
@pytest.mark.parametrize("first", ["cache", "jali"])
@pytest.mark.parametrize("name", CACHES)
def test_each_may_leave_before_the_other(
    pipe: Any, alone: Any, name: str, first: str, leaves: str
) -> None:
    """What stays does what it does alone, and in the end nothing is left."""
    cache = CACHES[name]
    processors = [block.attn1.processor for block in pipe.transformer.blocks]
    if first == "cache":
        cache.on(pipe)
    handle = jali.apply_sparse_attention(pipe, **WITH)
    if first == "jali":
        cache.on(pipe)
    assert torch.equal(tiny.generate(pipe, STILL, steps=STEPS), alone[f"{name}, jali"])
    if leaves == "jali":
        handle.remove()
        assert torch.equal(tiny.generate(pipe, STILL, steps=STEPS), alone[name])
        cache.off(pipe)
    else:
        cache.off(pipe)
        assert torch.equal(tiny.generate(pipe, STILL, steps=STEPS), alone["jali"])
        handle.remove()
    assert torch.equal(tiny.generate(pipe, STILL, steps=STEPS), alone["neither"])
    assert [block.attn1.processor for block in pipe.transformer.blocks] == processors
    registry = getattr(pipe.transformer, "_diffusers_hook", None)
    assert registry is None or registry.hooks == {}


@pytest.mark.parametrize("first", ["cache", "jali"])
@pytest.mark.parametrize("family", OTHERS)
def test_cache_dit_in_other_families(family: str, first: str) -> None:
    build, call, layers = OTHERS[family]
    pipe, cache, steps = build(), CACHES["cache-dit"], 4
    if family == "LTX-2":
        with cached_by(pipe, cache), pytest.raises(TypeError, match="unexpected keyword"):
            tiny.generate(pipe, call, steps=steps)
        pytest.skip("cache-dit 1.5 does not run the LTX-2 of this diffusers")
    # Turned on a second time, cache-dit runs the blocks of a Flux in another order.
    sparse: dict[str, Any] = {"mean_budget": 0.3, "warmup_frac": 0, "dense_first_layer": False}
    with both(pipe, cache, first, **sparse, q_block=64, k_block=64) as handle:
        assert torch.isfinite(tiny.generate(pipe, call, steps=steps)).all()
    stats = handle.stats()
    branches = {row.branch for row in stats.rows}
    every = {(i, s, b) for i in range(layers) for s in range(steps) for b in branches}
    seen = {(row.layer, row.step, row.branch) for row in stats.rows}
    assert {(0, step, b) for step in range(steps) for b in branches} <= seen < every
    assert stats.skipped == len(every - seen)
    assert all(row.reason is None for row in stats.rows)


class TestGuidanceInOneBatch:
    """FasterCache leaves out the unconditional half of a batch: calls of other shapes between."""

    @pytest.mark.parametrize("first", ["cache", "jali"])
    @pytest.mark.parametrize("method", TABLES)
    def test_half_a_batch_has_its_own_table(self, method: str, first: str) -> None:
        pipe = tiny.cogvideox(layers=2)
        call = tiny.COG_CALL | {"height": 64, "width": 64, "num_frames": 5}
        samples: dict[int, int] = {}

        def seen(call: AttentionCall) -> None:
            samples[call.site.step] = call.q.shape[0]
            plan = call.result.plan
            assert plan is not None
            assert plan.map.shape[0] == call.q.shape[0]
            assert call.site.branch == "batched"

        with both(pipe, FASTER_BATCHED, first, method=TABLES[method]()) as handle:
            handle.run.watch = seen
            out = tiny.generate(pipe, call, steps=STEPS)
        assert torch.isfinite(out).all()
        assert set(samples.values()) == {1, 2}
        rows = handle.stats().rows
        of_step = {row.step: row.dense_work for row in rows}
        whole = max(of_step.values())
        assert of_step == {step: whole * n / 2 for step, n in samples.items()}


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if "a cache decides by" in r.message]


class TestWhatACacheJudgesBy:
    """A threshold on the change of the first block means something else where that is sparse."""

    SPARSE: ClassVar[dict[str, Any]] = {"warmup_frac": 0, **BLOCKS}

    @pytest.mark.parametrize("first", ["cache", "jali"])
    @pytest.mark.parametrize("name", ["first block", "cache-dit"])
    def test_told_once(
        self, pipe: Any, caplog: pytest.LogCaptureFixture, name: str, first: str
    ) -> None:
        sparse = self.SPARSE | {"mean_budget": 0.5, "dense_first_layer": False}
        with both(pipe, CACHES[name], first, **sparse):
            tiny.generate(pipe, STILL, steps=4)
            tiny.generate(pipe, STILL, steps=4)
        (said,) = warned(caplog)
        assert "how much the first block changed" in said
        assert said.endswith("keep it dense with dense_first_layer=True")

    @pytest.mark.parametrize("name", CACHES)
    def test_not_where_it_is_dense_or_no_cache_judges(
        self, pipe: Any, caplog: pytest.LogCaptureFixture, name: str
    ) -> None:
        judges = name in ("first block", "cache-dit")
        sparse = self.SPARSE | {"mean_budget": 0.5, "dense_first_layer": judges}
        with both(pipe, CACHES[name], "cache", **sparse):
            tiny.generate(pipe, STILL, steps=4)
        assert warned(caplog) == []

    def test_several_blocks_of_cache_dit(self, pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
        with both(pipe, of_cache_dit(2), "cache", mean_budget=0.5, **self.SPARSE):
            tiny.generate(pipe, STILL, steps=4)  # the second block is sparse
        (said,) = warned(caplog)
        assert "the first 2 blocks" in said
        assert "dense_layers=range(2)" in said
        caplog.clear()
        method = Schedule(Random(**BLOCKS), dense_layers=range(2))  # type: ignore[arg-type]
        with both(pipe, of_cache_dit(2), "cache", method=method):
            tiny.generate(pipe, STILL, steps=4)
        assert warned(caplog) == []


def test_a_cache_that_skips_all_is_not_taken_for_replaced_processors(
    pipe: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with both(pipe, CACHES["first block"], "jali", **WITH) as handle:
        for _ in range(2):
            tiny.generate(pipe, STILL, steps=STEPS)
    assert "processors were replaced" not in caplog.text
    assert handle.stats().skipped < EVERY  # of the latest generation alone
