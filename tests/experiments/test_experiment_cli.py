"""`jali experiment`: sentences and exit codes, and JSON alone where JSON was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import fake
import pytest
from typer.testing import CliRunner

import jali.experiments.stages as real
from jali.cli.experiment import app
from jali.experiments.experiment import Experiment
from jali.experiments.job import CONFIG, run_experiment
from jali.experiments.place import Place

E = Experiment(tag="a", model="nano", budget=0.5).completed()
GOOD = "{name: s, models: [nano], methods: [psa], budgets: [0.5, 0.3], resources: {gpus: 0}}"


@pytest.fixture(autouse=True)
def _fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "all_stages", fake.stages)


def call(place: Place, *words: str) -> Any:
    ends = ["--results", str(place.results), "--logs-dir", str(place.logs)]
    return CliRunner().invoke(app, [*words, *ends])


def test_run_then_status_then_collect(place: Place) -> None:
    done = call(place, "run", "--model", "nano", "--tag", "a", "--budget", "0.5")
    assert done.exit_code == 0, done.output
    assert "report.html" in done.stdout
    table = call(place, "status", "--json")
    (row,) = json.loads(table.stdout)
    assert (row["tag"], row["state"]) == ("a", "done")
    collected = call(place, "collect", "a", "--output", str(place.results / "t"))
    assert collected.exit_code == 0
    assert (place.results / "t" / "table.csv").read_text().count("\n") == 2
    assert json.loads(call(place, "collect", "--json").stdout)["rows"][0]["tag"] == "a"
    assert "attempt 1" in call(place, "logs", "a").stdout


def test_esa_spells_some_flags_otherwise(place: Place) -> None:
    done = call(place, "run", "--model", "nano", "--tag", "a", "--mean_budget", "0.25", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(place.config("a").read_text())["experiment"]["budget"] == 0.25


def test_the_same_from_a_config_file(place: Place, tmp_path: Path) -> None:
    run_experiment(E, place, fake.stages())
    other = Place(tmp_path / "other", tmp_path / "logs")
    done = call(other, "run", "--config", str(place.config("a")))
    assert done.exit_code == 0, done.output
    assert other.quality("a").read_bytes() == place.quality("a").read_bytes()


@pytest.mark.parametrize("experiment", [{}, {"experiment": {"colour": "red"}}, {"experiment": 3}])
def test_a_config_file_without_an_experiment(
    place: Place, tmp_path: Path, experiment: dict[str, object]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kind": CONFIG, "version": 1, **experiment}))
    done = call(place, "run", "--config", str(file))
    assert done.exit_code == 2, done.output
    assert f"{file} is not an experiment" in done.output.replace("\n", " ")


BAD = {
    "no tag": (["run"], "needs --tag"),
    "a bad tag": (["run", "--tag", "../x"], "a tag is up to 120 letters"),
    "an unknown model": (["run", "--tag", "a", "--model", "nono"], "unknown model 'nono'"),
    "an unknown method": (["run", "--tag", "a", "--method", "x"], "unknown method 'x'"),
    "a bad budget": (["run", "--tag", "a", "--budget", "2"], "budget must be a number above 0"),
    "a bad size": (["run", "--tag", "a", "--height", "100"], "multiple of"),
    "no such book": (["run", "--tag", "a", "--masks", "/none"], "/none"),
    "no such prompts": (["run", "--tag", "a", "--prompts", "/none"], "/none"),
    "an unknown tracker": (["run", "--tag", "a", "--track", "x"], "trackio or wandb"),
    "two methods": (["run", "--tag", "a", "--method", "psa", "--preset", "p"], "not both"),
    "an unknown tag": (["status", "none"], "no experiment and no sweep 'none'"),
    "cancel an unknown tag": (["cancel", "none"], "no experiment and no sweep 'none'"),
    "a missing sweep": (["launch", "none.yaml"], "no sweep file none.yaml"),
    "an unknown place": (["retry", "a", "--on", "moon"], "--on is local or slurm"),
}


@pytest.mark.parametrize("what", BAD)
def test_bad_input_is_one_sentence_and_2(place: Place, what: str) -> None:
    words, sentence = BAD[what]
    done = call(place, *words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("jali: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_settings_under_a_tag_are_2(place: Place) -> None:
    run_experiment(E, place, fake.stages())
    done = call(place, "run", "--tag", "a", "--budget", "0.3")
    assert done.exit_code == 2
    assert "--overwrite" in done.stderr
    assert call(place, "run", "--tag", "a", "--budget", "0.3", "--overwrite").exit_code == 0


def test_a_failed_job_is_1(place: Place) -> None:
    fake.trouble(place.results, "a", "quality-1", "full")
    done = call(place, "run", "--tag", "a")
    assert done.exit_code == 1
    assert "no space left on the disk" in done.stderr


def test_a_damaged_table_is_1_and_says_what(place: Place) -> None:
    run_experiment(E, place, fake.stages())
    run_experiment(replace(E, tag="b"), place, fake.stages())
    place.speed("b").write_text("{")
    done = call(place, "collect", "--json")
    assert done.exit_code == 1
    assert [row["tag"] for row in json.loads(done.stdout)["rows"]] == ["a"]
    assert "b: b/speed.json is not JSON" in done.stderr


def test_a_dry_run_does_nothing(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    done = call(place, "launch", str(path), "--on", "slurm", "--dry-run", "--mem", "8GB")
    assert done.exit_code == 0, done.output
    assert "2 experiments" in done.stdout
    assert "#SBATCH --array=0-1%" in done.stdout
    assert "#SBATCH --mem=8192MB" in done.stdout
    assert not place.results.exists()
    facts = json.loads(call(place, "launch", str(path), "--dry-run", "--json").stdout)
    assert [e["tag"] for e in facts["experiments"]] == [
        "s-nano-192x320x37-psa-0.5",
        "s-nano-192x320x37-psa-0.3",
    ]


def test_launch_here_and_retry(place: Place, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    tag = "s-nano-192x320x37-psa-0.5"
    fake.trouble(place.results, tag, "quality-1", "raise")
    done = call(place, "launch", str(path), "--max-attempts", "1", "--max-parallel", "2")
    assert done.exit_code == 1, done.output
    assert "1 of 2 experiments are not done" in done.stderr
    again = call(place, "retry", "s", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == {"submitted": [tag], "spent": []}
    rows = json.loads(call(place, "status", "s", "--json").stdout)
    assert [row["state"] for row in rows] == ["done", "done"]
    assert call(place, "retry", "s").exit_code == 0
    assert "nothing was waiting" in call(place, "cancel", "s").stdout


def test_every_command_has_examples() -> None:
    runner = CliRunner()
    for command in app.registered_commands:
        text = runner.invoke(app, [str(command.name), "--help"]).stdout
        assert f"jali experiment {command.name}" in text, command.name
