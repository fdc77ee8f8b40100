"""Names of weights in ComfyUI, and recipes that are of another model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fake_comfyui import Flux, Patcher, WanModel
from torch import nn

import jali
from jali.comfyui.family import family_of
from jali.comfyui.node import SparseAttention
from jali.comfyui.weight import check_recipe, comfy_name
from jali.integration.fingerprint import Fingerprint, values_of
from jali.integration.recipe import Measured, Recipe, RunSize, Target
from jali.nano import folder

NAMES = {
    "blocks.1.attn1.to_q.weight": "blocks.1.self_attn.q.weight",
    "blocks.2.attn2.to_out.0.weight": "blocks.2.cross_attn.o.weight",
}


class Wan(WanModel):
    """With the weights of two layers under ComfyUI's names."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.blocks[2].cross_attn.o = nn.Linear(8, 8)


def recipe(kind: str, *models: nn.Module, change: float = 0.0) -> Recipe:
    """Made with these transformers."""
    found = {}
    for index, model in enumerate(models):
        own = dict(model.named_parameters())
        weights = {name: values_of(own[other]) for name, other in NAMES.items() if other in own}
        weights = {
            name: tuple(value + change for value in values) for name, values in weights.items()
        }
        found[f"transformer_{index}"] = Fingerprint(kind, "0" * 64, weights)
    return Recipe(
        "wan-t2v-1.3b", found, jali.Entropy(), jali.Curve(0.5), RunSize(30, 480, 832, 81, 5.0),
        Target("psnr", 30.0), True, Measured(0, {}, 0.5),
    )  # fmt: skip


def test_a_recipe_of_this_model_is_taken() -> None:
    model = Wan()
    kind = "WanTransformer3DModel"
    check_recipe(recipe(kind, model), family_of(model), model)
    other = Wan()
    nn.init.constant_(other.blocks[2].cross_attn.o.weight, 3.0)
    check_recipe(recipe(kind, other, model), family_of(model), model)  # one of two experts


@pytest.mark.parametrize(
    ("made_with", "said"),
    [
        (lambda: recipe("FluxTransformer2DModel", Wan()),
         "the recipe is of wan-t2v-1.3b, a FluxTransformer2DModel, and this model is a Wan"),
        (lambda: recipe("WanTransformer3DModel", Wan(), change=1.0),
         "the weights are not those of wan-t2v-1.3b, which the recipe was made with: "
         "blocks.1.attn1.to_q.weight holds"),
    ],
)  # fmt: skip
def test_a_recipe_of_another_model_is_refused(
    made_with: object, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "recipe.yaml"
    made_with().write(file)  # type: ignore[operator]
    model = Patcher(Wan())
    with pytest.raises(ValueError, match=said):
        SparseAttention().patch(model, "error", recipe=str(file))
    assert SparseAttention().patch(model, "dense", recipe=str(file)) == (model,)
    assert said in caplog.text


def test_another_number_of_blocks_is_another_model() -> None:
    model = WanModel(blocks=2)
    with pytest.raises(ValueError, match=r"it has no blocks\.2\.attn2\.to_out\.0\.weight"):
        check_recipe(recipe("WanTransformer3DModel", Wan()), family_of(model), model)


def test_where_names_are_not_known_the_class_has_to_do() -> None:
    model = Flux()
    check_recipe(recipe("FluxTransformer2DModel", Wan(), change=1.0), family_of(model), model)
    assert comfy_name("Flux", "proj_out.weight") is None


def test_every_weight_of_nano_has_its_name_in_comfyui() -> None:
    index = folder() / "transformer" / "diffusion_pytorch_model.safetensors.index.json"
    names = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    both = ("weight", "bias")
    expected = {f"{part}.{x}" for x in both for part in (
        "patch_embedding", "text_embedding.0", "text_embedding.2", "time_embedding.0",
        "time_embedding.2", "time_projection.1", "head.head",
    )} | {"head.modulation"}  # fmt: skip
    for i in range(8):
        block = f"blocks.{i}"
        expected |= {f"{block}.modulation"}
        expected |= {f"{block}.{part}.{x}" for part in ("norm3", "ffn.0", "ffn.2") for x in both}
        for attention in ("self_attn", "cross_attn"):
            expected |= {f"{block}.{attention}.{part}.{x}" for part in "qkvo" for x in both}
            expected |= {f"{block}.{attention}.norm_{part}.weight" for part in "qk"}
    assert {comfy_name("WanModel", name) for name in names} == expected
    assert len(expected) == len(names) == 231
