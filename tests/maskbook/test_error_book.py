"""Books of rd: what they hold, what is replayed from them, and what they refuse."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import books
import numpy as np
import pytest
import tiny
import torch

import jali
from jali import Budget, RateDistortion, Schedule, Site
from jali.integration.parallel import Ranks, across_ranks
from jali.maskbook import MaskBook, write_book
from jali.maskbook.cached import Cached
from jali.maskbook.calibration import Progress, calibrate
from jali.maskbook.calibration import size as sizes
from jali.maskbook.error_book import ErrorBook
from jali.maskbook.header import Errors
from jali.maskbook.write import file_size
from jali.methods import Query, Random
from jali.planning.distortion import ErrorTable, encode
from jali.planning.plan import MEAN, SKIP
from jali.planning.tables import Tables
from jali.planning.tradeoff import choose_levels
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks, block_layout
from jali.tokens.padding import KeyPadding

CALL = {**tiny.WAN_CALL, "height": 128, "width": 128, "num_frames": 9}  # 3×8×8 tokens
RECORD = {k: v for k, v in CALL.items() if k != "prompt"}
ALL = {"warmup_frac": 0, "dense_first_layer": False}
ALL_LEVELS = (2, 4, 8, "mean", "skip")
RD = RateDistortion(levels=ALL_LEVELS, keep=0.5, q_block=16, k_block=16)
STEPS = 4


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan()


@pytest.fixture(scope="module")
def path(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("book") / "wan.safetensors"
    calibrate(pipe, ["a cat", "a dog"], file, steps=STEPS, method=RD, **RECORD)
    return file


def opened(path: Path) -> ErrorBook:
    book = MaskBook.open(path)
    assert isinstance(book, ErrorBook)
    return book


class TestFile:
    def test_round_trip(self, tmp_path: Path) -> None:
        book = books.make_errors(tmp_path / "a.safetensors")
        h = book.header
        again = opened(tmp_path / "a.safetensors")
        assert again.header == h
        assert (h.format, h.places) == (
            2, ((0, "transformer"), (1, "transformer"), (2, "transformer"))
        )  # fmt: skip
        again.verify()
        x = books.errors(h)
        for place, layer in np.ndindex(h.outer):
            want = encode(x[place, layer], h.errors.levels)
            assert torch.equal(again.slab(place, layer), want.errors())
        assert again.header.text() == h.text()
        assert "sharpness" not in h.text()

    def test_its_size_is_known_before(self, tmp_path: Path) -> None:
        for name, header in (("a", books.OF_RD), ("b", books.SMALL)):
            make = books.make_errors if header.errors else books.make
            make(tmp_path / name, header=header)
            assert (tmp_path / name).stat().st_size == file_size(header)

    @pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 10, 13, 30, 50])
    @pytest.mark.parametrize("keep", [0.1, 0.25, 1 / 3, 0.4, 1.0])
    def test_parts_are_the_periods_of_rd(self, steps: int, keep: float) -> None:
        own, rd = Errors((MEAN, SKIP), keep), RateDistortion(keep=keep)
        for step in range(steps):
            if keep * steps > 1:  # else rd makes a table in every step
                assert own.bucket(step, steps) == rd.period(Site(step, steps))
            assert 0 <= own.bucket(step, steps) < 1 / keep

    @pytest.mark.parametrize(
        ("levels", "keep"),
        [((), 0.5), ((1, 2), 0.5), ((4, 2), 0.5), ((2, 2), 0.5), ((3,), 0.5), ((2,), 0.0),
         ((2,), -0.5), ((2,), 1.5), ((2,), float("nan")), ((2,), 1e-300)],
    )  # fmt: skip
    def test_what_errors_cannot_be(self, levels: Any, keep: float) -> None:
        with pytest.raises(ValueError, match=r"levels|keep"):
            Errors(levels, keep)

    def test_a_header_is_of_one_kind(self) -> None:
        for change in ({"budgets": (0.5,)}, {"importance": True}):
            with pytest.raises(ValueError, match="not both"):
                replace(books.OF_RD, **change)
        with pytest.raises(ValueError, match="cannot be pooled 8"):
            replace(books.OF_RD, blocks=Blocks(16, 12))

    @pytest.mark.parametrize("value", [float("nan"), float("inf"), -1.0, 3e38])
    def test_errors_that_are_none_are_not_written(self, tmp_path: Path, value: float) -> None:
        x = books.errors(books.OF_RD)
        x[1, 1, 0, 2, 3, 4, 1] = value
        with pytest.raises(ValueError, match="errors of part 1, layer 1 is not finite and >= 0"):
            write_book(tmp_path / "a", books.OF_RD, lambda place, layer: x[place, layer])
        assert not list(tmp_path.iterdir())


class TestRecorded:
    def test_the_mean_over_prompts_steps_and_branches(self, pipe: Any, path: Path) -> None:
        book, found = opened(path), {}

        def watch(seen: Any) -> None:
            from jali.attend import prepare
            from jali.checks import check_call

            call = check_call(seen.q, seen.k, seen.v, RD, seen.grid, scale=seen.scale)
            query = prepare(call, RD, "auto").query(seen.q, seen.k, seen.v, seen.site)[0]
            key = seen.site.step // 2, seen.site.layer
            found.setdefault(key, []).append(RD.table(query).errors()[0])

        handle = jali.apply_sparse_attention(pipe, jali.methods.FastestDense())
        handle.run.watch = watch
        for i, prompt in enumerate(("a cat", "a dog")):
            tiny.generate(pipe, {**CALL, "prompt": prompt}, steps=STEPS, seed=i)
        handle.remove()
        assert len(found) == 6
        for (place, layer), parts in found.items():
            assert len(parts) == 8  # prompts × steps × branches
            want = encode(torch.stack(parts).mean(0)[None], RD.codes)
            got = book.table(Site(2 * place, STEPS, layer, 3))
            near = (got.codes.int() - want.codes.int()).abs()
            assert int(near.max()) <= 1  # by the order in which a mean is made
            assert float((near > 0).float().mean()) < 0.01
            assert torch.allclose(got.top, want.top, atol=1e-4)

    def test_what_it_says_of_itself(self, path: Path) -> None:
        h = opened(path).header
        assert (str(h.grid), h.steps, h.layers, h.heads) == ("3×8×8", STEPS, 3, 2)
        assert h.errors == Errors((2, 4, 8, MEAN, SKIP), 0.5)
        assert h.blocks == Blocks(16, 16)
        assert h.scorer == "rd samples=4 estimate=samples seed=0"
        assert h.branches == ("mean",)
        assert len(h.prompts) == 2

    def test_the_size_is_told_and_is_right(self, pipe: Any, tmp_path: Path) -> None:
        told: list[Progress] = []
        for name, more in (("a", {"method": RD}), ("b", {"blocks": Blocks(32, 16)})):
            told.clear()
            given = {**more, **RECORD, "steps": 2, "progress": told.append}
            calibrate(pipe, ["a cat"], tmp_path / name, **given)
            assert {at.bytes for at in told if not at.writing} == {(tmp_path / name).stat().st_size}

    def test_what_is_too_large_is_refused_before_it_runs(
        self, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fine = RateDistortion(levels=ALL_LEVELS, q_block=8, k_block=8)
        words = r"would have 121 GB.*larger blocks"
        with pytest.raises(ValueError, match=words):
            calibrate(pipe, ["a cat"], tmp_path / "a", model="wan-t2v-1.3b", method=fine)
        monkeypatch.setattr(sizes, "LIMIT", 1000)
        with pytest.raises(ValueError, match="larger blocks"):
            calibrate(pipe, ["a cat"], tmp_path / "a", steps=2, method=fine, **RECORD)
        assert not list(tmp_path.iterdir())

    def test_two_experts(self, tmp_path: Path) -> None:
        both = tiny.wan(experts=2)
        told: list[Progress] = []
        book = calibrate(
            both, ["a cat"], tmp_path / "a", steps=5, method=RD, progress=told.append, **RECORD
        )
        assert isinstance(book, ErrorBook)
        names = book.header.transformers
        assert set(names) == {"transformer", "transformer_2"}
        assert len(book.header.places) in (2, 3)
        assert book.bytes <= told[0].bytes <= book.bytes + 20_000
        for steps in (5, 8):
            with jali.cached_processor_mode(both, book, 0.4, **ALL) as handle:
                tiny.generate(both, CALL, steps=steps)
            assert handle.stats().sparse_cost == pytest.approx(0.4, abs=0.02)

    def test_text_padding_and_batches(self, tmp_path: Path) -> None:
        for build, call in (
            (tiny.hunyuan, tiny.HUNYUAN_CALL),
            (tiny.cogvideox, tiny.COG_CALL),
        ):
            other = build()
            file = tmp_path / build.__name__
            given = {k: v for k, v in call.items() if k != "prompt"}
            book = calibrate(other, ["a cat"], file, steps=2, method=RD, **given)
            book.verify()
            with jali.cached_processor_mode(other, book, 0.7, **ALL) as handle:
                tiny.generate(other, call, steps=2)
            rows = handle.stats().rows
            assert {row.reason for row in rows} == {None}
            assert all(row.cost < 1 for row in rows)

    def test_branches_apart(self, pipe: Any, tmp_path: Path) -> None:
        given = {"steps": 2, "method": RD, "branches": "separate", **RECORD}
        book = calibrate(pipe, ["a cat"], tmp_path / "a", **given)
        seen: list[Any] = []
        with jali.cached_processor_mode(pipe, book, 0.5, **ALL) as handle:
            handle.run.watch = seen.append
            tiny.generate(pipe, CALL, steps=2)
        assert {call.site.branch for call in seen} == {"cond", "uncond"}
        for call in seen:
            want = book.plan(0.5, call.site.step, call.site.layer, call.site.branch)
            assert torch.equal(call.result.plan.levels, want.levels)

    def test_it_goes_on_after_a_kill(self, pipe: Any, path: Path, tmp_path: Path) -> None:
        ran = []

        def generate(prompt: str, seed: int) -> None:
            if len(ran) == 1:
                ran.append(prompt)
                raise KeyboardInterrupt
            ran.append(prompt)
            tiny.generate(pipe, {**CALL, "prompt": prompt}, steps=STEPS, seed=seed)

        given = {"steps": STEPS, "method": RD, "generate": generate, **RECORD}
        with pytest.raises(KeyboardInterrupt):
            calibrate(pipe, ["a cat", "a dog"], tmp_path / "a", **given)
        book = calibrate(pipe, ["a cat", "a dog"], tmp_path / "a", resume=True, **given)
        assert ran == ["a cat", "a dog", "a dog"]
        assert (tmp_path / "a").read_bytes() == path.read_bytes()
        again = calibrate(pipe, ["a cat", "a dog"], tmp_path / "a", resume=True, **given)
        assert len(ran) == 3
        assert again.digest == book.digest

    @pytest.mark.parametrize(
        ("given", "match"),
        [
            ({"method": "psa"}, "'entropy' .* or 'rd'"),
            ({"method": jali.Entropy()}, "'entropy' .* or 'rd'"),
            ({"method": "rd", "budgets": (0.5,)}, "budgets has no meaning for a book of rd"),
            ({"method": "rd", "importance": False}, "importance has no meaning"),
            ({"method": RD, "blocks": Blocks(8, 8)}, "blocks has no meaning"),
            ({"method": "rd", "blocks": Blocks(8, 12)}, "cannot be pooled 8"),
            ({"method": RateDistortion(price=1.0)}, "leave price out"),
            ({"method": RateDistortion(costs={2: 0.6})}, "leave costs out"),
            ({"method": RateDistortion(keep=2)}, "keep is a share of the run above 0.*got 2"),
            ({"method": RateDistortion(keep=0.0)}, "keep is a share of the run above 0"),
        ],
    )
    def test_refused(self, pipe: Any, tmp_path: Path, given: Any, match: str) -> None:
        with pytest.raises(ValueError, match=match):
            calibrate(pipe, ["a cat"], tmp_path / "a", **given, **RECORD)
        assert not list(tmp_path.iterdir())


def query_of(book: ErrorBook, site: Site, batch: int = 1, **more: Any) -> Query:
    """A call whose numbers nobody may look at."""
    shape = (batch, book.header.heads, book.grid.tokens, 8)
    nan = torch.full(shape, torch.nan)
    return Query(nan, nan, book.layout(), site, 1.0, **more)


class TestReplay:
    @pytest.mark.parametrize("budget", [0.0, 0.15, 0.3, 0.5, 0.9, 1.0])
    def test_levels_are_those_of_the_averaged_table(self, budget: float) -> None:
        """Of any budget and number of steps, with numbers that are none in q and k."""
        book = books.make_errors(None)
        h, x = book.header, books.errors(book.header)
        for steps in (2, 4, 10):  # of 10 the last lies behind what was recorded
            for step, layer in np.ndindex(steps, h.layers):
                site = Site(step, steps, layer, h.layers)
                place = min(int(step / (0.3 * steps) + 1e-9), 2)
                table = encode(x[place, layer], h.errors.levels)
                want = choose_levels(table, book.layout(), budget)
                got = Cached(book, Budget(budget)).plan(query_of(book, site))
                assert torch.equal(got.levels, want)
                assert got.ratios == (1, 2, 4, 8, MEAN)

    def test_a_run_replays_the_book(self, pipe: Any, path: Path) -> None:
        book, seen = opened(path), []
        with jali.cached_processor_mode(pipe, path, 0.3, **ALL) as handle:
            handle.run.watch = seen.append
            tiny.generate(pipe, CALL, steps=STEPS)
            assert handle.run.tables.bytes == 0  # given back after the last step
        assert len(seen) == 24
        for call in seen:
            want = book.plan(0.3, call.site.step, call.site.layer)
            assert torch.equal(call.result.plan.levels, want.levels)
        stats = handle.stats()
        assert (stats.method, stats.planning) == ("cached", 0)
        assert stats.sparse_cost == pytest.approx(book.cost(0.3))
        assert stats.sparse_cost == pytest.approx(0.3, abs=0.02)
        # One table for both branches, read once for each part of the run.
        assert handle.run.tables.made == 2 * 3

    def test_nothing_is_scored(
        self, pipe: Any, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def never(*_: Any, **__: Any) -> None:
            raise AssertionError

        monkeypatch.setattr(RateDistortion, "table", never)
        with jali.cached_processor_mode(pipe, path, 0.3, **ALL) as handle:
            tiny.generate(pipe, CALL, steps=3)
        assert len(handle.stats().rows) == 18

    @pytest.mark.parametrize("steps", [2, 4, 7])
    @pytest.mark.parametrize("curve", [None, "linear", "flat"])
    def test_totals(self, pipe: Any, path: Path, steps: int, curve: str | None) -> None:
        given = {"curve": curve, **(ALL if curve == "flat" else {})}
        with jali.cached_processor_mode(pipe, path, total=0.65, **given) as handle:
            tiny.generate(pipe, CALL, steps=steps)
        assert handle.stats().cost == pytest.approx(0.65, abs=0.02)
        assert "asked 0.65 in total" in handle.summary()

    @pytest.mark.parametrize("total", [0.4, 0.65])
    def test_a_total_falls_as_that_of_rd_itself(self, pipe: Any, path: Path, total: float) -> None:
        with jali.cached_processor_mode(pipe, path, total=total) as replayed:
            curve = replayed.run.method.curve
        with jali.sparse_processor_mode(pipe, method="rd", total=total) as planned:
            assert curve == planned.run.method.curve

    @pytest.mark.parametrize("steps", [4, 12])
    def test_a_small_total(self, pipe: Any, path: Path, steps: int) -> None:
        """In four steps less than one dense step: the curve begins below 1."""
        with jali.cached_processor_mode(pipe, path, total=0.24) as handle:
            tiny.generate(pipe, CALL, steps=steps)
        # Own blocks are a twelfth, more than the last steps are asked for.
        assert 0.22 < handle.stats().cost < 0.3

    def test_a_total_is_judged_by_the_steps_of_the_run(self, pipe: Any, path: Path) -> None:
        """Of the four recorded steps a dense first one would cost a quarter by itself."""
        given = {"total": 0.24, "warmup_frac": 1}
        with jali.cached_processor_mode(pipe, path, **given) as handle:
            tiny.generate(pipe, CALL, steps=8)
        assert 0.22 < handle.stats().cost < 0.3
        with (
            pytest.raises(ValueError, match=r"total of 0\.24 cannot be reached in 4 steps"),
            jali.cached_processor_mode(pipe, path, **given),
        ):
            tiny.generate(pipe, CALL, steps=4)

    def test_samples_of_a_batch_share_a_table_and_not_a_price(self) -> None:
        book = books.make_errors(None)
        site, method, tables = Site(1, 4, 1, 2), Cached(book, Budget(0.3)), Tables()
        alone = method.plan(query_of(book, site)).levels
        batch = method.plan(query_of(book, site, batch=3, tables=tables))
        assert batch.levels.shape[0] == 1
        assert torch.equal(batch.levels, alone)
        again = method.plan(query_of(book, replace(site, branch="uncond"), batch=2, tables=tables))
        assert torch.equal(again.levels, alone)
        assert tables.made == 1
        padding = KeyPadding(length=torch.tensor([108, 50], dtype=torch.int32))
        padded = method.plan(query_of(book, site, batch=2, padding=padding)).levels
        assert torch.equal(padded[:1], alone)
        short = KeyPadding(length=torch.tensor([50], dtype=torch.int32))
        assert torch.equal(padded[1:], method.plan(query_of(book, site, padding=short)).levels)

    def test_ranks_have_their_own_heads_and_one_price(self) -> None:
        header = replace(books.OF_RD, heads=4)
        x = books.errors(header)
        x[:, :, :, 2:] = x[:, :, :, :2]  # so that each rank's work is half of all
        book = write_book(None, header, lambda place, layer: x[place, layer])
        assert isinstance(book, ErrorBook)
        whole = book.plan(0.3, 2, 1).levels

        class Two(Ranks):
            def sum(self, work: torch.Tensor) -> torch.Tensor:
                return 2 * work

        for rank in (0, 1):
            method = across_ranks(Schedule(Cached(book, Budget(0.3))), Two(2, rank, None))
            site, q = Site(2, 4, 1, 2), torch.randn(1, 2, 108, 16)
            for tables in (None, Tables()):
                got = jali.attend(
                    q, q, q, method=method, grid=book.grid, site=site, backend="reference",
                    tables=tables,
                )  # fmt: skip
                assert torch.equal(got.plan.levels, whole[:, 2 * rank : 2 * rank + 2])

    def test_costs_are_those_of_its_plans(self) -> None:
        book = books.make_errors(None, branches=("cond", "uncond"))
        costs = book.costs(0.4)
        assert costs.shape == (4, 2, 2, 3)
        for step, layer, branch in np.ndindex(4, 2, 2):
            plan = book.plan(0.4, step, layer, book.header.branches[branch])
            assert np.allclose(costs[step, layer, branch], plan.costs[0].numpy())

    @pytest.mark.parametrize("backend", ["reference", "torch"])
    def test_with_backends_that_pool(self, backend: str) -> None:
        book = books.make_errors(None)
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 3, 108, 16, generator=g) for _ in range(3))
        got = jali.attend(
            q, k, v, method=Cached(book, Budget(0.4)), grid=book.grid, site=Site(1, 4, 1, 2),
            backend=backend,
        )  # fmt: skip
        exact = jali.attend(
            q, k, v, method=Cached(book, Budget(0.4)), grid=book.grid, site=Site(1, 4, 1, 2),
            backend="reference",
        )  # fmt: skip
        assert torch.allclose(got.out, exact.out, atol=1e-5)


def test_errors_of_some_prompts_tell_what_another_one_needs() -> None:
    """What prompts have in common is in the mean: better than chance, and not far from rd."""
    g = torch.Generator().manual_seed(0)
    shared = torch.randn(3, 1, 2, 768, 16, generator=g).cumsum(3)
    shared = shared / shared.std((1, 2, 3, 4), keepdim=True) * 2

    def prompt() -> Any:
        return tuple(shared + 0.3 * torch.randn(shared.shape, generator=g))

    grid = TokenGrid.video(3, 16, 16)
    rd = RateDistortion(0.2, samples=8, levels=ALL_LEVELS, q_block=32, k_block=32, probes=0)
    layout = block_layout(grid, blocks=Blocks(32, 32))
    seen = [rd.table(Query(q, k, layout, Site(), 0.25, v=v)) for q, k, v in (prompt(), prompt())]
    header = replace(
        books.OF_RD, grid=grid, blocks=Blocks(32, 32), layers=1, heads=2, noise=(1.0,),
        transformers=("transformer",), errors=Errors(rd.codes, 1.0),
    )  # fmt: skip
    mean = torch.stack([table.errors() for table in seen]).mean(0)
    book = write_book(None, header, lambda *_: mean)
    q, k, v = prompt()
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    blocks = {"q_block": 32, "k_block": 32}

    def error(method: Any) -> float:
        out = jali.attend(q, k, v, method=method, grid=grid)
        assert out.plan.cost == pytest.approx(0.2, abs=0.02)
        return float((out.out - dense).norm() / dense.norm())

    replayed, online = error(Cached(book, Budget(0.2))), error(rd)
    chance = error(Random(Budget(0.2), **blocks))
    assert replayed < 0.5 * chance
    assert replayed < 1.5 * online


class TestRefused:
    def test_what_does_not_fit(self) -> None:
        book = books.make_errors(None)
        q = torch.randn(1, 2, 108, 16)

        def call(grid: Any, site: Site) -> None:
            jali.attend(q, q, q, method=Cached(book), grid=grid, site=site)

        for grid, site, words in (
            (book.grid, Site(0, 9, 0, 2), "3 heads, this call has 2 heads"),
            (book.grid, Site(0, 4, 0, 5), "2 layers, this transformer has 5"),
            (TokenGrid.video(3, 6, 6), Site(0, 4, 0, 2), "grid 3×4×9, this call has 3×6×6"),
            (book.grid, Site(0, 4, 0, 2, transformer="transformer_2"), "belongs to transformer in"),
        ):
            with pytest.raises(ValueError, match=words):
                call(grid, site)
        other = Site(0, 9, 0, 2, transformer="transformer_2")
        with pytest.raises(ValueError, match=r"book is of transformer, and this step is of"):
            book.place_of(other)

    def test_another_model(self, path: Path) -> None:
        with (
            pytest.raises(ValueError, match=r"another model.*configuration"),
            jali.cached_processor_mode(tiny.wan(layers=2), path),
        ):
            pass

    def test_another_schedule(self, path: Path, caplog: pytest.LogCaptureFixture) -> None:
        other = tiny.wan()
        other.scheduler = tiny.flow(shift=2.0)
        with (
            pytest.raises(ValueError, match=r"noise level.*flow shift\?\); calibrate with this"),
            jali.cached_processor_mode(other, path, **ALL),
        ):
            tiny.generate(other, CALL, steps=STEPS)
        with (
            caplog.at_level(logging.WARNING, "jali"),
            jali.cached_processor_mode(other, path, **ALL),
        ):
            tiny.generate(other, CALL, steps=6)
        assert sum("flow shift" in r.message for r in caplog.records) == 1

    def test_what_only_importance_can(self) -> None:
        book = books.make_errors(None)
        for call, words in (
            (lambda: book.importance(0, 0), "holds errors and no importance"),
            (lambda: book.bits(0.5, 0), "holds errors and no importance"),
            (lambda: book.resample(steps=9), "serves any number of steps"),
            (lambda: book.resample((2, 4, 9)), "calibrate at that size"),
            (lambda: book.plan(1.5, 0, 0), "budget"),
            (lambda: book.derive(-1), "budget"),
        ):
            with pytest.raises(ValueError, match=words):
                call()
        with pytest.raises(IndexError):
            book.plan(0.5, 4, 0)

    def test_merge(self) -> None:
        a = books.make_errors(None)
        b = books.make_errors(None, seed=1, prompts=("b" * 32, "c" * 32))
        both = a.merge(b)
        assert isinstance(both, ErrorBook)
        assert len(both.header.prompts) == 3
        want = encode((a.slab(1, 1) + 2 * b.slab(1, 1)) / 3, a.errors.levels).errors()
        assert torch.allclose(both.slab(1, 1), want, rtol=0.2)
        for other, words in (
            (books.make(None, prompts=("b" * 32,)), "importance, the other one the errors of rd"),
            (books.make_errors(None, prompts=("b" * 32,), errors=Errors((2, SKIP), 0.3)), "errors"),
            (a, "count twice"),
        ):
            with pytest.raises(ValueError, match=words):
                a.merge(other)


def test_a_table_is_what_rd_keeps() -> None:
    book = books.make_errors(None)
    table = book.table(Site(0, 4, 0, 2))
    assert isinstance(table, ErrorTable)
    assert table.codes.shape == (1, 3, 7, 14, 5)
    assert table.top.shape == (1, 3)
    assert table.levels == (2, 4, 8, MEAN, SKIP)
