"""`jali experiment`: sentences and exit codes, and JSON alone where JSON was asked for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
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
from jali.experiments.results import Results

E = Experiment(tag="a", model="nano", budget=0.5).completed()
GOOD = "{name: s, models: [nano], methods: [psa], budgets: [0.5, 0.3], resources: {gpus: 0}}"


@pytest.fixture(autouse=True)
def _fake_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "all_stages", fake.stages)


def call(results: Results, *words: str) -> Any:
    ends = ["--results", str(results.root), "--logs-dir", str(results.logs)]
    return CliRunner().invoke(app, [*words, *ends])


def test_run_then_status_then_collect(results: Results) -> None:
    done = call(results, "run", "--model", "nano", "--tag", "a", "--budget", "0.5")
    assert done.exit_code == 0, done.output
    assert "report.html" in done.stdout
    table = call(results, "status", "--json")
    (row,) = json.loads(table.stdout)
    assert (row["tag"], row["state"]) == ("a", "done")
    collected = call(results, "collect", "a", "--output", str(results.root / "t"))
    assert collected.exit_code == 0
    assert (results.root / "t" / "table.csv").read_text().count("\n") == 2
    assert json.loads(call(results, "collect", "--json").stdout)["rows"][0]["tag"] == "a"
    assert "attempt 1" in call(results, "logs", "a").stdout


def test_esa_spells_some_flags_otherwise(results: Results) -> None:
    done = call(results, "run", "--model", "nano", "--tag", "a", "--mean_budget", "0.25", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(results.config("a").read_text())["experiment"]["budget"] == 0.25


def test_the_same_from_a_config_file(results: Results, tmp_path: Path) -> None:
    run_experiment(E, results, fake.stages())
    other = Results(tmp_path / "other", tmp_path / "logs")
    done = call(other, "run", "--config", str(results.config("a")))
    assert done.exit_code == 0, done.output
    assert other.quality("a").read_bytes() == results.quality("a").read_bytes()


@pytest.mark.parametrize("experiment", [{}, {"experiment": {"colour": "red"}}, {"experiment": 3}])
def test_a_config_file_without_an_experiment(
    results: Results, tmp_path: Path, experiment: dict[str, object]
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({"kind": CONFIG, "version": 1, **experiment}))
    done = call(results, "run", "--config", str(file))
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
def test_bad_input_is_one_sentence_and_2(results: Results, what: str) -> None:
    words, sentence = BAD[what]
    done = call(results, *words)
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert done.stderr.startswith("jali: ")
    assert sentence in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_settings_under_a_tag_are_2(results: Results) -> None:
    run_experiment(E, results, fake.stages())
    done = call(results, "run", "--tag", "a", "--budget", "0.3")
    assert done.exit_code == 2
    assert "--overwrite" in done.stderr
    assert call(results, "run", "--tag", "a", "--budget", "0.3", "--overwrite").exit_code == 0


def test_a_failed_job_is_1(results: Results) -> None:
    fake.trouble(results.root, "a", "quality-1", "full")
    done = call(results, "run", "--tag", "a")
    assert done.exit_code == 1
    assert "no space left on the disk" in done.stderr


def test_a_damaged_table_is_1_and_says_what(results: Results) -> None:
    run_experiment(E, results, fake.stages())
    run_experiment(replace(E, tag="b"), results, fake.stages())
    results.speed("b").write_text("{")
    done = call(results, "collect", "--json")
    assert done.exit_code == 1
    assert [row["tag"] for row in json.loads(done.stdout)["rows"]] == ["a"]
    assert "b: b/speed.json is not JSON" in done.stderr


def test_a_dry_run_does_nothing(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    done = call(results, "launch", str(path), "--on", "slurm", "--dry-run", "--mem", "8GB")
    assert done.exit_code == 0, done.output
    assert "2 experiments" in done.stdout
    assert "#SBATCH --array=0-1%" in done.stdout
    assert "#SBATCH --mem=8192MB" in done.stdout
    assert not results.root.exists()
    facts = json.loads(call(results, "launch", str(path), "--dry-run", "--json").stdout)
    assert [e["tag"] for e in facts["experiments"]] == [
        "s-nano-192x320x37-psa-0.5",
        "s-nano-192x320x37-psa-0.3",
    ]


def test_launch_here_and_retry(results: Results, tmp_path: Path) -> None:
    path = tmp_path / "s.yaml"
    path.write_text(GOOD)
    tag = "s-nano-192x320x37-psa-0.5"
    fake.trouble(results.root, tag, "quality-1", "raise")
    done = call(results, "launch", str(path), "--max-attempts", "1", "--max-parallel", "2")
    assert done.exit_code == 1, done.output
    assert "1 of 2 experiments are not done" in done.stderr
    again = call(results, "retry", "s", "--json")
    assert again.exit_code == 0, again.output
    assert json.loads(again.stdout) == {"submitted": [tag], "spent": []}
    rows = json.loads(call(results, "status", "s", "--json").stdout)
    assert [row["state"] for row in rows] == ["done", "done"]
    assert call(results, "retry", "s").exit_code == 0
    assert "nothing was waiting" in call(results, "cancel", "s").stdout


def test_every_command_has_examples() -> None:
    runner = CliRunner()
    for command in app.registered_commands:
        text = runner.invoke(app, [str(command.name), "--help"]).stdout
        assert f"jali experiment {command.name}" in text, command.name


def test_status_and_tables_on_a_small_terminal_without_our_alphabet(results: Results) -> None:
    long = "quick-wan-t2v-480x832x81-entropy-0.5"
    run_experiment(replace(E, tag=long), results, fake.stages())
    fake.trouble(results.root, "b", "quality-1", "raise")
    with pytest.raises(RuntimeError):
        run_experiment(replace(E, tag="b"), results, fake.stages())
    env = os.environ | {"PYTHONIOENCODING": "ascii", "COLUMNS": "40", "LC_ALL": "C"}
    ends = ["--results", str(results.root), "--logs-dir", str(results.logs)]
    for words in (["status"], ["logs", "b"], ["collect", long]):
        command = [sys.executable, "-m", "jali", "experiment", *words, *ends]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stdout.isascii()
        if words[0] == "status":
            assert max(map(len, done.stdout.splitlines())) <= 40
            for said in (long, "state done", "state failed", "stage quality", "1 failed, 1 done"):
                assert said in done.stdout


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a read-only disk needs root")
def test_a_read_only_folder_is_one_sentence(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "ro", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        done = call(Results(disk / "results", tmp_path / "logs"), "run", "--tag", "a")
        assert done.exit_code == 1
        assert done.stderr.startswith(f"jali: {disk}/results cannot be used")
        assert "Read-only file system" in done.stderr
        assert "Errno" not in done.stderr
        assert done.stderr.count("\n") == 1
    finally:
        subprocess.run(["umount", str(disk)], check=True)
