"""The srun and sbatch recipes of docs/scale.md, on a real Slurm; and the numbers of that page."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake import eventually

from jali.experiments.experiment import Experiment
from jali.experiments.scale import forecast, known_strides
from jali.integration.models.registry import MODELS

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "scale.md").read_text()
BLOCKS = re.findall(r"```bash\n(.*?)```", PAGE, re.DOTALL)
JALI = """#!/bin/sh
echo "$@" > "$CALLS/${SLURM_JOB_ID:-none}.part"
mv "$CALLS/${SLURM_JOB_ID:-none}.part" "$CALLS/${SLURM_JOB_ID:-none}"
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A `jali` and a `torchrun` that only write down how they were called."""
    found, tools = tmp_path / "calls", tmp_path / "bin"
    for folder in (found, tools, tmp_path / "experiments" / "logs"):
        folder.mkdir(parents=True)
    for name in ("jali", "torchrun"):
        (tools / name).write_text(JALI)
        (tools / name).chmod(0o755)
    for name in ("job.sbatch", "ranks.sbatch"):
        script = (ROOT / "experiments" / name).read_text()
        (tmp_path / "experiments" / name).write_text(script)
    monkeypatch.setenv("CALLS", str(found))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    return found


def recipe(start: str, *words: str) -> str:
    return next(b for b in BLOCKS if b.startswith(start) and all(w in b for w in words))


def smaller(text: str) -> str:
    """The test's cluster has two CPUs and two GPUs; nothing else is changed."""
    for ours, theirs in (("8", "1"), ("32", "1")):
        text = text.replace(f"--cpus-per-task={ours}", f"--cpus-per-task={theirs}")
    return re.sub(r"--mem=\d+G", "--mem=200M", text).replace("gpu:4", "gpu:2")


def run(text: str, calls: Path, count: int) -> list[str]:
    for script in calls.parent.glob("experiments/*.sbatch"):
        script.write_text(smaller(script.read_text()))
    done = subprocess.run(
        ["bash", "-c", smaller(text)], cwd=calls.parent, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    eventually(lambda: len([p for p in calls.iterdir() if p.suffix != ".part"]) == count, 60)
    return sorted(path.read_text().strip() for path in calls.iterdir())


def test_the_page_shows_the_scripts_that_ship() -> None:
    for name in ("job.sbatch", "ranks.sbatch"):
        assert (ROOT / "experiments" / name).read_text() in BLOCKS


def test_srun(slurm: Path, calls: Path) -> None:  # noqa: ARG001
    (said,) = run(recipe("srun"), calls, 1)
    assert said.startswith("experiment run --model wan-t2v-1.3b --height 720 --width 1280")


def test_several_srun_at_once(slurm: Path, calls: Path) -> None:  # noqa: ARG001
    said = run(recipe("for budget", "srun"), calls, 3)
    assert [line.split("--budget ")[1].split()[0] for line in said] == ["0.3", "0.5", "0.7"]


def test_sbatch_passes_what_is_exported(slurm: Path, calls: Path) -> None:  # noqa: ARG001
    said = run(recipe("for budget", "sbatch"), calls, 3)
    assert said == [
        f"experiment run --model wan-t2v-1.3b --budget {b} --tag 1.3b-b{b}" for b in (0.3, 0.5, 0.7)
    ]


def test_torchrun_under_sbatch(slurm: Path, calls: Path) -> None:  # noqa: ARG001
    (said,) = run(recipe("sbatch", "ranks.sbatch"), calls, 1)
    assert "--nproc-per-node 4 -m jali experiment run --model wan-t2v-14b" in said
    assert "--context-parallel 4 --masks books/14b-480p.safetensors --tag 14b-cp4" in said


def test_the_flags_of_the_recipes_exist() -> None:
    from typer.main import get_command

    from jali.cli.main import app

    experiment = get_command(app).commands["experiment"].commands["run"]  # type: ignore[attr-defined]
    known = {name for parameter in experiment.params for name in parameter.opts}
    for block in BLOCKS:
        for call in re.findall(r"jali experiment run (.*?)(?:\n\n|&|```|$)", block, re.DOTALL):
            # "set TAG with --export" is what the shell says where TAG is missing
            for flag in re.findall(r"--[a-z-]+", call.replace("with --export", "")):
                assert flag in known, flag


# The numbers


def test_the_table_on_the_page_is_the_one_of_the_cost_model() -> None:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    from scale import table

    assert table() in PAGE


@pytest.mark.parametrize("model", MODELS)
def test_every_model_has_a_forecast_and_its_default_size_fits(model: str) -> None:
    e = Experiment(tag="x", model=model).completed()
    found = forecast(e)
    assert found is not None
    assert known_strides(model) is not None
    assert found.sparse_clip > 0
    assert found.seconds > 0
    assert found.bytes > 0


def test_more_of_anything_costs_more() -> None:
    def seconds(**facts: int | float | bool) -> float:
        found = forecast(Experiment(tag="x", model="wan-t2v-1.3b", **facts).completed())  # type: ignore[arg-type]
        assert found is not None
        return found.seconds

    usual = seconds()
    assert seconds(num_prompts=6) > usual
    assert seconds(steps=60) > usual
    assert seconds(height=720, width=1280) > 3 * usual
    assert seconds(budget=0.3) < usual
    assert seconds(calibrate=False) < usual


def test_a_book_is_as_large_as_forecast() -> None:
    found = forecast(Experiment(tag="x", model="wan-t2v-1.3b", height=720, width=1280).completed())
    assert found is not None
    assert found.book_bytes == pytest.approx(30 * 50 * 12 * 296 * 591 * 9 / 8, rel=0.001)
