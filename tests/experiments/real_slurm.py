"""Fixtures of experiments: a folder for results, and a real Slurm where there is one."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from jali.experiments.results import Results

SCRIPT = Path(__file__).parents[2] / ".ci" / "slurm"
FOLDER = Path(os.environ.get("JALI_SLURM_DIR", "/tmp/jali-slurm"))
PROGRAMS = ("sbatch", "slurmctld", "slurmd", "munged")


@pytest.fixture
def results(tmp_path: Path) -> Results:
    return Results(tmp_path / "results", tmp_path / "logs")


@pytest.fixture(scope="session")
def cluster() -> Iterator[Path]:
    """A Slurm that answers: the one that runs already, or one for these tests alone.

    Where there is none these tests skip, and say so; with JALI_REQUIRE_SLURM=1, as in CI, that is
    a failure. Several test processes share one cluster, and the last of them stops it.
    """
    if "SLURM_CONF" not in os.environ and (FOLDER / "slurm.conf").exists():
        os.environ["SLURM_CONF"] = str(FOLDER / "slurm.conf")
    user = FOLDER / "users" / str(os.getpid())
    with _alone("start"):
        answers = _answers()
        if not answers:
            _start()
        if not answers or user.parent.exists():
            user.parent.mkdir(exist_ok=True)
            user.touch()
    yield SCRIPT
    with _alone("start"):
        if user.exists():
            user.unlink()
            if not any(user.parent.iterdir()):
                subprocess.run([SCRIPT, "stop"], check=False, capture_output=True)


@pytest.fixture
def slurm(cluster: Path) -> Iterator[Path]:
    """The cluster for one test at a time: two tests on its two CPUs would wait for each other."""
    with _alone("use"):
        yield cluster


def _start() -> None:
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    why = f"{', '.join(missing)} not installed" if missing else ""
    if os.geteuid() != 0:
        why = "starting one needs root"
    if why:
        reason = f"needs a Slurm ({why}): .ci/slurm start, as root on Debian, makes one"
        if os.environ.get("JALI_REQUIRE_SLURM") == "1":
            pytest.fail(f"JALI_REQUIRE_SLURM is set: {reason}")
        pytest.skip(reason)
    done = subprocess.run([SCRIPT, "start"], check=False, capture_output=True, text=True)
    if done.returncode:
        pytest.fail(f".ci/slurm start failed: {done.stderr}")
    os.environ["SLURM_CONF"] = str(FOLDER / "slurm.conf")


def _answers() -> bool:
    try:
        done = subprocess.run(["sinfo", "-h"], capture_output=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0


@contextlib.contextmanager
def _alone(what: str) -> Iterator[None]:
    with Path(f"{FOLDER}.{what}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
