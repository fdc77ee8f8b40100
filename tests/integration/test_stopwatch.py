"""A measured speed-up comes from warm, whole, like calls, or there is none and it says why."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import tiny
from caches import CACHES, SMALL, STEPS
from diffusers import PyramidAttentionBroadcastConfig

import jali
from jali.integration.run import Run
from jali.integration.stopwatch import KINDS, LATEST, RanAttention, Stopwatch

LAYERS = 3
COLD, DENSE, SPARSE, REST = 1000.0, 4.0, 1.0, 2.0  # seconds of a made-up machine
DENSE_CALL = REST + LAYERS * DENSE
SPARSE_CALL = REST + DENSE + (LAYERS - 1) * SPARSE  # layer 0 stays dense


def ran(kinds: str, shape: tuple[int, ...] = (1, 64, 2, 8), first: int = 0) -> Any:
    """What ran in a call: d and s for every layer."""
    return tuple(
        RanAttention(layer, shape, "torch" if kind == "s" else "stock", kind == "s")
        for layer, kind in enumerate(kinds, first)
    )


def watch(*calls: tuple[Any, float]) -> Stopwatch:
    made = Stopwatch()
    for what, seconds in calls:
        made.add("transformer", what, 5.0, 5.0 + seconds)
    return made


class TestLikeCalls:
    def test_the_first_of_each_kind_does_not_count(self) -> None:
        dense, sparse = ran("ddd"), ran("dss")
        calls = [(dense, 80.0), (dense, 4.0), (dense, 4.0), (sparse, 50.0), (sparse, 2.0)]
        assert watch(*calls, (sparse, 2.0)).speedup() == 2

    def test_one_that_was_held_up_does_not_decide(self) -> None:
        dense, sparse = ran("ddd"), ran("dss")
        calls = [(dense, 80.0), (dense, 70.0), (dense, 4.0)] + [(sparse, 2.0)] * 3
        assert watch(*calls).speedup() == 2

    def test_skipped_calls_are_no_dense_ones(self) -> None:
        dense, sparse, skipped, part = ran("ddd"), ran("dss"), ran(""), ran("d")
        calls = [(dense, 4.0)] * 3 + [(sparse, 2.0)] * 3 + [(skipped, 0.1), (part, 0.2)] * 20
        assert watch(*calls).speedup() == 2

    def test_part_of_the_layers_is_not_stated(self) -> None:
        """The first block alone, dense and sparse: alike, but not what a call takes."""
        calls = [(ran("ddd"), 4.0)] * 3 + [(ran("d"), 1.0), (ran("s"), 0.5)] * 5
        assert "no dense call ran the same layers" in str(watch(*calls).speedup())

    @pytest.mark.parametrize("other", [(2, 64, 2, 8), (1, 128, 2, 8)])
    def test_other_shapes(self, other: tuple[int, ...]) -> None:
        calls = [(ran("ddd"), 4.0)] * 5 + [(ran("dss", other), 2.0)] * 5
        assert "same shapes" in str(watch(*calls).speedup())

    def test_each_transformer_by_itself(self) -> None:
        """Two experts: the dense steps are all in the first."""
        made = watch(*[(ran("ddd"), 4.0)] * 4, *[(ran("dss"), 2.0)] * 3)
        for _ in range(9):
            made.add("transformer_2", ran("dss"), 0.0, 40.0)
        assert made.speedup() == 2

    def test_other_backends_and_other_sparse_layers_are_other_kinds(self) -> None:
        """What ran most often stands for its side."""
        slow = tuple(each._replace(backend="reference") for each in ran("ddd"))
        calls = [(ran("ddd"), 4.0)] * 5 + [(slow, 90.0)] * 3
        calls += [(ran("dss"), 2.0)] * 5 + [(ran("dds"), 3.0)] * 3
        assert watch(*calls).speedup() == 2

    def test_why_there_is_none(self) -> None:
        assert "compiled" in str(Stopwatch().speedup())
        calls = [(ran("ddd"), 4.0), (ran("ddd"), 4.0)] + [(ran("dss"), 2.0)] * 8
        why = "2 warm dense calls of one shape are needed, there were 1"
        assert watch(*calls).speedup() == why
        made = Stopwatch()
        for what in ("ddd", "dss") * 3:
            made.add("transformer", ran(what), 1.0, object())  # two clocks
        assert "dense calls of one shape are needed, there were 0" in str(made.speedup())

    def test_however_many_calls_the_rest_is_a_sum(self) -> None:
        made = Stopwatch()
        for number in range(20_000):
            made.add("transformer", ran("dss" if number % 4 else "ddd"), 0.0, 0.5)
        assert sum(len(times.warm) for times in made.kinds.values()) == 2 * LATEST
        for number in range(1000):
            made.add("transformer", ran("dss", (1, number, 2, 8)), 0.0, 0.5)
        assert len(made.kinds) == KINDS
        assert made.total() == 10_500


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that takes so and so long, and much longer for whatever it does first."""
    clock, met, record = [0.0], set(), Run._record

    def recorded(run: Run, here: Any, site: Any, out: Any, backend: str, why: Any, *more: Any):  # type: ignore[no-untyped-def]
        clock[0] += SPARSE if why is None else DENSE
        clock[0] += COLD if (kind := (out.shape, why is None)) not in met else 0
        met.add(kind)
        record(run, here, site, out, backend, why, *more)

    def now(_: Any) -> float:
        clock[0] += REST
        return clock[0]

    monkeypatch.setattr(Run, "_record", recorded)
    monkeypatch.setattr("jali.integration.run.now", now)


@pytest.mark.usefixtures("machine")
class TestCaches:
    @pytest.mark.parametrize("first", ["cache", "mode"])
    @pytest.mark.parametrize("name", CACHES)
    def test_what_a_cache_skips_is_not_compared(
        self, name: str, first: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        pipe = tiny.wan(LAYERS)
        if first == "cache":
            CACHES[name].on(pipe)
        with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=0.3) as run:
            if first == "mode":
                CACHES[name].on(pipe)
            tiny.generate(pipe, SMALL, steps=STEPS)
            stats = run.stats()
        CACHES[name].off(pipe)
        assert stats.skipped  # it does skip
        assert stats.measured in (None, DENSE_CALL / SPARSE_CALL)
        assert (stats.measured is None) == bool(stats.why_not_measured)
        assert "processors were replaced" not in caplog.text

    def test_a_cache_on_other_parts_skips_unseen(self) -> None:
        pipe = tiny.wan(LAYERS)
        pipe.transformer.enable_cache(
            PyramidAttentionBroadcastConfig(
                cross_attention_block_skip_range=2,
                cross_attention_timestep_skip_range=(100, 960),
                current_timestep_callback=lambda: pipe.current_timestep,
            )
        )
        with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=0.3) as run:
            tiny.generate(pipe, SMALL, steps=10)
        stats = run.stats()
        assert stats.measured is None
        assert "on blocks.0.attn2) may skip" in stats.why_not_measured
        assert f"no measured speed-up ({stats.why_not_measured})" in run.summary()


@pytest.mark.usefixtures("machine")
class TestCold:
    @pytest.mark.parametrize("guidance", [5.0, 1.0])
    def test_the_first_run_says_what_the_second_does(self, guidance: float) -> None:
        pipe, call = tiny.wan(LAYERS), SMALL | {"guidance_scale": guidance}
        with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=3) as run:
            for _ in range(2):
                tiny.generate(pipe, call, steps=6)
                assert run.stats().measured == DENSE_CALL / SPARSE_CALL

    def test_two_dense_calls_are_too_few(self) -> None:
        pipe, call = tiny.wan(LAYERS), SMALL | {"guidance_scale": 1.0}
        with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=2) as run:
            tiny.generate(pipe, call, steps=6)
        assert run.stats().measured is None
        assert "no measured speed-up (2 warm dense calls" in run.summary()
        assert "(all transformer calls, forecast by the cost model)" in run.summary()

    def test_labels(self) -> None:
        pipe = tiny.wan(LAYERS)
        with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=2) as run:
            tiny.generate(pipe, SMALL, steps=6)
        assert f"{DENSE_CALL / SPARSE_CALL:.2f}× (per transformer call)" in run.summary()
        with jali.sparse_processor_mode(pipe, method="dense") as dense:
            tiny.generate(pipe, SMALL, steps=2)
        assert "speed-up" not in dense.summary()


@pytest.mark.skipif(sys.platform == "win32", reason="no compiler")
def test_compiled_inside_the_mode() -> None:
    """Compilation takes seconds, a call milliseconds: whoever counted it would be off by far."""
    pipe = tiny.wan(2)
    with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=2) as run:
        pipe.transformer.compile_repeated_blocks(backend="eager")
        tiny.generate(pipe, tiny.WAN_CALL, steps=4)
        stats = run.stats()
    assert stats.measured is not None
    assert stats.seconds is not None
    assert 0.1 < stats.measured < 10
