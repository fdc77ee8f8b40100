"""A pipeline says which model it is, and a preset whether it is meant for it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")

import tiny

import jali
from jali.generation.settings import Settings
from jali.integration.models.registry import MODELS, model_of
from jali.integration.models.size import video_scale_of
from jali.presets import Preset, VideoScale, load_preset
from jali.tokens.grid import TokenGrid


def loaded(name: str, pipeline: str | None = None, experts: int | None = None) -> tuple[Any, Any]:
    """A pipeline and its transformers as `model_of` sees them: classes and configurations."""
    card = MODELS[name]
    config: dict[str, Any] = {
        "num_layers": card.layers[0],
        "num_attention_heads": card.heads,
        "attention_head_dim": card.head_dim,
        **card.config,
    }
    if len(card.layers) > 1:
        config["num_single_layers"] = card.layers[1]
    pipe = type(pipeline or card.pipeline, (), {})()
    count = card.experts if experts is None else experts
    return pipe, [(f"t{i}", SimpleNamespace(config=config)) for i in range(count)]


@pytest.mark.parametrize("name", MODELS)
def test_every_model_of_the_registry_is_recognised(name: str) -> None:
    assert model_of(*loaded(name)) == name


def test_image_to_video_around_the_same_transformer_counts() -> None:
    assert model_of(*loaded("wan-t2v-14b", "WanImageToVideoPipeline")) == "wan-t2v-14b"
    assert model_of(*loaded("wan2.2-t2v-a14b", "WanImageToVideoPipeline")) == "wan2.2-t2v-a14b"


def test_a_bare_transformer_may_be_of_two_models() -> None:
    _, one = loaded("wan-t2v-14b")
    assert model_of(None, one) is None  # an expert of Wan 2.2 looks the same
    _, one = loaded("wan-t2v-1.3b")
    assert model_of(None, one) == "wan-t2v-1.3b"
    assert model_of(None, [("transformer", SimpleNamespace())]) is None


def test_a_preset_that_differs_between_models_finds_the_model() -> None:
    """Real sizes without weights: the tensors are on the meta device."""
    from diffusers import WanTransformer3DModel

    with torch.device("meta"):
        model = WanTransformer3DModel(
            num_attention_heads=12, attention_head_dim=128, num_layers=30, ffn_dim=32, text_dim=32
        )
    for name, given in (("psa_balanced", {}), ("psa_balanced", {"preset": "psa_balanced"})):
        options = given or {"method": name}
        with jali.sparse_processor_mode(model, steps=50, **options) as run:
            assert run.method == load_preset(name, "wan-t2v-1.3b").method
            assert run.run.preset == load_preset(name, "wan-t2v-1.3b")
    # What is said wins over what is seen.
    with jali.sparse_processor_mode(model, preset="psa_balanced", model="wan-t2v-14b") as run:
        assert run.method == load_preset("psa_balanced", "wan-t2v-14b").method
    small = tiny.wan_transformer(2)
    with pytest.raises(ValueError, match="differs between models, so name one of"):
        jali.apply_sparse_attention(small, "psa_balanced", steps=10)


def test_esa_is_one_word_away_in_python_and_on_the_command_line() -> None:
    """With another budget or a total its schedule stays."""
    esa = load_preset("esa").method
    small = tiny.wan_transformer(2)
    with jali.sparse_processor_mode(small, preset="esa", steps=10) as run:
        assert run.method == esa
    with jali.sparse_processor_mode(small, preset="esa", mean_budget=0.3, steps=10) as run:
        assert run.method == esa.with_budget(0.3)
    with jali.sparse_processor_mode(small, preset="esa", total=0.4, curve="flat", steps=10) as run:
        assert isinstance(esa, jali.Schedule)
        assert run.method == replace(esa, curve=jali.Curve(0.4, "flat"))
    asked = Settings("nano", preset="esa")
    assert asked.resolve().make_method() == esa
    assert replace(asked, budget=0.3).resolve().make_method() == esa.with_budget(0.3)


def preset(**facts: Any) -> Preset:
    return replace(load_preset("entropy_balanced"), source="mine.yaml", **facts)


def test_the_scale_of_a_pipeline() -> None:
    pipe = tiny.wan(2)
    assert video_scale_of(pipe, pipe.transformer) == VideoScale(width=16, height=16, depth=4)
    newer = tiny.cogvideox("1.5", 2)
    assert video_scale_of(newer, newer.transformer) == VideoScale(16, 16, 8)
    assert video_scale_of(None, pipe.transformer) is None


def test_a_preset_for_other_pixels_is_refused_before_anything_changes() -> None:
    pipe = tiny.wan(2)
    before = [block.attn1.processor for block in pipe.transformer.blocks]
    with pytest.raises(ValueError, match=r"4 frames and 32×32 pixels .* of 4 frames and 16×16"):
        jali.apply_sparse_attention(pipe, preset(video_scale=VideoScale(32, 32, 4)))
    assert [block.attn1.processor for block in pipe.transformer.blocks] == before
    jali.apply_sparse_attention(pipe, preset(video_scale=VideoScale(16, 16, 4))).remove()


def test_a_preset_for_another_text_is_refused_before_the_first_step_is_done() -> None:
    pipe = tiny.cogvideox(layers=2)
    done: list[int] = []

    def note(_pipe: Any, step: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        done.append(step)
        return kwargs

    with (
        pytest.raises(ValueError, match="is for 226 text tokens, but this run has 16"),
        jali.sparse_processor_mode(pipe, preset=preset(text_length=226)),
    ):
        tiny.generate(pipe, tiny.COG_CALL, steps=2, callback_on_step_end=note)
    assert done == []
    with jali.sparse_processor_mode(pipe, preset=preset(text_length=16)) as run:
        tiny.generate(pipe, tiny.COG_CALL, steps=2)
    assert run.stats().sparse_cost is not None


def test_check_alone() -> None:
    grid = TokenGrid.video(5, 16, 16, text=16)
    preset(text_length=16).check(grid)
    with pytest.raises(ValueError, match="226"):
        preset(text_length=226).check(grid)
