"""Replay: the same plans for every prompt, and nothing that does not fit."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import books
import pytest
import tiny
import torch

import jali
from jali import Budget, Schedule, Site, TokenGrid
from jali.backends import BACKENDS, Task
from jali.integration.modes import Handle
from jali.integration.parallel import Ranks, across_ranks
from jali.integration.processor import SparseProcessor
from jali.maskbook import BookError, MaskBook
from jali.maskbook.cached import Cached
from jali.maskbook.calibration import calibrate
from jali.maskbook.replay import Replay
from jali.tokens.layout import Blocks

CALL = {**tiny.WAN_CALL, "height": 128, "width": 128, "num_frames": 9}
RECORD = {k: v for k, v in CALL.items() if k != "prompt"}
ALL = {"warmup_frac": 0, "dense_first_layer": False}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan()


@pytest.fixture(scope="module")
def path(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """3×8×8 tokens, 3 steps, 3 layers of 2 heads, blocks of 32 × 16."""
    file = tmp_path_factory.mktemp("book") / "wan.safetensors"
    calibrate(pipe, ["a cat", "a dog"], file, steps=3, blocks=Blocks(32, 16), **RECORD)
    return file


def sparse_rows(handle: Handle) -> list[Any]:
    return [row for row in handle.stats().rows if row.reason is None]


class TestMode:
    def test_replays_what_the_book_says(self, pipe: Any, path: Path) -> None:
        book = MaskBook.open(path)
        seen = []
        with jali.cached_processor_mode(pipe, path, budget=0.5, **ALL) as handle:
            assert isinstance(handle, Handle)
            handle.run.watch = seen.append
            tiny.generate(pipe, CALL)
        assert len(seen) == 18
        for call in seen:
            want = book.plan(0.5, call.site.step, call.site.layer)
            assert torch.equal(call.result.plan.levels, want.levels)
        assert handle.stats().method == "cached"
        assert handle.stats().budget == 0.5
        assert handle.stats().sparse_cost == pytest.approx(book.cost(0.5))

    def test_another_prompt_gets_the_same_plans(self, pipe: Any, path: Path) -> None:
        plans = []
        with jali.cached_processor_mode(pipe, path, **ALL) as handle:
            for prompt, seed in (("a dog", 1), ("a bird", 7)):
                seen: list[Any] = []
                handle.run.watch = seen.append
                tiny.generate(pipe, {**CALL, "prompt": prompt}, seed=seed)
                plans.append([call.result.plan.levels for call in seen])
        assert all(torch.equal(a, b) for a, b in zip(*plans, strict=True))

    def test_probes_correct_what_a_book_leaves_out(self, pipe: Any, path: Path) -> None:
        def lacking(probes: int) -> tuple[Any, float]:
            seen: list[Any] = []
            with jali.cached_processor_mode(pipe, path, 0.5, probes=probes, **ALL) as handle:
                handle.run.watch = seen.append
                tiny.generate(pipe, CALL)
            call = seen[0]
            applied = call.q.shape[3] / (2 * 192) if probes else 0
            assert call.result.planning == probes / 192 + applied
            dense = jali.attend(call.q, call.k, call.v, method="dense", grid=call.grid).out
            return handle, float((call.result.out - dense).norm() / dense.norm())

        (plain, before), (corrected, after) = lacking(0), lacking(96)
        assert after < before
        assert plain.stats().sparse_cost == corrected.stats().sparse_cost
        with (
            pytest.raises(ValueError, match="probes must be at least 0, got -1"),
            jali.cached_processor_mode(pipe, path, probes=-1),
        ):
            pass

    def test_the_usual_schedule(self, pipe: Any, path: Path) -> None:
        with jali.cached_processor_mode(pipe, path) as handle:
            tiny.generate(pipe, CALL)
        stats = handle.stats()
        assert stats.dense == {"first steps": 6, "layer 0": 4}
        assert len(sparse_rows(handle)) == 8

    def test_everything_is_put_back(self, pipe: Any, path: Path) -> None:
        before = tiny.generate(pipe, CALL)
        kinds = {n: type(p) for n, p in pipe.transformer.attn_processors.items()}
        with jali.cached_processor_mode(pipe, path, 0.5, **ALL):
            tiny.generate(pipe, CALL)
        with pytest.raises(KeyboardInterrupt), jali.cached_processor_mode(pipe, path, 0.5):
            raise KeyboardInterrupt
        assert {n: type(p) for n, p in pipe.transformer.attn_processors.items()} == kinds
        assert torch.equal(tiny.generate(pipe, CALL), before)

    def test_at_full_budget_it_is_dense(self, pipe: Any, path: Path) -> None:
        dense = tiny.generate(pipe, CALL)
        with jali.cached_processor_mode(pipe, path, 1.0, **ALL) as handle:
            full = tiny.generate(pipe, CALL)
        assert handle.stats().sparse_cost == 1.0
        assert torch.allclose(full, dense, atol=1e-4)

    def test_a_budget_that_was_not_asked_is_derived_once(
        self, pipe: Any, path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from jali.maskbook import book as module

        calls = []
        real = module.keep_bits
        monkeypatch.setattr(module, "keep_bits", lambda *a: calls.append(1) or real(*a))
        opened = MaskBook.open(path)
        with jali.cached_processor_mode(pipe, opened, 0.6, **ALL) as handle:
            assert len(calls) == 9  # before anything ran
            for _ in range(2):
                tiny.generate(pipe, CALL)
        assert len(calls) == 9
        assert handle.stats().sparse_cost == pytest.approx(0.6, abs=0.05)

    def test_two_experts(self, tmp_path: Path) -> None:
        both = tiny.wan(experts=2)
        file = tmp_path / "b.safetensors"
        calibrate(both, ["a cat"], file, steps=4, blocks=Blocks(32, 16), **RECORD)
        with jali.cached_processor_mode(both, file, 0.5, **ALL) as handle:
            tiny.generate(both, CALL, steps=4)
        assert {row.transformer for row in sparse_rows(handle)} == {"transformer", "transformer_2"}
        both.register_to_config(boundary_ratio=0.3)
        with (
            pytest.raises(
                ValueError, match=r"step \d belongs to transformer_2 in the book and to "
            ),
            jali.cached_processor_mode(both, file, 0.5, **ALL),
        ):
            tiny.generate(both, CALL, steps=4)
        with (
            pytest.raises(ValueError, match=r"this pipeline has transformer$"),
            jali.cached_processor_mode(tiny.wan(), file),
        ):
            pass

    def test_branches_apart(self, pipe: Any, tmp_path: Path) -> None:
        file = tmp_path / "b.safetensors"
        book = calibrate(
            pipe, ["a cat"], file, steps=2, blocks=Blocks(32, 16), branches="separate", **RECORD
        )
        seen: list[Any] = []
        with jali.cached_processor_mode(pipe, file, 0.5, **ALL) as handle:
            handle.run.watch = seen.append
            tiny.generate(pipe, CALL, steps=2)
        assert {call.site.branch for call in seen} == {"cond", "uncond"}
        for call in seen:
            want = book.plan(0.5, call.site.step, call.site.layer, call.site.branch)
            assert torch.equal(call.result.plan.levels, want.levels)

    def test_a_bare_transformer(self, path: Path) -> None:
        model = tiny.wan().transformer
        text = torch.randn(1, 16, 32)
        with torch.no_grad(), jali.cached_processor_mode(model, path, **ALL) as handle:
            for t in (900.0, 600.0, 300.0):
                model(torch.randn(1, 16, 3, 16, 16), torch.tensor([t]), text)
        assert len(sparse_rows(handle)) == 9


class TestMethod:
    def test_with_a_schedule_of_budgets(self, pipe: Any, path: Path) -> None:
        book = MaskBook.open(path)
        method = Schedule(Cached(book), dense_layers=(-1,), budgets=(0.7, 0.5, 0.3))
        with jali.sparse_processor_mode(pipe, method=method) as handle:
            tiny.generate(pipe, CALL)
        cost = handle.stats().by("step", "layer")
        for step, budget in enumerate((0.7, 0.5, 0.3)):
            want = book.costs(budget)[step].mean(-1)[:, 0]
            for layer in (0, 1):
                assert cost[step, layer] == pytest.approx(float(want[layer]))
            assert cost[step, 2] == 1.0

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_with_every_backend(self, backend: str) -> None:
        """Each of those that can run here; on a GPU that is all but one, with larger blocks."""
        gpu = torch.cuda.is_available()
        device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
        book = books.make(None)
        g = torch.Generator().manual_seed(0)
        q, k, v = (torch.randn(2, 3, 108, 64, generator=g).to(device, dtype) for _ in range(3))
        task = Task(q.device, dtype, 64, 3, 3, 108, 108)
        if reasons := BACKENDS[backend].why_not(task):
            pytest.skip(f"{backend} {'; '.join(reasons)}")
        got = jali.attend(
            q, k, v, method=Cached(book, Budget(0.5)), grid=book.grid, site=Site(1, 4, 1, 2),
            backend=backend,
        )  # fmt: skip
        plan = book.plan(0.5, 1, 1).coarsen(got.executed.blocks)
        assert torch.equal(got.executed.levels.cpu(), plan.levels)
        mask = (plan.levels[0] != 0).repeat_interleave(plan.blocks.q, 1)[:, :108]
        mask = mask.repeat_interleave(plan.blocks.k, 2)[:, :, :108]
        exact = torch.nn.functional.scaled_dot_product_attention(
            q.cpu().float(), k.cpu().float(), v.cpu().float(), attn_mask=mask
        )
        error = (got.out.cpu().float() - exact).norm() / exact.norm()
        assert float(error) <= BACKENDS[backend].tolerance[dtype]

    def test_coarsened_to_larger_blocks(self) -> None:
        plan = books.make(None).plan(0.3, 0, 0)
        coarse = plan.coarsen(Blocks(32, 32))
        fine = coarse.coarsen(plan.blocks)
        assert bool((fine.levels >= plan.levels).all())
        assert coarse.cost >= plan.cost

    def test_ranks_have_their_own_heads(self) -> None:
        book = books.make(None, heads=4)
        whole = book.plan(0.5, 2, 1).levels
        for rank in (0, 1):
            method = across_ranks(Schedule(Cached(book, Budget(0.5))), Ranks(2, rank, None))
            q = torch.randn(1, 2, 108, 16)
            got = jali.attend(
                q, q, q, method=method, grid=book.grid, site=Site(2, 4, 1, 2), backend="reference"
            )
            assert torch.equal(got.plan.levels, whole[:, 2 * rank : 2 * rank + 2])

    @pytest.mark.parametrize(
        ("given", "error"),
        [
            (("x.safetensors",), TypeError),
            ((0.5,), TypeError),
        ],
    )
    def test_needs_a_book(self, given: tuple[Any, ...], error: type[Exception]) -> None:
        with pytest.raises(error, match="MaskBook"):
            Cached(*given)

    def test_a_budget_without_importance(self) -> None:
        book = books.make(None, importance=False)
        assert Cached(book, Budget(0.3)).budget.mean == 0.3
        with pytest.raises(ValueError, match="without importance"):
            Cached(book, Budget(0.4))
        with pytest.raises(ValueError, match="mean share alone"):
            Cached(book, Budget(0.3, floor=0.2))


class TestRefused:
    def test_a_pickle(self, pipe: Any) -> None:
        with (
            pytest.raises(BookError, match=r"jali calibrate"),
            jali.cached_processor_mode(pipe, "masks/x.pt", budget=0.5),
        ):
            pass

    def test_another_model(self, path: Path) -> None:
        for other, match in (
            (tiny.wan(layers=2), "another model.*configuration"),
            (tiny.cogvideox(), "WanTransformer3DModel, this is a CogVideoX"),
        ):
            with pytest.raises(ValueError, match=match), jali.cached_processor_mode(other, path):
                pass
            assert not any(
                isinstance(p, SparseProcessor) for p in other.transformer.attn_processors.values()
            )

    def test_other_weights(self, path: Path) -> None:
        other = tiny.wan()
        with torch.no_grad():
            for p in other.transformer.parameters():
                p.mul_(1.5)
        with (
            pytest.raises(ValueError, match=r"weights of transformer are not.*other_weights=True"),
            jali.cached_processor_mode(other, path),
        ):
            pass
        with jali.cached_processor_mode(other, path, other_weights=True, **ALL) as handle:
            tiny.generate(other, CALL)
        assert len(sparse_rows(handle)) == 18

    def test_another_precision_is_the_same_model(self, path: Path) -> None:
        other = tiny.wan()
        other.transformer.to(torch.float16)
        with jali.cached_processor_mode(other, path):
            pass

    @pytest.mark.parametrize(
        ("call", "steps", "match"),
        [
            ({"height": 256}, 3, r"grid 3×8×8, this call has 3×16×8.*--grid 3x16x8"),
            ({"num_frames": 17}, 3, r"grid 3×8×8, this call has 5×8×8.*resample"),
            ({}, 4, r"for 3 steps, this run has 4.*resample.*--steps 4"),
        ],
    )
    def test_grid_and_steps(
        self, pipe: Any, path: Path, call: dict[str, Any], steps: int, match: str
    ) -> None:
        with (
            pytest.raises(ValueError, match=match),
            jali.cached_processor_mode(pipe, path, **ALL),
        ):
            tiny.generate(pipe, {**CALL, **call}, steps=steps)
        assert not any(
            isinstance(p, SparseProcessor) for p in pipe.transformer.attn_processors.values()
        )

    def test_another_schedule(self, path: Path) -> None:
        other = tiny.wan()
        other.scheduler = tiny.flow(shift=2.0)
        with (
            pytest.raises(ValueError, match=r"noise level 0\.8.*here at 0\.6.*flow shift"),
            jali.cached_processor_mode(other, path, **ALL),
        ):
            tiny.generate(other, CALL)

    def test_a_resampled_schedule_is_only_warned_of(
        self, path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        other = tiny.wan()
        other.scheduler = tiny.flow(shift=2.0)
        book = MaskBook.open(path).resample(steps=4)
        with (
            caplog.at_level(logging.WARNING, "jali"),
            jali.cached_processor_mode(other, book, **ALL),
        ):
            tiny.generate(other, CALL, steps=4)
        assert sum("flow shift" in r.message for r in caplog.records) == 1

    def test_heads_and_layers(self) -> None:
        book = books.make(None)
        q = torch.randn(1, 2, 108, 16)
        with pytest.raises(ValueError, match="3 heads, this call has 2 heads"):
            jali.attend(q, q, q, method=Cached(book), grid=book.grid, site=Site(0, 4, 0, 2))
        with pytest.raises(ValueError, match="2 layers, this transformer has 5"):
            jali.attend(q, q, q, method=Cached(book), grid=book.grid, site=Site(0, 4, 0, 5))

    @pytest.mark.parametrize("budget", [1.5, -1, "0.5", True])
    def test_budgets(self, pipe: Any, path: Path, budget: Any) -> None:
        with (
            pytest.raises((ValueError, TypeError), match="budget"),
            jali.cached_processor_mode(pipe, path, budget),
        ):
            pass

    def test_damage_is_found_where_it_is_read(self, pipe: Any, path: Path, tmp_path: Path) -> None:
        book = MaskBook.open(path)
        end = book.header.tensors()[f"bits.{book.budgets.index(0.5)}"]["data_offsets"][1]
        raw = bytearray(path.read_bytes())
        raw[len(raw) - sum(book.header.sizes().values()) + end - 1] ^= 1
        bad = tmp_path / "bad.safetensors"
        bad.write_bytes(raw)
        with (
            pytest.raises(BookError, match="damaged: the bits of step 2, layer 2"),
            jali.cached_processor_mode(pipe, bad, 0.5, **ALL),
        ):
            tiny.generate(pipe, CALL)
        with jali.cached_processor_mode(pipe, bad, 0.3, **ALL):
            tiny.generate(pipe, CALL)  # another budget is whole


class TestResampled:
    def test_another_size_and_number_of_steps(self, pipe: Any, path: Path) -> None:
        book = MaskBook.open(path).resample((5, 8, 16), 5)
        with jali.cached_processor_mode(pipe, book, 0.5, **ALL) as handle:
            tiny.generate(pipe, {**CALL, "width": 256, "num_frames": 17}, steps=5)
        assert len(sparse_rows(handle)) == 30
        assert handle.stats().sparse_cost == pytest.approx(0.5, abs=0.02)


class TestReplay:
    def test_two_steps_at_most(self) -> None:
        book = books.make(None)
        replay = Replay(book, torch.device("cpu"))
        for step in (0, 1, 2, 3, 0, 2, 2, 1):
            for layer in range(2):
                got = replay.bits(0.5, step, layer, 0)
                assert torch.equal(got, torch.from_numpy(book.bits(0.5, step)[layer, 0].copy()))
        held = {buffer.key for buffer in replay._buffers}
        assert len(held) == 2
        replay.close()

    def test_the_next_step_is_on_its_way(self) -> None:
        book = books.make(None)
        replay = Replay(book, torch.device("cpu"))
        replay.prefetch(0.5, 1)
        replay.bits(0.5, 1, 0, 0)
        assert {buffer.key for buffer in replay._buffers} == {(0.5, 1), (0.5, 2)}
        replay.bits(0.5, 3, 0, 0)  # after the last step comes the first one that was asked for
        assert {buffer.key for buffer in replay._buffers} == {(0.5, 3), (0.5, 1)}
        replay.close()

    def test_budgets_side_by_side(self) -> None:
        book = books.make(None)
        replay = book.replay(torch.device("cpu"))
        for budget in (0.3, 0.5, 0.3):
            got = replay.bits(budget, 1, 1, 0)
            assert torch.equal(got, torch.from_numpy(book.bits(budget, 1)[1, 0].copy()))
        book.close()
        assert book.replay(torch.device("cpu")) is not replay

    def test_a_failed_load_is_said_and_can_be_tried_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        book = books.make(None)
        replay = Replay(book, torch.device("cpu"))

        def broken(*_: Any) -> None:
            raise BookError("damaged")

        with monkeypatch.context() as patch:
            patch.setattr(book, "bits", broken)
            with pytest.raises(BookError, match="damaged"):
                replay.bits(0.5, 0, 0, 0)
        assert replay.bits(0.5, 0, 0, 0).shape == (3, 7, 2)
        replay.close()


def test_public_names() -> None:
    assert jali.MaskBook is MaskBook
    assert jali.calibrate is calibrate
    assert callable(jali.cached_processor_mode)
    assert TokenGrid is jali.TokenGrid
