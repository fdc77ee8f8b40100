"""A recipe wherever a method is asked for: presets, arenas, books, experiments, and by default."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_arena import BLOCKS, MODEL, SMALL
from typer.testing import CliRunner

import jali
from jali import Curve, Entropy, Recipe
from jali.error import InputError
from jali.experiments.experiment import Experiment
from jali.experiments.stages.run import settings_of, variant_inputs
from jali.generation import Settings
from jali.generation.produce import attention
from jali.generation.settings import with_shipped_recipe
from jali.integration.fingerprint import Fingerprint
from jali.integration.recipe import Measured, RunSize, Target
from jali.methods import Dense, RateDistortion, Schedule
from jali.name import recipe_file, shipped_recipe


@pytest.fixture(scope="module")
def recipe(pipe: Any) -> Recipe:
    return Recipe(
        model=MODEL,
        fingerprints={"transformer": Fingerprint.of(pipe.transformer)},
        method=Entropy(q_block=8, k_block=2),
        curve=Curve(0.6, "linear", layers=(1.2, 0.8)),
        run=RunSize(3, 64, 64, 9, 5.0),
        target=Target("psnr", 30.0),
        met=True,
        measured=Measured(0, {}, 0.6),
    )


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> str:
    recipe.write(tmp_path / "r.yaml")
    return str(tmp_path / "r.yaml")


def generate(pipe: Any, **more: Any) -> Any:
    size = {"height": 64, "width": 64, "num_frames": 9, "max_sequence_length": 16}
    return pipe("a cat", num_inference_steps=3, output_type="latent", **size | more)


def test_where_a_preset_may_be(pipe: Any, recipe: Recipe, file: str) -> None:
    with jali.sparse_processor_mode(pipe, preset=file) as handle:
        assert handle.method == recipe.scheduled
    settings = Settings(MODEL, preset=file)
    assert (settings.recipe, settings.preset) == (file, None)
    assert settings.make_method() == recipe.scheduled
    with pytest.raises(InputError, match="a file of presets is a `config`"):
        Recipe.parse("presets: {}")


def test_in_an_arena(pipe: Any, recipe: Recipe, file: str, tmp_path: Path) -> None:
    board = jali.arena(
        pipe, output=tmp_path / "arena", methods=[f"local{BLOCKS}"], recipe=file,
        prompts=["a cat"], settings=Settings(MODEL, **SMALL),
    )  # fmt: skip
    rows = {str(one.row): one for part in board.boards for one in part.standings}
    assert "entropy:k_block=2,q_block=8 linear*1.2,0.8 0.6" in rows
    assert {one.row.total for one in rows.values()} == {0.6}
    replace(recipe, method=Dense(), curve=None).write(tmp_path / "dense.yaml")
    for other, said in (("dense.yaml", "is dense"), ("none.yaml", "no recipe file")):
        with pytest.raises(InputError, match=said):
            jali.arena(
                pipe, output=tmp_path / "b", recipe=tmp_path / other, settings=Settings(MODEL)
            )
    with pytest.raises(InputError, match=r"it is of the model wan-t2v-1\.3b, and"):
        jali.arena("nano", output=tmp_path / "b", recipe=file)


def test_a_book_is_made_of_it_and_replayed_along_its_curve(
    pipe: Any, recipe: Recipe, file: str, checkpoint: Path, tmp_path: Path
) -> None:
    from jali.cli.main import app

    book = tmp_path / "book.safetensors"
    made = CliRunner().invoke(
        app,
        ["calibrate", "--model", MODEL, "--path", str(checkpoint), "--recipe", file, "--output",
         str(book), "--num-prompts", "1", "--device", "cpu", "--json"],
    )  # fmt: skip
    assert made.exit_code == 0, made.output
    settings = Settings(MODEL, masks=str(book), recipe=file, path=str(checkpoint), device="cpu")
    settings = settings.resolve(pipe)
    assert (settings.method, settings.total, settings.steps) == ("cached", 0.6, 3)
    with attention(pipe, settings) as handle:
        assert isinstance(handle.method, Schedule)
        assert handle.method.curve == recipe.curve
        generate(pipe)
        assert handle.stats().cost == pytest.approx(0.6, abs=0.03)
    rd = tmp_path / "rd.yaml"
    replace(recipe, method=RateDistortion()).write(rd)
    with pytest.raises(InputError, match=r"is a book of entropy, and the recipe .* is of rd"):
        Settings(MODEL, masks=str(book), recipe=str(rd)).make_method()
    refused = CliRunner().invoke(
        app, ["calibrate", "--model", "nano", "--recipe", file, "--output", str(book)]
    )
    assert refused.exit_code == 2
    assert "is of the model wan-t2v-1.3b" in refused.output


def test_in_an_experiment(recipe: Recipe, file: str, tmp_path: Path) -> None:
    found = Experiment(tag="a", model=MODEL, recipe=file).completed()
    assert (found.variants, found.settings.steps, found.settings.budget) == (("recipe",), 3, None)
    assert not found.wants_book
    assert found.dense_settings.recipe is None
    assert settings_of(found, "recipe", tmp_path).make_method() == recipe.scheduled
    assert Experiment.from_dict(found.to_dict()) == found
    inputs = variant_inputs(found, tmp_path)
    replace(recipe, notes=("Another file.",)).write(file)
    assert variant_inputs(found, tmp_path)["recipe"] != inputs["recipe"]
    # One without is written down as it ever was.
    plain = Experiment(tag="a", model=MODEL).completed()
    assert "recipe" not in plain.to_dict()
    assert "recipe" not in variant_inputs(plain, tmp_path)
    assert found.differences(plain)
    with pytest.raises(InputError, match="ask for the same in two ways"):
        Experiment(tag="a", model=MODEL, recipe=file, budget=0.3)


@pytest.mark.skipif(shipped_recipe("nano") is None, reason="nano comes without a recipe")
def test_nano_has_one_by_default() -> None:
    from jali.integration.models.pipeline import load_pipeline
    from jali.integration.modes import transformers_of

    found = Recipe.read("nano")
    assert found == Recipe.read(recipe_file("nano"))
    found.check_model(dict(transformers_of(load_pipeline("nano", device="cpu"))[1]))
    usual = with_shipped_recipe(Settings("nano"))
    assert usual.recipe == "nano"
    assert usual.make_method() == found.scheduled
    assert (usual.height, usual.num_frames) == (192, 37)  # a model's own size stays as it is
    resolved = with_shipped_recipe(usual.resolve())
    assert resolved.recipe == "nano"
    for asked in ({"method": "entropy"}, {"total": 0.4}, {"options": {"tail": True}}):
        assert with_shipped_recipe(Settings("nano", **asked)).recipe is None
    none = with_shipped_recipe(Settings("nano", recipe="none"))
    assert none.resolve().recipe is None
    assert none.make_method() == Settings("nano").make_method()
    assert with_shipped_recipe(Settings(MODEL)) == Settings(MODEL)
