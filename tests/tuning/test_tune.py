"""A tuning on a small model: the target is met, the other half of the prompts says so, and a
tuning that was cut goes on."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import jali
from jali import Recipe
from jali.error import InputError, JobError
from jali.evaluation.arena.studio import Studio
from jali.evaluation.tuning.outcome import Found
from jali.evaluation.tuning.refine import Refinement
from jali.evaluation.tuning.search import NEAR, TRIES
from jali.generation import Settings
from jali.methods import Dense

ENTROPY, LOCAL = "entropy:q_block=8,k_block=2", "local:q_block=8,k_block=2"


def test_a_quality_is_met_and_held_out_clips_say_so(tune: Any, pipe: Any, tmp_path: Path) -> None:
    output = tmp_path / "r.yaml"
    told: list[tuple[str, int, int]] = []
    recipe = tune(output, target_psnr=53, progress=lambda *said: told.append(said))
    assert Recipe.read(output) == recipe
    assert recipe.model == "wan-t2v-1.3b"
    assert (recipe.method.name, recipe.target.metric) == ("entropy", "psnr")
    assert (recipe.run.steps, recipe.run.height) == (3, 64)
    assert recipe.curve is not None
    # The first three prompts decide, the last three judge; everything is made once.
    sparse = [one for one in tune.made if one[0] != "dense"]
    assert len(set(tune.made)) == len(tune.made)
    assert {first for *_, first in tune.made} == set(range(6))
    assert {total for *_, total, first in sparse if first > 2} == {recipe.curve.total}
    assert len({total for *_, total, _ in sparse}) <= TRIES
    measured = recipe.measured
    assert measured.clips == 3
    spread = measured.metrics["psnr"]
    ends = [spread.next_low, spread.low, spread.mean, spread.high, spread.next_high]
    assert None not in ends
    assert ends == sorted(ends, key=float)
    assert measured.metrics["speedup"].mean == pytest.approx(5 / (1 + 4 * measured.work), rel=0.01)
    # On the prompts that decide it is met, and closely.
    records = json.loads((tmp_path / "r-tuning" / "arena.json").read_text())["records"]
    key = recipe.curve.total, recipe.curve.shape
    deciding = [r for r in records if (r["total"], r["schedule"]) == key and r["first"] < 3]
    values = [value for record in deciding for value in record["metrics"]["psnr"]]
    assert len(values) == 3
    assert 53 <= sum(values) / 3 <= 53 + 2 * NEAR["psnr"]
    assert told[-1][0].startswith("entropy")
    page = (tmp_path / "r-tuning" / "tuning.html").read_text()
    for words in ("jali-tuning 1", "What was tried", "the recipe's", "asked for 53 dB", "film-0"):
        assert words in page
    assert "so it was not taken" in str(recipe)  # what a linear curve gives was seen
    handle = jali.apply_sparse_attention(pipe, recipe=output)
    handle.remove()


def test_a_speed_is_met_as_near_to_dense_as_it_goes(tune: Any, tmp_path: Path) -> None:
    recipe = tune(tmp_path / "r.yaml", speedup=1.6, methods=[ENTROPY, LOCAL])
    found = recipe.measured.metrics["speedup"].mean
    assert recipe.met == (found >= 1.6)
    assert found == pytest.approx(1.65, abs=0.1)
    # What the other method gives is said.
    other = {"entropy", "local"} - {recipe.method.name}
    assert any(note.startswith(tuple(other)) for note in recipe.notes)


def test_dense_may_be_the_answer(tune: Any, pipe: Any, tmp_path: Path) -> None:
    recipe = tune(tmp_path / "r.yaml", target_psnr=79, prompts=["a", "b"])
    assert isinstance(recipe.method, Dense)
    assert recipe.curve is None
    assert recipe.met
    said = str(recipe)
    assert "dense is the answer" in said
    assert "Nothing that was tried reaches 79 dB; entropy" in said
    assert "at a total of 0.9 has " in said
    assert Recipe.read(tmp_path / "r.yaml") == recipe
    with jali.sparse_processor_mode(pipe, recipe=recipe) as handle:
        assert isinstance(handle.method, Dense)


def test_what_is_not_faster_than_dense_is_not_taken(
    tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jali.evaluation.tuning.trial.speed_ups", lambda *_: [[0.8]])
    recipe = tune(tmp_path / "r.yaml", target_psnr=40, prompts=["a", "b"])
    assert recipe.curve is None
    assert "Nothing sparse that reaches 40 dB is faster here: entropy" in str(recipe)
    # For a machine elsewhere, work counts.
    other = tune(tmp_path / "r.yaml", target_psnr=40, prompts=["a", "b"], saves="work")
    assert other.method.name == "entropy"
    assert "Held-out clips took longer than dense ones" in str(other)


def test_a_speed_that_cannot_be_met_says_how_close_it_came(tune: Any, tmp_path: Path) -> None:
    recipe = tune(tmp_path / "r.yaml", speedup=4.5, prompts=["a", "b"])
    assert not recipe.met
    assert recipe.curve is not None
    assert recipe.curve.total == 0.05
    assert "Nothing that was tried reaches 4.5 times as fast as dense" in str(recipe)
    assert "ask for more" in str(recipe) or "cannot tell" in str(recipe)
    assert "Fewer than 3 held-out clips" in str(recipe)


def test_a_tuning_that_was_cut_goes_on(
    tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few: dict[str, Any] = {"target_psnr": 53, "prompts": ["a", "b", "c", "d"]}
    whole = tune(tmp_path / "whole.yaml", **few)
    once = list(tune.made)
    tune.made.clear()
    make = Studio.make

    def cut(self: Any, *given: Any, **more: Any) -> Any:
        if len(tune.made) == 7:
            raise KeyboardInterrupt
        return make(self, *given, **more)

    with monkeypatch.context() as patched:
        patched.setattr(Studio, "make", cut)
        with pytest.raises(KeyboardInterrupt):
            tune(tmp_path / "cut.yaml", **few)
    assert not (tmp_path / "cut.yaml").exists()
    found = tune(tmp_path / "cut.yaml", **few)
    assert (found.curve, found.method, found.measured.metrics["psnr"]) == (
        whole.curve, whole.method, whole.measured.metrics["psnr"],
    )  # fmt: skip
    sparse = [one for one in tune.made if one[0] != "dense"]
    assert sorted(sparse) == sorted(one for one in once if one[0] != "dense")
    # Once more, nothing but the first dense clip, which says how long things take.
    tune.made.clear()
    assert tune(tmp_path / "cut.yaml", **few).curve == whole.curve
    assert [one[0] for one in tune.made] == ["dense"]


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """A clock that goes on by a minute with every clip, and else stands still."""
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    make = Studio.make

    def slow(self: Any, *given: Any, **more: Any) -> Any:
        now[0] += 60
        return make(self, *given, **more)

    monkeypatch.setattr(Studio, "make", slow)
    return now


def test_minutes_are_kept_with_fewer_prompts(tune: Any, tmp_path: Path, now: list[float]) -> None:
    recipe = tune(tmp_path / "r.yaml", target_psnr=53, minutes=14)
    assert now[0] <= 14 * 60
    assert "The minutes were enough for 2 of 3 prompts in each half." in str(recipe)
    assert recipe.measured.clips == 2
    with pytest.raises(JobError, match="minutes were over before"):
        tune(tmp_path / "other.yaml", target_psnr=53, minutes=1, size={"seed": 1})
    assert not (tmp_path / "other.yaml").exists()


def test_a_better_shape_is_kept(tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Refinement, "differences", lambda *_: [0.9, 1.0, 1.1])
    recipe = tune(tmp_path / "r.yaml", target_psnr=45)
    assert recipe.curve is not None
    assert recipe.curve.shape == "linear"
    assert "A linear curve: +1.00 ± 0.25 dB at the same total." in recipe.notes


def test_work_is_moved_to_where_probes_gain(
    tune: Any, pipe: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More in the second layer is said to be better, whatever else is tried: the recipe has it."""

    def better(_: Any, one: Found, __: Found) -> list[float]:
        assert one.row.schedule is not None
        factors = one.row.schedule.layers or (1.0, 1.0)
        gain = factors[1] - factors[0]
        return [gain - 0.01, gain, gain + 0.01]

    monkeypatch.setattr(Refinement, "differences", better)
    recipe = tune(tmp_path / "r.yaml", target_psnr=50, probes=4)
    assert recipe.curve is not None
    first, second = recipe.curve.layers
    assert first < 1 < second
    assert any(
        n.startswith("Work moved between steps and layers, by 4 probes: +") for n in recipe.notes
    )
    assert Recipe.read(tmp_path / "r.yaml") == recipe
    folder = tmp_path / "r-tuning"
    records = json.loads((folder / "arena.json").read_text())["records"]
    probes = {r["schedule"] for r in records if r["schedule"][0].isdigit() and r["first"] == 0}
    # Clips of probes are not kept: those of the curves and of the moves are.
    kept = [path.name for path in (folder / "runs").iterdir()]
    assert len([spread for spread in probes if spread.endswith(("*1,1.6", "*1.6,1"))]) == 2
    assert not [name for name in kept if "0.134-1-1.6" in name or "0.134-1.6-1" in name]
    assert [name for name in kept if "0.134-0.3237-3.089" in name]
    page = (folder / "tuning.html").read_text()
    assert "What clips gain by more work in some steps or layers" in page
    assert "moved work" in page
    with jali.sparse_processor_mode(pipe, recipe=recipe) as handle:
        pipe(
            "a cat", height=64, width=64, num_frames=9, num_inference_steps=3, output_type="latent"
        )
        assert handle.stats().cost == pytest.approx(recipe.curve.total, abs=0.05)


def test_few_minutes_probe_coarsely_or_not_at_all(
    tune: Any, tmp_path: Path, now: list[float]
) -> None:
    for minutes, said in ((29, "no time to probe"), (50, "of 12 probes")):
        now[0] = 0
        recipe = tune(tmp_path / f"{minutes}.yaml", target_psnr=53, minutes=minutes, probes=12)
        assert now[0] <= minutes * 60
        assert said in str(recipe)
        assert recipe.measured.clips == 3


def test_a_method_that_fails_is_left_out(
    tune: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make = Studio.make

    def broken(self: Any, settings: Settings, *given: Any) -> Any:
        if settings.method == "local":
            raise RuntimeError("no such kernel")
        return make(self, settings, *given)

    monkeypatch.setattr(Studio, "make", broken)
    two = {"target_psnr": 40, "prompts": ["a", "b"]}
    recipe = tune(tmp_path / "r.yaml", methods=[LOCAL, ENTROPY], **two)
    assert recipe.method.name == "entropy"
    assert any("local" in note and "no such kernel" in note for note in recipe.notes)
    with pytest.raises(JobError, match="no such kernel"):
        tune(tmp_path / "r.yaml", methods=[LOCAL], **two)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({}, "target_psnr or one of target_ssim, target_lpips, speedup says what is wanted"),
        ({"target_psnr": 30, "speedup": 2}, "target_psnr and speedup are two targets"),
        ({"target_psnr": float("nan")}, "must be a number above 5 and below 80, got nan"),
        ({"target_ssim": 1.2}, "target_ssim must be a number above 0 and below 1, got 1.2"),
        ({"speedup": 1}, "speedup must be a number above 1 and below 100, got 1"),
        ({"target_psnr": 30, "prompts": ["a"]}, "tuning needs 2 prompts or more"),
        ({"target_psnr": 30, "batch": 4}, "tuning needs 8 prompts or more"),
        ({"target_psnr": 30, "saves": "money"}, "saves must be one of time, work, got 'money'"),
        ({"speedup": 2, "saves": "work"}, "saves is work, and speedup asks for time"),
        ({"target_psnr": 30, "methods": "entrpy"}, "did you mean 'entropy'"),
        ({"target_psnr": 30, "methods": "entropy:sample=3"}, "sample"),
    ],
)
def test_what_cannot_be_is_said_before_anything_is_made(
    tune: Any, tmp_path: Path, asked: dict[str, Any], said: str
) -> None:
    with pytest.raises(InputError) as found:
        tune(tmp_path / "r.yaml", **asked)
    assert said in str(found.value)
    assert not tune.made
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["notes.txt", "folder.yaml", "mine.yaml"])
def test_nothing_else_is_replaced(tune: Callable[..., Any], tmp_path: Path, name: str) -> None:
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "mine.yaml").write_text("my: notes")
    with pytest.raises(InputError, match=r"^output"):
        tune(tmp_path / name, target_psnr=30)
    assert (tmp_path / "mine.yaml").read_text() == "my: notes"


def test_lpips_needs_its_weights(tune: Any, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="LPIPS cannot be measured here: "):
        tune(tmp_path / "r.yaml", target_lpips=0.1)


@pytest.mark.usefixtures("now")
def test_minutes_that_end_the_search_are_no_case_for_dense(tune: Any, tmp_path: Path) -> None:
    recipe = tune(tmp_path / "r.yaml", target_psnr=79, minutes=5.5, prompts=["a", "b"])
    assert not recipe.met
    assert recipe.method.name == "entropy"
    assert "The minutes allowed 2 totals of entropy" in str(recipe)
    assert "Nothing that was tried reaches 79 dB" in str(recipe)
