"""The sweep file: a strict grid, refused in words before anything is submitted."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jali.experiments.experiment import Experiment
from jali.experiments.resources import Resources
from jali.experiments.sweep import parse_sweep, read_sweep

SWEEPS = Path(__file__).parents[2] / "experiments" / "sweeps"
GOOD = """
name: mine
models: [nano]
sizes: [128x128x33]
methods: [entropy, psa]
budgets: [0.5, 0.3]
steps: 4
"""


def test_a_grid_is_every_combination_in_order() -> None:
    sweep = parse_sweep(GOOD)
    assert sweep.tags == (
        "mine-nano-128x128x33-entropy-0.5",
        "mine-nano-128x128x33-entropy-0.3",
        "mine-nano-128x128x33-psa-0.5",
        "mine-nano-128x128x33-psa-0.3",
    )
    assert {e.settings.steps for e in sweep.experiments} == {4}
    assert sweep.resources == Resources(1, 8, "64GB", "6:00:00")


def test_defaults_come_from_the_model_and_the_method() -> None:
    (found,) = parse_sweep("{name: a, models: [wan-t2v-1.3b], methods: [psa]}").experiments
    found = found.settings
    assert (found.height, found.width, found.num_frames, found.steps) == (480, 832, 81, 50)
    assert (found.guidance, found.budget, found.warmup_frac) == (5.0, 0.5, 0.2)
    assert found.dense_first_layer is True


def test_schedules_presets_and_several_grids() -> None:
    sweep = parse_sweep("""
name: mine
num_prompts: 3
grids:
  - models: [wan-t2v-1.3b]
    methods: ["preset:psa_balanced"]
    schedules: [{warmup_frac: 0.1}, {warmup_frac: 2, dense_first_layer: false}]
  - models: [cogvideox-5b]
    methods: [entropy]
    num_prompts: 5
""")
    assert sweep.tags == (
        "mine-wan-t2v-1.3b-480x832x81-psa_balanced-s0",
        "mine-wan-t2v-1.3b-480x832x81-psa_balanced-s1",
        "mine-cogvideox-5b-480x720x49-entropy-0.5",
    )
    first, second, third = sweep.experiments
    assert (first.settings.preset, first.settings.budget, first.settings.warmup_frac) == (
        "psa_balanced",
        None,
        0.1,
    )
    assert (second.settings.warmup_frac, second.settings.dense_first_layer) == (2, False)
    assert (first.num_prompts, third.num_prompts) == (3, 5)


@pytest.mark.parametrize("name", ["quick", "paper"])
def test_the_shipped_sweeps_are_valid(name: str) -> None:
    sweep = read_sweep(SWEEPS / f"{name}.yaml")
    assert sweep.name == name
    assert len(set(sweep.tags)) == len(sweep.tags) >= 4


def test_the_quick_sweep_is_what_ci_can_afford() -> None:
    sweep = read_sweep(SWEEPS / "quick.yaml")
    methods = {e.settings.method for e in sweep.experiments}
    assert len(sweep.tags) == 4
    assert len(methods) == 2
    assert {e.settings.budget for e in sweep.experiments} == {0.5, 0.3}
    for e in sweep.experiments:
        assert (e.settings.model, e.settings.height, e.settings.width, e.settings.num_frames) == (
            "nano",
            128,
            128,
            33,
        )
        assert e.settings.steps is not None
        assert e.settings.steps <= 4
        assert e.num_prompts <= 2
        assert e.threads is not None


BAD = {
    "an unknown key": (GOOD + "budget: [0.5]", "has no key 'budget'; did you mean 'budgets'?"),
    "a key twice": (GOOD + "steps: 5", "line 8: the key 'steps' is given twice"),
    "an unknown model": (GOOD.replace("nano", "nono"), "unknown model 'nono'"),
    "an unknown method": (GOOD.replace("psa", "psaa"), "unknown method 'psaa'; did you mean 'psa'"),
    "dense as a method": (GOOD.replace("psa", "dense"), "dense is measured in every experiment"),
    "an unknown preset": (GOOD.replace("psa", "preset:nope"), "nope"),
    "a budget above one": (GOOD.replace("0.3", "1.3"), "budget must be a number above 0"),
    "a budget of zero": (GOOD.replace("0.3", "0"), "budget must be a number above 0"),
    "a budget in words": (GOOD.replace("0.3", "little"), "budget must be a number"),
    "a budget twice": (GOOD.replace("0.3", "0.5"), "budgets lists 0.5 twice"),
    "a size it cannot make": (GOOD.replace("128x128x33", "100x128x33"), "multiple of"),
    "frames it cannot make": (GOOD.replace("x33", "x34"), "frames, got 34"),
    "a size in words": (GOOD.replace("128x128x33", "small"), "a size is height x width x frames"),
    "steps in words": (GOOD.replace("steps: 4", "steps: four"), "steps must be a count"),
    "no steps": (GOOD.replace("steps: 4", "steps: 0"), "steps must be a count"),
    "an empty axis": (GOOD.replace("[entropy, psa]", "[]"), "methods must be a list"),
    "no list": (GOOD.replace("[entropy, psa]", "entropy"), "methods must be a list"),
    "no models": (GOOD.replace("models: [nano]", ""), "models is missing"),
    "no name": (GOOD.replace("name: mine", ""), "name is missing"),
    "a name with a slash": (GOOD.replace("name: mine", "name: a/b"), "letters, digits"),
    "a name that hides": (GOOD.replace("name: mine", "name: .."), "letters, digits"),
    "an unknown resource": (GOOD + "resources: {gpu: 1}", "unknown resource 'gpu'"),
    "memory in words": (GOOD + "resources: {mem: much}", "mem is a size such as 64GB"),
    "a time in words": (GOOD + "resources: {time: long}", "time is minutes"),
    "an unknown schedule": (GOOD + "schedules: [{warmup: 1}]", "has no key 'warmup'"),
    "a wrong schedule": (GOOD + "schedules: [{warmup_frac: 2.5}]", "warmup_frac must be"),
    "an unknown metric": (GOOD + "metrics: [psnrr]", "unknown metric 'psnrr'"),
    "an unknown backend": (GOOD + "backend: fast", "fast"),
    "a wrong type": (GOOD + "cpu_offload: please", "cpu_offload must be true or false"),
    "both parallel": (GOOD + "context_parallel: 2\ntensor_parallel: 2", "do not go together"),
    "ranks and a book": (GOOD + "context_parallel: 2", "every head in one process"),
    "grids that overlap": (
        "{name: a, grids: [{models: [nano], methods: [psa]}, "
        "{models: [nano], methods: [psa], seed: 1}]}",
        "is in the sweep twice",
    ),
    "not YAML": ("name: [", "is not a sweep"),
    "a list": ("[1, 2]", "is not a sweep"),
    "nothing": ("", "is not a sweep"),
    "too many": (
        GOOD.replace("[0.5, 0.3]", str([i / 202 for i in range(1, 102)]))
        + f"schedules: {[{'warmup_frac': i / 50} for i in range(50)]}",
        "at most 10,000",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", BAD)
def test_what_is_wrong_is_named(what: str) -> None:
    text, words = BAD[what]
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        parse_sweep(text, "mine.yaml")
    assert str(error.value).startswith("mine.yaml")
    assert "\n" not in str(error.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no sweep file"):
        read_sweep(tmp_path / "none.yaml")


def test_an_experiment_survives_json() -> None:
    found = Experiment(tag="a", model="nano", prompts=("x", "y"), metrics=("psnr",)).completed()
    assert Experiment.from_dict(found.to_dict()) == found
    with pytest.raises(ValueError, match="has no nonsense"):
        Experiment.from_dict({**found.to_dict(), "nonsense": 1})


@pytest.mark.parametrize(
    ("text", "minutes"),
    [("90", 90), ("6:00:00", 360), ("1-12:00:00", 2160), ("2:30", 3), ("1-0", 1440)],
)
def test_times_are_read_as_slurm_does(text: str, minutes: int) -> None:
    assert Resources(time=text).minutes == minutes


@pytest.mark.parametrize(
    ("text", "megabytes"), [("64GB", 65536), ("64G", 65536), ("800", 800), ("1.5gb", 1536)]
)
def test_sizes_are_read_as_slurm_does(text: str, megabytes: int) -> None:
    assert Resources(mem=text).megabytes == megabytes


# Whatever a file holds, one short sentence says what is wrong with it

BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 9)]
)
MONSTERS = {
    "an alias bomb": (BOMB, "stands for more than 100,000 values"),
    "a list that holds itself": ("name: &a [*a]", "nested too deep"),
    "a deep list": ("[" * 3000 + "]" * 3000, "nested too deep"),
    "deep mappings": ("models: " + "{a: " * 3000 + "}" * 3000, "nested too deep"),
    "a list as a key": ("? [a, b]\n: 1", "is not a sweep"),
    "a huge word": (GOOD.replace("psa", "p" * 100_000), "method ppp"),
    "a huge list": (GOOD.replace("steps: 4", f"steps: {list(range(10_000))}"), "steps must be"),
}


@pytest.mark.parametrize("what", MONSTERS)
def test_a_monster_is_one_short_sentence(what: str) -> None:
    text, words = MONSTERS[what]
    with pytest.raises(ValueError, match=re.escape(words)) as error:
        parse_sweep(text, "mine.yaml")
    assert len(str(error.value)) < 400
    assert "\n" not in str(error.value)


def test_a_huge_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "huge.yaml"
    path.write_bytes(b"#" * 2_000_000)
    with pytest.raises(ValueError, match="more than 1,000,000 characters"):
        read_sweep(path)


@pytest.mark.parametrize("name", ["partition", "account", "qos", "constraint"])
@pytest.mark.parametrize("value", ["a\nrm -rf /", "a b", "$(id)", "`id`", "a;b", "", "a'b", "é"])
def test_only_plain_words_become_lines_of_a_script(name: str, value: str) -> None:
    with pytest.raises(ValueError, match=f"{name} must be a name, one plain word"):
        Resources(**{name: value})


def test_a_constraint_may_be_a_formula() -> None:
    assert Resources(constraint="[a100|h100]&ib*2", account="group-1.x", partition="a,b")


@pytest.mark.parametrize("changes", [{}, {"preset": "psa_balanced", "budget": None}])
def test_a_config_that_was_written_before_is_read(changes: dict[str, object]) -> None:
    """Flat, with every key; beside a preset the method is written as entropy."""
    before = {
        "tag": "a", "model": "wan-t2v-1.3b", "path": None, "height": 480, "width": 832,
        "num_frames": 81, "steps": 50, "guidance": 5.0, "seed": 0, "method": "entropy",
        "preset": None, "budget": 0.5, "warmup_frac": 0.2, "dense_first_layer": True,
        "backend": "auto", "num_prompts": 5, "prompts": None, "calibrate": True,
        "calibration_prompts": 2, "masks": None, "bench_steps": 5, "bench_repeats": 3,
        "metrics": ["psnr"], "cpu_offload": False, "context_parallel": 1, "tensor_parallel": 1,
        "device": None, "dtype": None, "threads": None, **changes,
    }  # fmt: skip
    found = Experiment.from_dict(before)
    assert found.to_dict() == before
    assert found.completed() == found
    assert found.variant == (before["preset"] or "entropy")
