"""One owner at a time, by name; the dead hold nothing."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jali.experiments import lock
from jali.experiments.lock import (
    STALE_SECONDS,
    TAKEOVER_SECONDS,
    HeldError,
    Owner,
    check_free,
    hold,
    holder,
    me,
)
from jali.files import read_json, write_json


def put(path: Path, owner: Owner) -> None:
    facts = {"kind": "jali-lock", "version": 1, "what": "x", "since": "then"}
    write_json(path, facts | {"owner": dataclasses.asdict(owner)})


def test_held_while_the_block_runs(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    with hold(path, "the thing"):
        assert holder(path) == me()
        words = r"the thing is held by .* \(process \d+\)"
        with pytest.raises(HeldError, match=words) as error, hold(path, "the thing"):
            pass
        assert str(path) in str(error.value)
    assert not path.exists()


def test_released_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="oops"), hold(tmp_path / "lock.json", "it"):
        raise RuntimeError("oops")
    assert not (tmp_path / "lock.json").exists()


def test_a_dead_process_holds_nothing(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    owner = Owner.of(gone.pid)
    path = tmp_path / "lock.json"
    put(path, owner)
    assert owner.alive() is True
    with pytest.raises(HeldError), hold(path, "it"):
        pass
    gone.kill()
    end = time.monotonic() + 5
    while owner.alive() and time.monotonic() < end:
        time.sleep(0.05)
    assert owner.alive() is False  # a zombie: nobody has waited for it yet
    with hold(path, "it"):
        assert holder(path) == me()
    gone.wait()


def test_a_number_that_was_given_to_another_process(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    put(path, dataclasses.replace(me(), born=me().born - 100))
    with hold(path, "it"):
        pass


def test_another_machine_is_believed_for_a_while(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    put(path, Owner("ann", "elsewhere", 1, 1))
    with pytest.raises(HeldError, match="ann on elsewhere"), hold(path, "it"):
        pass
    os.utime(path, (0, time.time() - STALE_SECONDS - 1))
    with hold(path, "it"):
        pass


def test_slurm_is_asked_about_its_jobs(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    put(path, Owner("ann", "node7", 1, 1, job="12_3"))
    asked: list[str] = []

    def ended(job: str) -> bool:
        asked.append(job)
        return len(asked) > 1  # the second time, and when it is looked at again

    with pytest.raises(HeldError, match="Slurm job 12_3"), hold(path, "it", job_ended=ended):
        pass
    with hold(path, "it", job_ended=ended):
        pass
    assert set(asked) == {"12_3"}


def test_a_job_that_slurm_started_again_takes_its_own_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    put(path, Owner("ann", "node7", 1, 1, job="12_3"))
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "12")
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "3")
    with hold(path, "it"):
        assert holder(path) == me()


def test_and_waits_for_its_earlier_self(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    old = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1.5)"])
    put(path, dataclasses.replace(Owner.of(old.pid), job="12"))
    monkeypatch.delenv("SLURM_ARRAY_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    begin = time.monotonic()
    with hold(path, "it"):
        assert time.monotonic() - begin > 0.5
    old.wait()


def test_a_lock_that_cannot_be_read_is_not_ignored(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    path.write_text("{")
    with pytest.raises(HeldError):
        check_free(path, "it")
    with pytest.raises(HeldError, match="an unknown process"), hold(path, "it"):
        pass


def test_what_is_taken_between_two_looks_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes to remove a dead lock that another has removed must not remove the next one's."""
    path, looks = tmp_path / "lock.json", []
    dead, real = dataclasses.replace(me(), born=me().born - 100), lock.holder
    put(path, dead)

    def look(at: Path) -> Owner | None:
        looks.append(at)
        if len(looks) == 2:  # another has removed it
            path.unlink()
        found = real(at)
        if len(looks) == 2:  # and a third takes it after this look
            put(path, me())
        return found

    monkeypatch.setattr(lock, "holder", look)
    lock._remove_dead(path, "it", lambda _: False)
    assert len(looks) == 2
    assert real(path) == me()


def test_many_take_over_from_one_dead_and_one_gets_it(tmp_path: Path) -> None:
    """Again and again: each holder checks that nobody else is inside."""
    path, inside = tmp_path / "lock.json", tmp_path / "inside"
    put(path, dataclasses.replace(me(), born=me().born - 100))
    code = """
import sys, time
from pathlib import Path
from jali.experiments.lock import HeldError, hold
path, inside = Path(sys.argv[1]), Path(sys.argv[2])
taken, end = 0, time.monotonic() + 30
while taken < 20 and time.monotonic() < end:
    try:
        with hold(path, "it"):
            inside.touch(exist_ok=False)
            taken += 1
            inside.unlink()
    except HeldError:
        pass
sys.exit(taken < 20)
"""
    run = [sys.executable, "-c", code, str(path), str(inside)]
    takers = [subprocess.Popen(run, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    for taker in takers:
        _, said = taker.communicate(timeout=60)
        assert taker.returncode == 0, said
    assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_taker_that_died_is_not_waited_for_forever(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    put(path, dataclasses.replace(me(), born=me().born - 100))
    guard = tmp_path / ".lock.json.takeover"
    guard.touch()
    os.utime(guard, (0, time.time() - TAKEOVER_SECONDS - 1))
    with hold(path, "it"):
        assert holder(path) == me()


def test_an_owner_who_leaves_while_he_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    put(path, Owner("ann", "elsewhere", 1, 1))

    def read_and_remove(file: Path, kind: str | None = None) -> dict[str, object]:
        data = read_json(file, kind)
        file.unlink()
        return data

    monkeypatch.setattr(lock, "read_json", read_and_remove)
    check_free(path, "it")  # neither held nor an error
    monkeypatch.undo()
    with hold(path, "it"):
        pass


def test_a_full_disk_leaves_no_lock_of_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int) -> None:  # noqa: ARG001
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(lock.os, "fsync", full)
    with pytest.raises(OSError, match="No space left"), hold(tmp_path / "lock.json", "it"):
        pass
    assert list(tmp_path.iterdir()) == []
