"""What a mode promises: restored in every case, told once, refused early."""

from __future__ import annotations

import copy
import gc
import logging
import pickle
from typing import Any

import pytest
import tiny
import torch

import jali
from jali.integration.families import FAMILIES, Family
from jali.integration.processor import SparseProcessor
from jali.methods import Entropy, Psa, RateDistortion, Schedule
from jali.planning.budget import Budget
from jali.planning.curve import Curve

BLOCKS: dict[str, Any] = {"q_block": 64, "k_block": 64}
SPARSE: dict[str, Any] = {"warmup_frac": 0, "dense_first_layer": False, **BLOCKS}


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan()


@pytest.fixture(scope="module")
def stock(pipe: Any) -> torch.Tensor:
    return tiny.generate(pipe, tiny.WAN_CALL)


def snapshot(module: Any) -> tuple[Any, ...]:
    """Everything a mode may touch."""
    registry = getattr(module, "_diffusers_hook", None)
    return (
        {name: id(p) for name, p in module.attn_processors.items()},
        {name: dict(vars(p)) for name, p in module.attn_processors.items()},
        dict(module._forward_pre_hooks),
        dict(module._forward_pre_hooks_with_kwargs),
        dict(module._forward_hooks),
        sorted(set(vars(module)) - {"_diffusers_hook"}),
        None if registry is None else (list(registry.hooks), list(registry._hook_order)),
        None if registry is None else len(registry._fn_refs),
    )


class TestRestore:
    def test_after_a_generation(self, pipe: Any, stock: torch.Tensor) -> None:
        before = snapshot(pipe.transformer)
        with jali.sparse_processor_mode(pipe, 0.3, **SPARSE):
            assert snapshot(pipe.transformer) != before
            tiny.generate(pipe, tiny.WAN_CALL)
        assert snapshot(pipe.transformer) == before
        assert torch.equal(tiny.generate(pipe, tiny.WAN_CALL), stock)

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_after_an_exception(
        self, pipe: Any, stock: torch.Tensor, error: type[BaseException]
    ) -> None:
        before = snapshot(pipe.transformer)

        def fail(_: Any, step: int, __: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            if step == 1:
                raise error("stop")
            return kwargs

        with pytest.raises(error), jali.sparse_processor_mode(pipe, 0.3, **SPARSE):
            tiny.generate(pipe, tiny.WAN_CALL, callback_on_step_end=fail)
        assert snapshot(pipe.transformer) == before
        assert torch.equal(tiny.generate(pipe, tiny.WAN_CALL), stock)

    def test_before_anything_ran(self) -> None:
        model = tiny.wan_transformer()
        before = snapshot(model)
        handle = jali.apply_sparse_attention(model, "entropy", warmup_frac=0)
        handle.remove()
        handle.remove()
        assert snapshot(model) == before
        assert not hasattr(model, "_diffusers_hook")

    def test_when_attaching_fails_half_way(self, monkeypatch: Any) -> None:
        model = tiny.wan_transformer()
        before = snapshot(model)
        from jali.integration import attachment

        def broken(*_: Any) -> None:
            raise RuntimeError("no")

        monkeypatch.setattr(attachment, "listen", broken)
        with pytest.raises(RuntimeError, match="no"):
            jali.apply_sparse_attention(model, "entropy", warmup_frac=0)
        assert snapshot(model) == before

    def test_nothing_global_changes(self, pipe: Any) -> None:
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

        other, active = tiny.wan_transformer(), Registry._active_backend
        with jali.sparse_processor_mode(pipe, 0.3, **SPARSE):
            assert Registry._active_backend is active
            assert not any(isinstance(p, SparseProcessor) for p in other.attn_processors.values())
        # Cross-attention is never ours.
        with jali.sparse_processor_mode(pipe, 0.3):
            ours = {
                name
                for name, p in pipe.transformer.attn_processors.items()
                if isinstance(p, SparseProcessor)
            }
        assert ours == {f"blocks.{i}.attn1.processor" for i in range(3)}

    def test_another_processor_put_in_meanwhile_stays(self) -> None:
        from diffusers.models.transformers.transformer_wan import WanAttnProcessor

        model = tiny.wan_transformer()
        mine = WanAttnProcessor()
        with jali.sparse_processor_mode(model, 0.3, warmup_frac=0):
            model.blocks[1].attn1.set_processor(mine)
        assert model.blocks[1].attn1.processor is mine

    def test_a_backend_chosen_meanwhile_is_kept(self, pipe: Any) -> None:
        from diffusers.models.attention_dispatch import _AttentionBackendRegistry as Registry

        active = Registry._active_backend
        pipe = tiny.wan()
        try:
            with jali.sparse_processor_mode(pipe, 0.3, method="entropy", **SPARSE) as run:
                pipe.transformer.set_attention_backend("_native_math")
                tiny.generate(pipe, tiny.WAN_CALL)
                assert run.stats().sparse_cost < 0.6  # still ours
                assert run.run.dense_backend.value == "_native_math"
            for processor in pipe.transformer.attn_processors.values():
                assert processor._attention_backend.value == "_native_math"
        finally:
            Registry._active_backend = active

    def test_runs_are_not_kept_alive(self) -> None:
        from jali.integration.operator import _runs

        model = tiny.wan_transformer()
        with jali.sparse_processor_mode(model, 0.3, warmup_frac=0) as run:
            number = int(run.run.number)
            assert number in _runs
        del run
        gc.collect()
        assert number not in _runs


def test_two_pipelines_in_two_threads() -> None:
    """The layer that is calling is known per thread."""
    from concurrent.futures import ThreadPoolExecutor

    def calls(model: Any) -> tuple[torch.Tensor, int]:
        inputs = {
            "hidden_states": torch.ones(1, 16, 5, 16, 16).cumsum(-1) / 8,
            "encoder_hidden_states": torch.ones(1, 8, 32),
            "return_dict": False,
        }
        with torch.no_grad(), jali.sparse_processor_mode(model, 0.5, **SPARSE) as run:
            outs = [model(timestep=torch.tensor([t]), **inputs)[0] for t in range(900, 0, -100)]
        return torch.stack(outs), len({(r.layer, r.step) for r in run.stats().rows})

    models = [tiny.wan_transformer(2), tiny.wan_transformer(5)]
    alone = [calls(model) for model in models]
    with ThreadPoolExecutor(2) as pool:
        together = list(pool.map(calls, models))
    for (a, places), (b, again) in zip(alone, together, strict=True):
        assert torch.equal(a, b)
        assert places == again
    assert [places for _, places in together] == [18, 45]


def test_a_sparse_pipeline_is_not_copied_and_a_restored_one_is(pipe: Any) -> None:
    ways = (copy.copy, copy.deepcopy, pickle.dumps)
    with jali.sparse_processor_mode(pipe, mean_budget=0.5):
        for way in ways:
            for part in (pipe.transformer, pipe.transformer.blocks[1].attn1.processor):
                with pytest.raises(TypeError, match=r"while it is sparse: .* call \.remove\(\)"):
                    way(part)
        for way in ways[1:]:
            with pytest.raises(TypeError, match="while it is sparse"):
                way(pipe)
    again = copy.deepcopy(pipe.transformer), pickle.loads(pickle.dumps(pipe.transformer))
    kinds = [type(p) for p in pipe.transformer.attn_processors.values()]
    for other in again:
        assert [type(p) for p in other.attn_processors.values()] == kinds
    assert "__reduce_ex__" not in vars(pipe.transformer)


class TestTold:
    def test_one_line_at_the_end(self, pipe: Any, caplog: pytest.LogCaptureFixture) -> None:
        with (
            caplog.at_level(logging.INFO, "jali"),
            jali.sparse_processor_mode(pipe, 0.3, warmup_frac=0.3) as run,
        ):
            tiny.generate(pipe, tiny.WAN_CALL, steps=4)
        lines = [r.message for r in caplog.records if "jali: rd: asked" in r.message]
        assert len(lines) == 1
        for part in ("asked 0.30", "cost 0.", "predicted", "measured", "first steps", "layer 0"):
            assert part in lines[0]
        assert run.summary() in lines[0]

    def test_tables_are_kept_for_a_run_and_given_back_after_it(self, pipe: Any) -> None:
        method = jali.RateDistortion(0.3, keep=0.5, q_block=64, k_block=64)
        with jali.sparse_processor_mode(pipe, method=method) as run:
            tiny.generate(pipe, tiny.WAN_CALL, steps=4)
            tables, rows = run.run.tables, run.stats().rows
            assert tables.made == len(rows) / 2  # two steps share one
            assert tables.bytes == 0 < tables.largest
            assert 0 < run.stats().planning < max(row.planning for row in rows)
            tiny.generate(pipe, tiny.WAN_CALL, steps=4)
            assert run.run.tables.made == tables.made

    def test_masses_are_looked_at_once_a_run_for_every_layer_and_branch(self, pipe: Any) -> None:
        method = jali.Schedule(jali.Mass(q_block=64, k_block=64), dense_steps=1)
        with jali.sparse_processor_mode(pipe, method=method, total=0.6) as run:
            tiny.generate(pipe, tiny.WAN_CALL, steps=5)
            tables, rows = run.run.tables, run.stats().rows
            sparse = [row for row in rows if row.reason is None]
            places = {(row.layer, row.branch) for row in sparse}
            assert tables.made == len(places) < len(sparse)
            first = min(row.step for row in sparse)
            assert {row.step for row in sparse if row.planning} == {first}
            assert run.stats().cost == pytest.approx(0.6, abs=0.05)

    @pytest.mark.parametrize("experts", [1, 2])
    def test_tables_are_given_back_before_decoding(self, experts: int) -> None:
        both, held = tiny.wan(experts=experts), []
        method = jali.RateDistortion(0.3, keep=0.5, q_block=64, k_block=64)

        def ended(_: Any, __: int, ___: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
            held.append(run.run.tables.bytes)
            return kwargs

        with jali.sparse_processor_mode(both, method=method) as run:
            tiny.generate(both, tiny.WAN_CALL, steps=4, callback_on_step_end=ended)
        assert min(held[:3]) > 0 == held[3]

    def test_steps_that_are_only_counted_keep_their_tables(self) -> None:
        model = tiny.wan_transformer(2)
        method = jali.RateDistortion(0.3, keep=2, q_block=64, k_block=64)
        with torch.no_grad(), jali.sparse_processor_mode(model, method=method) as run:
            for t in (9.0, 8.0):
                model(torch.randn(1, 16, 3, 8, 8), torch.tensor([t]), torch.randn(1, 8, 32))
            assert run.run.tables.bytes > 0
            assert run.run.tables.made == 2  # one for every layer

    def test_a_run_without_a_sparse_step_is_warned_of_once(
        self, pipe: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        with jali.sparse_processor_mode(pipe, 0.3, warmup_frac=15):
            tiny.generate(pipe, tiny.WAN_CALL)
            tiny.generate(pipe, tiny.WAN_CALL)
        model = tiny.wan_transformer(2)  # which cannot know how many steps there will be
        with torch.no_grad(), jali.sparse_processor_mode(model, 0.3, warmup_frac=15):
            model(torch.randn(1, 16, 3, 8, 8), torch.tensor([9.0]), torch.randn(1, 8, 32))
        warned = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
        assert len(warned) == 1
        assert "nothing will be sparse: of 3 steps the schedule keeps the first 15" in warned[0]

    def test_stats_are_of_the_latest_generation(self, pipe: Any) -> None:
        with jali.sparse_processor_mode(pipe, 0.3, **SPARSE) as run:
            tiny.generate(pipe, tiny.WAN_CALL, steps=3)
            tiny.generate(pipe, tiny.WAN_CALL, steps=2)
            assert {r.step for r in run.stats().rows} == {0, 1}
            assert len(run.stats().rows) == 2 * 2 * 3
        assert set(run.stats().by("layer", "branch")) == {
            (layer, branch) for layer in range(3) for branch in ("cond", "uncond")
        }

    def test_an_interrupted_run_begins_again(self, pipe: Any) -> None:
        def stop(*_: Any) -> dict[str, Any]:
            raise ValueError("stop")

        with jali.sparse_processor_mode(pipe, 0.3, **SPARSE) as run:
            with pytest.raises(ValueError, match="stop"):
                tiny.generate(pipe, tiny.WAN_CALL, steps=3, callback_on_step_end=stop)
            tiny.generate(pipe, tiny.WAN_CALL, steps=3)
        rows = run.stats().rows
        assert len({(r.layer, r.step, r.branch) for r in rows}) == len(rows) == 18

    def test_old_code_with_a_step_callback(self, pipe: Any) -> None:
        with jali.sparse_processor_mode(pipe, mean_budget=0.5) as state:
            call = {**tiny.WAN_CALL, "callback_on_step_end": jali.make_step_callback(state)}
            assert torch.isfinite(tiny.generate(pipe, call)).all()


class TestFinite:
    def broken(self) -> Any:
        model = tiny.wan_transformer(4)
        with torch.no_grad():
            model.blocks[1].ffn.net[-1].bias.fill_(float("nan"))
        return model

    def call(self, model: Any) -> None:
        with torch.no_grad():
            model(
                hidden_states=torch.randn(1, 16, 5, 16, 16), timestep=torch.tensor([900]),
                encoder_hidden_states=torch.randn(1, 16, 32),
            )  # fmt: skip

    def test_names_the_first_place(self) -> None:
        model = self.broken()
        with (
            pytest.raises(FloatingPointError, match=r"layer 2.*step 0, branch cond"),
            jali.sparse_processor_mode(model, 0.5, warmup_frac=0),
        ):
            self.call(model)
        assert not any(isinstance(p, SparseProcessor) for p in model.attn_processors.values())

    def test_a_pipeline_does_not_return_it(self) -> None:
        pipe = tiny.wan(4)
        pipe.register_modules(transformer=self.broken())
        with (
            pytest.raises(FloatingPointError, match="layer 2"),
            jali.sparse_processor_mode(pipe, 0.5),
        ):
            tiny.generate(pipe, tiny.WAN_CALL)

    def test_the_last_layers_output_counts(self) -> None:
        model = tiny.wan_transformer(2)
        with torch.no_grad():
            model.proj_out.bias.fill_(float("inf"))
        with (
            pytest.raises(FloatingPointError, match="the model's output"),
            jali.sparse_processor_mode(model, 0.5, warmup_frac=0),
        ):
            self.call(model)

    def test_warns_or_is_off(self, caplog: pytest.LogCaptureFixture) -> None:
        model = self.broken()
        with jali.sparse_processor_mode(model, 0.5, warmup_frac=0, finite="warn"):
            self.call(model)
        assert "not finite" in caplog.text
        caplog.clear()
        with jali.sparse_processor_mode(model, 0.5, warmup_frac=0, finite="off"):
            self.call(model)
        assert "not finite" not in caplog.text


class TestSchedule:
    def method(self, *args: Any, **kwargs: Any) -> Any:
        model = tiny.wan_transformer(2)
        handle = jali.apply_sparse_attention(model, *args, **{"steps": 10, **kwargs})
        handle.remove()
        return handle.method

    def test_a_name_brings_the_defaults(self) -> None:
        assert self.method("entropy") == Schedule(Entropy(), curve=Curve(0.5))
        assert self.method("rd") == Schedule(RateDistortion(), curve=Curve(0.5))

    @pytest.mark.parametrize("curve", [(), (1.0, 0.0), 0.5, "steep", ("a",)])
    @pytest.mark.parametrize("named", ["rd", "entropy_balanced"])
    def test_what_is_no_curve_is_named_as_it_was_given(self, named: str, curve: Any) -> None:
        with pytest.raises(ValueError, match="curve must be") as caught:
            self.method(named, total=0.4, curve=curve)
        assert repr(curve[-1] if type(curve) is tuple and curve else curve) in str(caught.value)

    @pytest.mark.parametrize(
        ("name", "option"),
        [("rd", {"price": 0.01}), ("rd", {"budget": 0.2}), ("rf_v2", {"sparsity": 0.7})],
        ids=str,
    )
    @pytest.mark.parametrize("amount", [{"total": 0.4}, {"mean_budget": 0.3}], ids=str)
    def test_an_option_that_says_how_much_stands_alone(
        self, name: str, option: dict[str, float], amount: dict[str, float]
    ) -> None:
        words = [f"{key}={value}" for key, value in (option | amount).items()]
        with pytest.raises(ValueError, match=rf"option {words[0]} and {words[1]} say in two ways"):
            self.method(name, **option, **amount)

    def test_bounds_of_heads_and_shares_of_levels_go_with_a_total(self) -> None:
        bounds = Budget(0.5, floor=0.2)
        made = self.method("entropy", budget=bounds, total=0.4)
        assert made == Schedule(Entropy(bounds), curve=Curve(0.4))
        ranges = ((1, (0.0, 0.3)), (0, (0.3, 1.0)))
        assert self.method("psa", mask_ratios=ranges, total=0.4).inner.mask_ratios == ranges

    def test_psa_and_dense_steps_that_are_named_have_a_budget(self) -> None:
        """psa was measured to be better so, see docs/nano.md."""
        usual = {"dense_steps": 0.2, "dense_layers": (0,)}
        assert self.method("psa") == Schedule(Psa().with_budget(0.5), **usual)
        for named in ({"warmup_frac": 0.2}, {"dense_first_layer": True}):
            assert self.method("entropy", **named) == Schedule(Entropy().with_budget(0.5), **usual)

    def test_a_method_brings_its_own(self) -> None:
        own = Schedule(Entropy(), dense_steps=3, dense_layers=(-1,))
        assert self.method(own) is own
        assert self.method(own, warmup_frac=0.5).dense_steps == 0.5
        assert self.method(own, dense_first_layer=True).dense_layers == (0, -1)
        assert self.method(own, mean_budget=0.25).inner.budget.mean == 0.25

    def test_a_preset_by_name_and_as_an_object(self) -> None:
        from jali.presets import load_preset, presets

        preset = presets()[0]
        assert self.method(preset) == preset.method
        changed = self.method(preset, warmup_frac=4)
        assert changed.dense_steps == 4
        with jali.sparse_processor_mode(
            tiny.wan_transformer(2), preset="psa_balanced", model="wan-t2v-1.3b", steps=10
        ) as run:
            assert run.method == load_preset("psa_balanced", "wan-t2v-1.3b").method
        with pytest.raises(ValueError, match="differs between models"):
            self.method("psa_balanced")

    @pytest.mark.parametrize("name", ["psa", "rf_v2", "ada_bsa", "random", "local"])
    def test_every_method_runs(self, pipe: Any, name: str) -> None:
        with jali.sparse_processor_mode(pipe, 0.4, method=name, warmup_frac=0) as run:
            assert torch.isfinite(tiny.generate(pipe, tiny.WAN_CALL, steps=2)).all()
        assert run.stats().sparse_cost < 0.95


def test_what_is_no_transformer_is_named() -> None:
    """Before anything else is said of the call."""
    for module in (torch.nn.Linear(2, 2), tiny.wan().vae):
        with pytest.raises(ValueError, match=rf"{type(module).__name__} is no transformer"):
            jali.apply_sparse_attention(module)
    unknown = type("MyTransformer2DModel", (torch.nn.Module,), {})()
    with pytest.raises(ValueError, match="does not know MyTransformer2DModel; it knows Wan"):
        jali.apply_sparse_attention(unknown)
    with pytest.raises(TypeError, match="got Unets, which has a unet and no transformer"):
        jali.apply_sparse_attention(type("Unets", (), {"unet": torch.nn.Linear(2, 2)})())


BAD: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"method": "entropi"}, ValueError, "did you mean 'entropy'"),
    ({"method": "psa_balancd"}, ValueError, "did you mean 'psa_balanced'"),
    ({"method": 3}, TypeError, "a method is a name"),
    ({"mean_budget": 1.5}, ValueError, "mean_budget must be in"),
    ({"mean_budget": float("nan")}, ValueError, "mean_budget must be in"),
    ({"mean_budget": "half"}, TypeError, "mean_budget must be a number"),
    ({"warmup_frac": 1.2}, ValueError, "warmup_frac must be in"),
    ({"warmup_frac": -1}, ValueError, "warmup_frac is a share"),
    ({"backend": "fa5"}, ValueError, "unknown backend"),
    ({"when": "sometimes"}, ValueError, "when must be"),
    ({"finite": True}, ValueError, "finite must be"),
    ({"steps": 0}, ValueError, "steps must be"),
    ({"blok": 3}, ValueError, "no option 'blok'"),
    ({"steps": None}, ValueError, "does not say how many steps"),
    ({"method": Entropy(), "samples": 3}, TypeError, "is complete"),
]


@pytest.mark.parametrize(("given", "error", "words"), BAD)
def test_bad_input(given: dict[str, Any], error: type[Exception], words: str) -> None:
    model = tiny.wan_transformer(2)
    before = snapshot(model)
    with pytest.raises(error, match=words):
        jali.apply_sparse_attention(model, **{"steps": 10, **given})
    assert snapshot(model) == before


def test_method_and_preset_together() -> None:
    with (
        pytest.raises(ValueError, match="not both"),
        jali.sparse_processor_mode(tiny.wan_transformer(2), method="psa", preset="psa_balanced"),
    ):
        pass


def test_not_a_pipeline() -> None:
    with pytest.raises(TypeError, match="expected a diffusers pipeline"):
        jali.apply_sparse_attention(object())


def test_sparse_already(pipe: Any) -> None:
    with (
        jali.sparse_processor_mode(pipe, 0.5),
        pytest.raises(ValueError, match="sparse already"),
    ):
        jali.apply_sparse_attention(pipe)
    jali.apply_sparse_attention(pipe).remove()


def test_an_unknown_transformer_and_how_to_make_it_known() -> None:
    from diffusers import PixArtTransformer2DModel

    model = PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=8,
        cross_attention_dim=16, caption_channels=8,
    )  # fmt: skip
    with pytest.raises(ValueError, match=r"PixArt.*knows WanTransformer3DModel.*register_family"):
        jali.apply_sparse_attention(model, warmup_frac=0)
    family = Family("PixArt", "PixArtTransformer2DModel", r"^transformer_blocks\.\d+\.attn1$")
    jali.register_family(family)
    try:
        # Its processor is diffusers' oldest one, which asks no dispatcher: said in words.
        with pytest.raises(ValueError, match="does not go through"):
            jali.apply_sparse_attention(model, warmup_frac=0)
    finally:
        del FAMILIES["PixArtTransformer2DModel"]
    with pytest.raises(TypeError, match="takes a Family"):
        jali.register_family("PixArt")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="text must be"):
        Family("x", "X", "y", text="left")


def test_a_subclass_is_known() -> None:
    from diffusers import WanTransformer3DModel

    class Mine(WanTransformer3DModel):
        pass

    model = tiny.wan_transformer(2)
    model.__class__ = Mine
    jali.apply_sparse_attention(model, warmup_frac=0).remove()


def test_tokens_beyond_the_grid_stay_dense_and_are_told() -> None:
    """LTX with conditioning tokens: more tokens than frames × height × width."""
    pipe = tiny.ltx(2)
    model = pipe.transformer
    inputs = {
        "hidden_states": torch.randn(1, 5 * 16 * 16 + 32, 8),
        "encoder_hidden_states": torch.randn(1, 8, 32),
        "timestep": torch.tensor([500.0]),
        "encoder_attention_mask": torch.ones(1, 8),
        "num_frames": 5, "height": 16, "width": 16, "return_dict": False,
        "video_coords": torch.rand(1, 3, 5 * 16 * 16 + 32),
    }  # fmt: skip
    with torch.no_grad():
        expected = model(**inputs)[0]
        with jali.sparse_processor_mode(model, 0.3, warmup_frac=0) as run:
            out = model(**inputs)[0]
    assert (out - expected).norm() <= 1e-5 * expected.norm()
    assert "1312 tokens, but 5×16×16 are 1280" in run.summary()
