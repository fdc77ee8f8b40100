"""The shipped quick sweep, for real: nano generates, here and on Slurm, and the numbers agree."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fake import eventually

from jali.experiments.lock import holder
from jali.experiments.results import Results
from jali.experiments.status import read_status
from jali.experiments.sweep import read_sweep
from jali.nano import folder as nano_folder

SWEEP = Path(__file__).parents[2] / "experiments" / "sweeps" / "quick.yaml"
pytestmark = [
    pytest.mark.timeout(900),  # two minutes each on two idle cores; CI may be busy
    pytest.mark.skipif(
        not (nano_folder() / "model_index.json").exists(), reason="nano's weights are not here"
    ),
]


def jali(results: Results, *words: str, wait: bool = True) -> Any:
    command = [sys.executable, "-m", "jali", "experiment", *words]
    command += ["--results", str(results.root), "--logs-dir", str(results.logs)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    if not wait:
        return process
    try:
        out, err = process.communicate()
    except BaseException:  # the limit of this test, or Ctrl-C, ends what it started too
        process.send_signal(signal.SIGINT)
        raise
    assert process.returncode == 0, out + err
    return out


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """The sweep on this machine."""
    folder = tmp_path_factory.mktemp("local")
    results = Results(folder / "results", folder / "logs")
    jali(results, "launch", str(SWEEP), "--on", "local", "--max-parallel", "2", "--json")
    return results


TAGS = read_sweep(SWEEP).tags


def test_on_this_machine(local: Results) -> None:
    assert [row.state for row in read_status(local, TAGS)] == ["done"] * 4
    for tag in TAGS:
        folder = local.folder(tag)
        for name in ("config.json", "speed.json", "quality.json", "report.html"):
            assert (folder / name).stat().st_size > 0
        assert "done" in local.log(tag).read_text()
        dense, *sparse = json.loads(local.speed(tag).read_text())["rows"]
        assert (dense["variant"], dense["cost"]) == ("dense", 1.0)
        for row in sparse:
            assert row["sparse_cost"] == pytest.approx(row["budget"], abs=0.02)
            assert row["seconds"] > 0
        for row in json.loads(local.quality(tag).read_text())["rows"]:
            assert 10 < row["psnr"]["mean"] < 80
            assert row["faults"] == {"black": 0, "frozen": 0, "nan": 0}


def test_a_larger_budget_is_closer_to_dense(local: Results) -> None:
    rows = json.loads(jali(local, "collect", "quick", "--json"))["rows"]
    found = {(row["variant"], row["budget"]): row["quality.psnr.mean"] for row in rows}
    assert set(found) == {(v, b) for v in ("entropy", "psa") for b in (0.5, 0.3)}
    for variant in ("entropy", "psa"):
        assert found[variant, 0.5] > found[variant, 0.3]


def test_the_table_is_the_same_byte_for_byte(local: Results, tmp_path: Path) -> None:
    for name in ("one", "two"):
        jali(local, "collect", "quick", "--output", str(tmp_path / name))
    for form in ("csv", "json", "html"):
        one, two = ((tmp_path / n / f"table.{form}").read_bytes() for n in ("one", "two"))
        assert one == two


def test_a_second_launch_has_nothing_to_do(local: Results) -> None:
    before = {tag: local.state(tag).read_bytes() for tag in TAGS}
    jali(local, "launch", str(SWEEP), "--on", "local", "--json")
    assert {tag: local.state(tag).read_bytes() for tag in TAGS} == before


def test_on_slurm_whatever_happens_the_numbers_are_the_same(
    local: Results, results: Results, slurm: Path  # noqa: ARG001
) -> None:  # fmt: skip
    """One job's process is killed, one job is cancelled and retried; nothing else is disturbed."""
    arguments = ("launch", str(SWEEP), "--on", "slurm", "--max-parallel", "2", "--wait", "--json")
    killed, cancelled = TAGS[0], TAGS[3]
    launched = jali(results, *arguments, wait=False)
    try:
        eventually(lambda: stage(results, killed) == "quality", 240)
        owner = holder(results.lock(killed))
        assert owner is not None
        assert owner.job is not None
        os.kill(owner.pid, signal.SIGKILL)
        jali(results, "cancel", cancelled)
        out, err = launched.communicate(timeout=540)
    finally:
        launched.kill()
    assert launched.returncode == 1, err  # one was cancelled, and that is said
    states = {row["tag"]: row for row in json.loads(out)}
    assert [states[tag]["state"] for tag in TAGS] == ["done", "done", "done", "cancelled"]
    assert states[killed]["submitted"] == 2
    jali(results, "retry", "quick", "--wait", "--json")
    assert [row.state for row in read_status(results, TAGS)] == ["done"] * 4
    for tag in TAGS:
        assert results.quality(tag).read_bytes() == local.quality(tag).read_bytes()
    here, there = (
        json.loads(jali(p, "collect", "quick", "--json"))["rows"] for p in (local, results)
    )
    assert [untimed(row) for row in here] == [untimed(row) for row in there]


def stage(results: Results, tag: str) -> str | None:
    return read_status(results, [tag])[0].stage if results.config(tag).exists() else None


def untimed(row: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value for name, value in row.items() if "second" not in name and name != "speedup"
    }
