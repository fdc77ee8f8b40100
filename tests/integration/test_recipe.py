"""Recipes: written and read back as they are, run where they belong, refused where they do not."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import yaml

import hostile
import jali
from jali import Curve, Entropy, Recipe, Schedule
from jali.error import LONGEST, InputError
from jali.generation import Settings
from jali.generation.settings import dense_twin
from jali.integration.fingerprint import Fingerprint
from jali.integration.recipe import Measured, RunSize, Spread, Target
from jali.methods import METHODS, Dense

HERE = RunSize(3, 64, 64, 9, 5.0)


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan(2)


@pytest.fixture(scope="module")
def recipe(pipe: Any) -> Recipe:
    return Recipe(
        model="wan-t2v-1.3b",
        fingerprints={"transformer": Fingerprint.of(pipe.transformer)},
        method=Entropy(q_block=8, k_block=8),
        curve=Curve(0.7, layers=(1.0, 0.5)),
        run=HERE,
        target=Target("psnr", 30.0),
        met=True,
        measured=Measured(4, {"psnr": Spread(31.0, 30.0, 32.0, 27.5, 34.5)}, 0.701, 0.01),
        machine={"device": "a CPU", "threads": 2},
        notes=("Of linear nothing was seen.",),
    )


@pytest.fixture
def file(recipe: Recipe, tmp_path: Path) -> Path:
    recipe.write(tmp_path / "recipe.yaml")
    return tmp_path / "recipe.yaml"


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_read_back_as_it_was_written(recipe: Recipe, name: str) -> None:
    dense = METHODS[name] is Dense
    one = replace(recipe, method=METHODS[name](), curve=None if dense else Curve(0.4, (1.0, 0.2)))
    assert Recipe.parse(one.text()) == one
    assert isinstance(one.scheduled, Dense if dense else Schedule)


def test_a_file_says_what_was_measured_in_words(recipe: Recipe, file: Path) -> None:
    found = Recipe.read(file)
    assert found == recipe
    said = str(found)
    assert "asked for 30 dB: entropy at a total of 0.7 (exponential) with factors" in said
    assert "4 held-out clips: 31.0 dB (30.0 to 32.0; one more clip 27.5 to 34.5)" in said
    assert "Of linear nothing was seen." in said


def test_a_pipeline_runs_it(pipe: Any, recipe: Recipe, file: Path) -> None:
    for given in (recipe, file, str(file)):
        with jali.sparse_processor_mode(pipe, recipe=given) as handle:
            assert handle.method == recipe.scheduled
    handle = jali.apply_sparse_attention(pipe, recipe=recipe)
    assert handle.method == Schedule(recipe.method, curve=recipe.curve)
    handle.remove()


@pytest.mark.parametrize(
    ("beside", "name"),
    [
        ({"method": "psa"}, "method"),
        ({"mean_budget": 0.3}, "mean_budget"),
        ({"total": 0.3}, "total"),
        ({"curve": "linear"}, "curve"),
        ({"warmup_frac": 0}, "warmup_frac"),
        ({"dense_first_layer": True}, "dense_first_layer"),
        ({"preset": "esa"}, "preset"),
        ({"samples": 4}, "samples"),
    ],
)
def test_nothing_is_asked_beside_it(
    pipe: Any, recipe: Recipe, beside: dict[str, Any], name: str
) -> None:
    with (
        pytest.raises(InputError, match=f"^{name} and recipe ask for the same"),
        jali.sparse_processor_mode(pipe, recipe=recipe, **beside),
    ):
        pass
    settings: dict[str, Any] = {"budget" if n == "mean_budget" else n: v for n, v in beside.items()}
    if name == "samples":
        settings = {"options": beside}
    with pytest.raises(InputError, match="ask for the same in two ways: the recipe says it"):
        Settings("wan-t2v-1.3b", recipe="any.yaml", **settings).resolve()


def test_another_model_is_refused(recipe: Recipe, file: Path) -> None:
    other = tiny.wan(3)
    with pytest.raises(ValueError, match=r"another model than the recipe's \(wan-t2v-1\.3b\)"):
        jali.apply_sparse_attention(other, recipe=recipe)
    assert not hasattr(other.transformer, "_diffusers_hook")
    with pytest.raises(InputError, match=r"is of the model wan-t2v-1\.3b, and this is nano"):
        Settings("nano", recipe=str(file)).resolve()
    own = recipe.fingerprints["transformer"]
    moved = {name: tuple(x + 1 for x in values) for name, values in own.weights.items()}
    tuned = replace(recipe, fingerprints={"transformer": replace(own, weights=moved)})
    with pytest.raises(ValueError, match="weights of transformer are not those the recipe was"):
        jali.apply_sparse_attention(tiny.wan(2), recipe=tuned)


def test_other_runs_are_warned_of_once(
    pipe: Any, recipe: Recipe, caplog: pytest.LogCaptureFixture
) -> None:
    longer = replace(recipe, run=replace(HERE, steps=9, height=32))
    for one, times in ((longer, 1), (replace(recipe, run=_run_of(tiny.WAN_CALL)), 0)):
        caplog.clear()
        with caplog.at_level(logging.WARNING), jali.sparse_processor_mode(pipe, recipe=one):
            tiny.generate(pipe, tiny.WAN_CALL)
        told = [r.getMessage() for r in caplog.records if "the recipe was measured" in r.message]
        assert len(told) == times
    assert longer.warning({"steps": 3, "height": 32}) == (
        "the recipe was measured with other runs (here: steps 3, not 9): its curve fits, its "
        "numbers need not"
    )


def _run_of(call: dict[str, Any]) -> RunSize:
    size = [call[name] for name in ("height", "width", "num_frames")]
    return RunSize(3, *size, 5.0)


def test_settings_take_everything_from_it(
    recipe: Recipe, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        found = Settings("wan21_1.3b", recipe=str(file), device="cpu").resolve()
    assert "recipe" not in caplog.text
    assert found.make_method() == recipe.scheduled
    assert (found.method, found.total, found.curve) == ("entropy", 0.7, "exponential")
    assert (found.steps, found.height, found.num_frames) == (3, 64, 9)
    assert found.resolve() == found
    assert dense_twin(found).recipe is None
    with caplog.at_level(logging.WARNING):
        longer = Settings("wan-t2v-1.3b", recipe=str(file), device="cpu", steps=8).resolve()
    assert longer.steps == 8
    assert caplog.text.count("the recipe was measured with other runs (here: steps 8, not 3)") == 1


def test_settings_without_one_have_the_digest_they_had() -> None:
    from jali import files
    from jali.generation.settings import LATER

    plain = Settings("nano")
    assert "recipe" in LATER
    assert plain.to_dict().keys() >= set(LATER)
    without = {name: value for name, value in plain.to_dict().items() if name not in LATER}
    assert plain.digest == files.digest(without)


# Files that are no recipes


def _changed(change: Callable[[dict[str, Any]], None], text: str) -> str:
    data = yaml.safe_load(text)
    change(data)
    return yaml.safe_dump(data)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d.update(extra=1), "has no key 'extra'"),
        (lambda d: d.pop("target"), "needs the key 'target'"),
        (lambda d: d.update(version=2), "it has version 2, this reads 1"),
        (lambda d: d.update(kind="book"), "its kind is not jali-recipe"),
        (lambda d: d.update(method="entrpy"), "did you mean 'entropy'"),
        (lambda d: d["options"].update(samplse=4), "samplse"),
        (lambda d: d["curve"].update(total=float("nan")), "must be a finite number, got nan"),
        (lambda d: d["curve"].update(total=2), "total must be in"),
        (lambda d: d["curve"].update(layers=[1, -1]), "above 0"),
        (lambda d: d.update(curve=None), "only the method dense has none"),
        (lambda d: d["run"].update(steps=0), "steps must be at least 1"),
        (lambda d: d["run"].update(steps=10**9), "at most 1,000,000"),
        (lambda d: d["target"].update(metric="fvd"), "metric must be"),
        (lambda d: d["measured"].update(work=7), "work must be in"),
        (lambda d: d["measured"]["metrics"]["psnr"].update(low=99), "from low to high"),
        (lambda d: d.update(fingerprints={}), "names the transformers"),
        (lambda d: d.update(met="yes"), "must be true or false"),
    ],
)
def test_what_is_wrong_in_a_file_is_said(
    recipe: Recipe, change: Callable[[dict[str, Any]], None], said: str
) -> None:
    with pytest.raises(InputError, match="mine is no recipe that can be used") as found:
        Recipe.parse(_changed(change, recipe.text()), "mine")
    assert said in str(found.value)


def test_hostile_files_are_refused_in_a_sentence(recipe: Recipe, tmp_path: Path) -> None:
    path, dice = tmp_path / "r.yaml", random.Random(0)
    whole = yaml.safe_load(recipe.text())
    for _ in range(60):
        path.write_text(yaml.safe_dump(hostile.change_value(whole, dice)))
        said = ""
        try:
            Recipe.read(path)  # some changes leave a recipe, of another machine for one
        except InputError as error:
            said = str(error)
        assert len(said) < LONGEST + 200
        assert not said or said.isprintable()
    strange = ("", "[", "a: &a [*a]", "kind: jali-recipe", "\x00", "!!python/object:os.system {}")
    for text in strange:
        path.write_text(text)
        with pytest.raises(InputError):
            Recipe.read(path)
    path.write_bytes(b"x" * 2**21)
    with pytest.raises(InputError, match="bytes"):
        Recipe.read(path)
    with pytest.raises(InputError, match="there is no recipe file"):
        Recipe.read(tmp_path / "none.yaml")
