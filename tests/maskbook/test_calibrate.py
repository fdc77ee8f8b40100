"""Calibration of real pipelines: what is recorded, and that nothing gets lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch

import jali
from jali.integration.transformer import AttentionCall
from jali.maskbook import MaskBook
from jali.maskbook.calibration import Antidiagonal, BlockMeans, Progress, Sampled, calibrate
from jali.maskbook.quantization import ERROR
from jali.methods import FastestDense, Query
from jali.tokens.layout import Blocks, block_layout
from jali.tokens.order import Tiled

BLOCKS = Blocks(64, 32)
WAN = {k: v for k, v in tiny.WAN_CALL.items() if k != "prompt"}
SMALL = {**WAN, "height": 128, "width": 128, "num_frames": 9}  # 3×8×8 tokens
ALONE = {**SMALL, "guidance_scale": 1.0}  # no second branch


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan()


def record(pipe: Any, path: Path, prompts: list[str] | None = None, **more: Any) -> MaskBook:
    given = {"steps": 3, "blocks": BLOCKS, **SMALL, **more}
    return calibrate(pipe, prompts or ["a cat"], path / "book.safetensors", **given)


def seen_in(pipe: Any, prompt: str, seed: int, call: dict[str, Any], steps: int = 3) -> list[Query]:
    """Every attention call of a dense run, as a method would get it."""
    found: list[Query] = []

    def watch(seen: AttentionCall) -> None:
        assert not isinstance(seen.grid, str)
        layout = block_layout(seen.grid, None, None, BLOCKS)
        scale = seen.scale or seen.q.shape[-1] ** -0.5
        found.append(Query(seen.q.clone(), seen.k.clone(), layout, seen.site, scale, seen.padding))

    handle = jali.apply_sparse_attention(pipe, FastestDense())
    handle.run.watch = watch
    try:
        pipe(
            **{**call, "prompt": prompt, "num_inference_steps": steps, "output_type": "latent",
               "generator": torch.Generator().manual_seed(seed)}
        )  # fmt: skip
    finally:
        handle.remove()
    return found


class TestSamePlansAsOnline:
    """A book of one prompt, replayed on that prompt's own q and k, is online entropy."""

    @pytest.mark.parametrize("branches", ["mean", "separate"])
    def test_wan(self, pipe: Any, tmp_path: Path, branches: str) -> None:
        call = ALONE if branches == "mean" else SMALL
        book = record(pipe, tmp_path, branches=branches, seed=5, **call)
        queries = seen_in(pipe, "a cat", 5, call)
        assert len(queries) == 9 if branches == "mean" else 18
        for query in queries:
            site = query.site
            for budget in book.budgets:
                online = jali.Entropy(jali.Budget(budget), q_block=64, k_block=32).plan(query)
                cached = book.plan(budget, site.step, site.layer, site.branch)
                assert torch.equal(online.levels, cached.levels)

    def test_with_text_and_padding(self, tmp_path: Path) -> None:
        pipe = tiny.hunyuan()
        call = {k: v for k, v in tiny.HUNYUAN_CALL.items() if k != "prompt"}
        book = calibrate(
            pipe, ["a cat"], tmp_path / "b", steps=2, blocks=BLOCKS, budgets=[0.4], **call
        )
        assert "text" in str(book.grid)
        queries = seen_in(pipe, "a cat", 0, call, steps=2)
        assert queries[0].padding is not None
        for query in queries:
            online = jali.Entropy(jali.Budget(0.4), q_block=64, k_block=32).plan(query)
            cached = book.plan(0.4, query.site.step, query.site.layer)
            assert torch.equal(online.levels, cached.levels)


class TestRecorded:
    def test_the_mean_over_branches_and_prompts(self, pipe: Any, tmp_path: Path) -> None:
        book = record(pipe, tmp_path, ["a cat", "a dog"], seed=1)
        sums: dict[tuple[int, int], list[torch.Tensor]] = {}
        for i, prompt in enumerate(("a cat", "a dog")):
            for query in seen_in(pipe, prompt, 1 + i, SMALL):
                key = (query.site.step, query.site.layer)
                sums.setdefault(key, []).append(Sampled()(query)[0])
        assert len(sums) == 9
        for (step, layer), parts in sums.items():
            assert len(parts) == 4
            want = torch.stack(parts).mean(0)
            assert torch.allclose(book.importance(step, layer), want, rtol=1.1 * ERROR)

    def test_what_it_says_of_itself(self, pipe: Any, tmp_path: Path) -> None:
        book = record(pipe, tmp_path, ["a cat", "a dog"], budgets=(0.5, 0.2))
        h = book.header
        assert (str(h.grid), h.steps, h.layers, h.heads) == ("3×8×8", 3, 3, 2)
        assert h.noise_kind == "sigma"
        assert h.noise[0] == pytest.approx(1.0)
        assert list(h.noise) == sorted(h.noise, reverse=True)
        assert h.noise == pytest.approx(pipe.scheduler.sigmas[:3].tolist())
        assert h.budgets == (0.2, 0.5)
        assert h.costs == pytest.approx((1 / 3, 0.5))  # a query block's own are two of six
        assert len(set(h.prompts)) == 2
        assert h.scorer == "sampled-4"
        assert "a cat" not in h.text()
        assert h.settings["height"] == 128
        assert os.listdir(tmp_path) == ["book.safetensors"]

    def test_two_experts(self, tmp_path: Path) -> None:
        pipe = tiny.wan(experts=2)
        book = record(pipe, tmp_path, steps=4)
        names = book.header.transformers
        assert set(names) == {"transformer", "transformer_2"}
        assert sorted(names) == list(names)  # the high-noise expert first
        assert set(book.header.fingerprints) == set(names)

    def test_both_branches_in_one_batch(self, tmp_path: Path) -> None:
        pipe = tiny.cogvideox()
        call = {k: v for k, v in tiny.COG_CALL.items() if k != "prompt"}
        given = {**call, "steps": 2, "blocks": BLOCKS}
        book = calibrate(pipe, ["a cat"], tmp_path / "a", **given)
        assert book.header.noise_kind == "timestep"
        assert str(book.grid).startswith("16 text")
        with pytest.raises(ValueError, match=r"'batched'.*branches='mean'"):
            calibrate(pipe, ["a cat"], tmp_path / "b", branches="separate", **given)
        assert os.listdir(tmp_path) == ["a"]

    @pytest.mark.parametrize("scorer", [Sampled(2), Antidiagonal(8), BlockMeans()], ids=str)
    def test_any_scorer(self, pipe: Any, tmp_path: Path, scorer: Any) -> None:
        book = record(pipe, tmp_path, scorer=scorer, **ALONE)
        assert book.header.scorer == scorer.name
        query = seen_in(pipe, "a cat", 0, ALONE)[4]
        want = scorer(query)[0]
        got = book.importance(query.site.step, query.site.layer)
        assert torch.allclose(got, want, rtol=1.1 * ERROR, atol=1e-6)

    def test_a_scorer_of_ones_own(self, pipe: Any, tmp_path: Path) -> None:
        class First:
            name = "first"

            def __call__(self, query: Query) -> torch.Tensor:
                out = torch.zeros(*query.q.shape[:2], query.layout.M, query.layout.N)
                out[..., 0] = self.value
                return out

            value = 1.0

        book = record(pipe, tmp_path, scorer=First(), **ALONE)
        assert bool((book.plan(0.7, 0, 1).levels[..., 0] == 1).all())
        bad = First()
        bad.value = float("nan")
        with pytest.raises(ValueError, match="first gave importance"):
            record(pipe, tmp_path / "bad", scorer=bad, **ALONE)
        assert os.listdir(tmp_path / "bad") == []

    def test_another_order(self, pipe: Any, tmp_path: Path) -> None:
        book = record(pipe, tmp_path, order=Tiled((1, 4, 4)), **ALONE)
        assert book.header.order == Tiled((1, 4, 4))
        assert book.layout().q.index is not None

    def test_by_model_name(self, tmp_path: Path) -> None:
        pipe = tiny.wan()
        book = calibrate(
            pipe, ["a cat"], tmp_path / "b", model="wan-t2v-1.3b", steps=2, blocks=BLOCKS,
            height=128, width=128, num_frames=9, max_sequence_length=16,
        )  # fmt: skip
        assert book.header.model == "wan-t2v-1.3b"
        assert book.steps == 2

    def test_the_pipeline_is_as_it_was(self, pipe: Any, tmp_path: Path) -> None:
        before = tiny.generate(pipe, {**tiny.WAN_CALL, **SMALL})
        kinds = {n: type(p) for n, p in pipe.transformer.attn_processors.items()}
        record(pipe, tmp_path)
        assert {n: type(p) for n, p in pipe.transformer.attn_processors.items()} == kinds
        assert torch.equal(tiny.generate(pipe, {**tiny.WAN_CALL, **SMALL}), before)

    def test_a_backend_the_user_chose_records_too(self, tmp_path: Path) -> None:
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

        active = Registry._active_backend
        pipe = tiny.wan()
        try:
            pipe.transformer.set_attention_backend("_native_math")
            assert record(pipe, tmp_path).steps == 3
            for processor in pipe.transformer.attn_processors.values():
                assert processor._attention_backend.value == "_native_math"
        finally:
            Registry._active_backend = active

    def test_progress(self, pipe: Any, tmp_path: Path) -> None:
        seen: list[Progress] = []
        record(pipe, tmp_path, ["a", "b"], progress=seen.append)
        recorded = [(p.prompt, p.step) for p in seen if not p.writing]
        assert recorded == [(p, s) for p in range(2) for s in range(3)]
        assert [p.step for p in seen if p.writing] == [1, 2, 3]


PROMPTS = ["a cat", "a dog", "a bird"]


@pytest.fixture(scope="module")
def whole(pipe: Any, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """The book of a calibration that nothing interrupts."""
    path = tmp_path_factory.mktemp("whole")
    record(pipe, path, PROMPTS)
    return (path / "book.safetensors").read_bytes()


class TestResume:
    @pytest.mark.parametrize(
        ("prompt", "step", "writing", "kept"),
        [(0, 1, False, 0), (1, 0, False, 1), (2, 2, False, 2), (3, 2, True, 3)],
    )
    def test_killed_and_gone_on_with(
        self, pipe: Any, tmp_path: Path, whole: bytes, prompt: int, step: int, writing: bool,
        kept: int,
    ) -> None:  # fmt: skip
        def die(at: Progress) -> None:
            if (at.prompt, at.step, at.writing) == (prompt, step, writing):
                os.kill(os.getpid(), signal.SIGKILL)

        child = os.fork()
        if child == 0:
            record(pipe, tmp_path, PROMPTS, progress=die)
            os._exit(0)
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status)
        assert not (tmp_path / "book.safetensors").exists()
        if kept:
            with pytest.raises(ValueError, match=f"unfinished calibration of {kept} prompts"):
                record(pipe, tmp_path, PROMPTS)
        ran: list[Progress] = []
        record(pipe, tmp_path, PROMPTS, resume=True, progress=ran.append)
        assert {p.prompt for p in ran if not p.writing} == set(range(kept, 3))
        assert (tmp_path / "book.safetensors").read_bytes() == whole
        assert os.listdir(tmp_path) == ["book.safetensors"]

    def test_a_finished_one_is_not_made_again(self, pipe: Any, tmp_path: Path) -> None:
        record(pipe, tmp_path, ["a cat"])
        ran: list[Progress] = []
        record(pipe, tmp_path, ["a cat"], resume=True, progress=ran.append)
        assert ran == []
        record(pipe, tmp_path, ["a cat"], resume=True, progress=ran.append, budgets=[0.4])
        assert ran != []

    def test_another_call_is_refused(self, pipe: Any, tmp_path: Path) -> None:
        def stop(at: Progress) -> None:
            if at.prompt == 1:
                raise InterruptedError

        with pytest.raises(InterruptedError):
            record(pipe, tmp_path, ["a cat", "a dog"], progress=stop)
        for changes, match in (
            ({"prompts": ["a cat", "a cow"]}, "begun with prompts"),
            ({"seed": 9}, r"begun with (prompts|seed)"),
            ({"steps": 4}, r"steps = 3, and this call has 4"),
            ({"height": 256}, r"argument height = 128, and this call has 256"),
            ({"branches": "separate"}, "branches"),
            ({"blocks": Blocks(64, 64)}, "blocks"),
            ({"scorer": Sampled(8)}, "scorer"),
        ):
            given = {"prompts": ["a cat", "a dog"], "resume": True, **changes}
            with pytest.raises(ValueError, match=match):
                record(pipe, tmp_path, **given)
        with pytest.raises(ValueError, match="transformers"):
            record(tiny.wan(2), tmp_path, ["a cat", "a dog"], resume=True)
        record(pipe, tmp_path, ["a cat", "a dog"], resume=True)

    def test_an_error_in_the_first_prompt_leaves_nothing(self, pipe: Any, tmp_path: Path) -> None:
        def stop(at: Progress) -> None:
            if at.step == 1:
                raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            record(pipe, tmp_path, progress=stop)
        assert os.listdir(tmp_path) == []

    def test_an_old_book_stays_until_the_new_one_is_whole(self, pipe: Any, tmp_path: Path) -> None:
        record(pipe, tmp_path)
        before = (tmp_path / "book.safetensors").read_bytes()

        def stop(at: Progress) -> None:
            if at.writing:
                raise OSError(28, "No space left on device")

        with pytest.raises(OSError, match="No space left"):
            record(pipe, tmp_path, seed=3, progress=stop)
        assert (tmp_path / "book.safetensors").read_bytes() == before
        record(pipe, tmp_path, seed=3, resume=True)
        assert (tmp_path / "book.safetensors").read_bytes() != before

    def test_the_mean_is_not_held_in_memory(self, pipe: Any, tmp_path: Path) -> None:
        from jali.maskbook.calibration import running_mean

        kinds = set()
        real = running_mean.RunningMean.put

        def put(self: Any, *args: Any) -> None:
            kinds.add(type(self._new))
            real(self, *args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(running_mean.RunningMean, "put", put)
            record(pipe, tmp_path)
        assert kinds == {np.memmap}


class TestRefused:
    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"prompts": []}, "at least one prompt"),
            ({"prompts": "a cat"}, "list of texts"),
            ({"prompts": ["a", " "]}, "says something"),
            ({"seed": -1}, "seed"),
            ({"budgets": [1.5]}, "budgets"),
            ({"budgets": [], "importance": False}, "needs budgets"),
            ({"branches": "both"}, "mean"),
            ({"sharpness": -1.0}, "sharpness"),
            ({"scorer": "entropy"}, "callable with a name"),
            ({"blocks": Blocks(2**17, 128)}, "blocks of at most"),
            ({"branches": "separate", "guidance_scale": 1.0}, "did not run in step 0"),
        ],
        ids=str,
    )
    def test_arguments(
        self, pipe: Any, tmp_path: Path, changes: dict[str, Any], match: str
    ) -> None:
        given = {"prompts": ["a cat"], "steps": 2, "blocks": BLOCKS, **SMALL, **changes}
        with pytest.raises((ValueError, TypeError), match=match):
            calibrate(pipe, given.pop("prompts"), tmp_path / "b", **given)
        assert os.listdir(tmp_path) == []

    def test_places(self, pipe: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="never a pickle"):
            calibrate(pipe, ["a"], tmp_path / "a.pt")
        with pytest.raises(ValueError, match="folder"):
            calibrate(pipe, ["a"], tmp_path)

    def test_prompts_of_two_sizes(self, pipe: Any, tmp_path: Path) -> None:
        sizes = iter((128, 160))

        def generate(prompt: str, seed: int) -> None:
            del prompt, seed
            tiny.generate(pipe, {**tiny.WAN_CALL, **SMALL, "width": next(sizes)})

        with pytest.raises(ValueError, match=r"one grid, and this run has 3×8×8 and 3×8×10"):
            calibrate(pipe, ["a", "b"], tmp_path / "b", generate=generate, blocks=BLOCKS)

    def test_something_that_never_attends(self, pipe: Any, tmp_path: Path) -> None:
        with pytest.raises(ValueError, match="no self-attention came by"):
            calibrate(pipe, ["a"], tmp_path / "b", generate=lambda *_: None)
        assert os.listdir(tmp_path) == []
