"""One owner at a time, by name; the dead hold nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jali.experiments.lock import STALE_SECONDS, HeldError, holder, locked, stale
from jali.experiments.owner import Owner, me, process
from jali.experiments.storage import write_json


def put(path: Path, owner: Owner) -> None:
    facts = {"kind": "jali-lock", "version": 1, "what": "x", "since": "then"}
    write_json(path, facts | {"owner": owner.to_dict()})


def test_held_while_the_block_runs(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    with locked(path, "the thing"):
        assert holder(path) == me()
        words = r"the thing is held by .* \(process \d+\)"
        with pytest.raises(HeldError, match=words) as error, locked(path, "the thing"):
            pass
        assert str(path) in str(error.value)
    assert not path.exists()


def test_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="oops"), locked(tmp_path / "lock.json", "it"):
        raise RuntimeError("oops")
    assert not (tmp_path / "lock.json").exists()


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = process(gone.pid)
    path = tmp_path / "lock.json"
    put(path, owner)
    assert owner.alive() is True
    with pytest.raises(HeldError), locked(path, "it"):
        pass
    gone.kill()
    end = time.monotonic() + 5
    while owner.alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert owner.alive() is False  # a zombie: nobody has waited for it yet
    with locked(path, "it"):
        assert holder(path) == me()
    gone.wait()


def test_a_number_that_was_given_to_another_process(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    put(path, dataclasses.replace(me(), born=me().born - 100))
    with locked(path, "it"):
        pass


def test_another_machine_is_believed_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    put(path, Owner("ann", "elsewhere", 1, 1))
    with pytest.raises(HeldError, match="ann on elsewhere"), locked(path, "it"):
        pass
    os.utime(path, (0, time.time() - STALE_SECONDS - 1))
    with locked(path, "it"):
        pass


def test_slurm_is_asked_about_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    put(path, Owner("ann", "node7", 1, 1, job="12_3"))
    asked: list[str] = []

    def ended(job: str) -> bool:
        asked.append(job)
        return len(asked) > 1

    with pytest.raises(HeldError, match="Slurm job 12_3"), locked(path, "it", job_ended=ended):
        pass
    with locked(path, "it", job_ended=ended):
        pass
    assert asked == ["12_3", "12_3"]


def test_a_job_that_slurm_started_again_takes_its_own_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    put(path, Owner("ann", "node7", 1, 1, job="12_3"))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with locked(path, "it"):
        assert holder(path) == me()


def test_and_waits_for_its_earlier_self(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    old = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"])
    put(path, dataclasses.replace(process(old.pid), job="12"))
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    begin = time.monotonic()
    with locked(path, "it"):
        assert time.monotonic() - begin > 0.5
    old.wait()


def test_a_lock_that_cannot_be_read_is_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text("{")
    assert not stale(path)
    with pytest.raises(HeldError, match="an unknown process"), locked(path, "it"):
        pass
