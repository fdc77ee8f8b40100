"""One experiment: kept where nothing changed, resumed where it died, honest about where it is."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import getpass
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import fake
import pytest
from fake import eventually

from jali.experiments.experiment import Experiment
from jali.experiments.job import OtherSettingsError, Stopped, read_config, run_experiment
from jali.experiments.lock import me
from jali.experiments.results import Results
from jali.experiments.state import State
from jali.experiments.status import read_status
from jali.files import write_json

E = Experiment(tag="a", model="nano", budget=0.5)
STAGES = ("calibrate", "benchmark", "quality", "report")
CHILD = """
import sys
from jali.experiments import Experiment, Results, run_experiment
import fake
results = Results(sys.argv[1], sys.argv[2])
stages = fake.stages(float(sys.argv[3]))
run_experiment(Experiment(tag="a", model="nano", budget=0.5), results, stages)
"""


def run(results: Results, experiment: Experiment = E, **options: bool) -> None:
    run_experiment(experiment, results, fake.stages(), **options)


def child(results: Results, seconds: float = 0.0) -> subprocess.Popen[bytes]:
    arguments = [str(results.root), str(results.logs), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )


def state(results: Results, tag: str = "a") -> str:
    return read_status(results, [tag])[0].state


def test_everything_is_where_esa_puts_it(results: Results) -> None:
    run(results)
    folder = results.root / "a"
    assert {"config.json", "speed.json", "quality.json"} <= {p.name for p in folder.iterdir()}
    assert "calibrate: done in" in (results.logs / "a.log").read_text()
    assert read_config(results.config("a")) == E
    assert state(results) == "done"
    assert not (folder / "lock.json").exists()


def test_a_finished_experiment_is_not_done_again(results: Results) -> None:
    run(results)
    before = fake.ran(results.root)
    files = {
        p: p.read_bytes() for p in results.folder("a").rglob("*.json") if p.name != "state.json"
    }
    run(results)
    assert fake.ran(results.root) == before
    assert all(path.read_bytes() == content for path, content in files.items())
    found = State.read(results.state("a"))
    assert found is not None
    assert set(found.stages.values()) == {"kept"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("unit", [0, 2])
def test_killed_anywhere_it_goes_on_from_there(results: Results, stage: str, unit: int) -> None:
    fake.trouble(results.root, "a", f"{stage}-{unit}", "kill")
    died = child(results)
    assert died.wait(60) == -signal.SIGKILL
    assert state(results) == "lost"
    begun = fake.ran(results.root)
    assert begun[-1] == ("a", stage, unit)
    run(results)
    assert state(results) == "done"
    again = fake.ran(results.root)[len(begun) :]
    assert again[0] == ("a", stage, unit)  # only the unit in progress is done twice
    expected = [("a", s, u) for s in STAGES for u in range(fake.UNITS)]
    assert begun[:-1] + again == expected


def test_the_same_as_if_nothing_had_happened(results: Results, tmp_path: Path) -> None:
    fake.trouble(results.root, "a", "quality-1", "kill")
    assert child(results).wait(60) == -signal.SIGKILL
    run(results)
    other = Results(tmp_path / "other", tmp_path / "other-logs")
    run(other)
    for name in ("config.json", "speed.json", "quality.json"):
        assert (results.folder("a") / name).read_bytes() == (other.folder("a") / name).read_bytes()


def test_a_failure_is_told_and_resumed(results: Results) -> None:
    fake.trouble(results.root, "a", "benchmark-1", "raise")
    with pytest.raises(RuntimeError, match="told to fail"):
        run(results)
    (row,) = read_status(results, ["a"])
    assert (row.state, row.stage) == ("failed", "benchmark")
    assert "the fake stage was told to fail" in row.why
    assert "told to fail" in (results.logs / "a.log").read_text()
    run(results)
    assert state(results) == "done"
    assert read_status(results, ["a"])[0].attempts == 2


def test_ctrl_c_and_sigterm_leave_no_lock(results: Results) -> None:
    fake.trouble(results.root, "a", "benchmark-1", "interrupt")
    with pytest.raises(KeyboardInterrupt):
        run(results)
    assert state(results) == "failed"
    assert not results.lock("a").exists()
    fake.trouble(results.root, "a", "quality-1", "hang")
    running = child(results)
    eventually(lambda: ("a", "quality", 1) in fake.ran(results.root))
    assert state(results) == "running"
    running.terminate()
    assert running.wait(20) != 0
    assert "SIGTERM" in read_status(results, ["a"])[0].why
    assert not results.lock("a").exists()
    run(results)
    assert state(results) == "done"


def test_a_submitted_job_looks_for_its_cancellation_itself(
    results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The signal may have come before there was anyone to hear it."""
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "local")

    def cancel(*_: object) -> None:
        write_json(results.cancelled("a"), {"owner": dataclasses.asdict(me())})

    cancel()
    with pytest.raises(Stopped, match="cancelled by"):
        run(results)
    assert fake.ran(results.root) == []
    assert state(results) == "cancelled"
    results.cancelled("a").unlink()
    monkeypatch.setattr("jali.experiments.state.WRITE_SECONDS", 0.0)
    with pytest.raises(Stopped, match="cancelled by"):  # and while it runs, where no signal comes
        run_experiment(E, results, fake.stages(), on_progress=cancel)
    assert len(fake.ran(results.root)) == 2
    assert state(results) == "cancelled"


def test_who_starts_a_cancelled_one_by_hand_means_it(results: Results) -> None:
    write_json(results.cancelled("a"), {"owner": dataclasses.asdict(me())})
    run(results)
    assert state(results) == "done"
    assert not results.cancelled("a").exists()


def test_changed_inputs_redo_what_depends_on_them(results: Results) -> None:
    run(results)
    (results.folder("a") / "calibrate.json").write_text("{}")  # no longer what the stage wrote
    before = len(fake.ran(results.root))
    run(results)
    found = State.read(results.state("a"))
    assert found is not None
    assert found.stages["calibrate"] == "done"
    # It came out the same, so what reads it is unchanged.
    assert found.stages["quality"] == "kept"
    assert len(fake.ran(results.root)) == before
    run(results, replace(E, budget=0.25), overwrite=True)
    found = State.read(results.state("a"))
    assert found is not None
    assert found.stages["calibrate"] == "kept"  # a budget is nothing to this one
    assert found.stages["benchmark"] == "done"


def test_another_experiment_under_the_same_tag_is_refused(results: Results) -> None:
    run(results)
    before = results.config("a").read_bytes()
    with pytest.raises(OtherSettingsError, match=r"budget 0.5, now 0.25.*another tag"):
        run(results, replace(E, budget=0.25))
    assert results.config("a").read_bytes() == before
    assert state(results) == "done"


@pytest.mark.parametrize("name", ["speed.json", "quality.json"])
@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"rows": []}', "\x00\xff"])
def test_a_damaged_result_is_told_and_made_again(results: Results, name: str, damage: str) -> None:
    run(results)
    good = (results.folder("a") / name).read_bytes()
    (results.folder("a") / name).write_text(damage)
    (row,) = read_status(results, ["a"])
    assert row.state == "damaged"
    assert name in row.why
    run(results)
    assert (results.folder("a") / name).read_bytes() == good
    assert state(results) == "done"


@pytest.mark.parametrize("damage", ["", "{", '{"kind": "jali-state", "version": 1}', "\x00"])
def test_an_unreadable_state_is_not_the_end(results: Results, damage: str) -> None:
    run(results)
    results.state("a").write_text(damage)
    assert state(results) == "damaged"
    run(results)
    assert state(results) == "done"


def test_an_unreadable_config_is_not_guessed(results: Results) -> None:
    run(results)
    results.config("a").write_text("{")
    assert state(results) == "damaged"
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        run(results)
    run(results, overwrite=True)
    assert state(results) == "done"


def test_a_record_cannot_point_elsewhere(results: Results) -> None:
    run(results)
    path = results.record("a", "quality")
    record = json.loads(path.read_text())
    record["outputs"] = {"../../../etc/passwd": "0"}
    path.write_text(json.dumps(record))
    assert state(results) == "damaged"
    run(results)
    assert state(results) == "done"


def test_a_full_disk_loses_nothing(results: Results) -> None:
    fake.trouble(results.root, "a", "quality-1", "full")
    with pytest.raises(OSError, match="No space left"):
        run(results)
    (row,) = read_status(results, ["a"])
    assert row.state == "failed"
    assert "no space left on the disk" in row.why
    run(results)
    assert fake.ran(results.root).count(("a", "calibrate", 0)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """Full from the beginning, or a little later: wherever the last page goes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        results = Results(disk / "results", tmp_path / "logs")
        run(results)
        good = {path: path.read_bytes() for path in (results.speed("a"), results.quality("a"))}
        outcomes = set()
        for pages in range(8):
            results.record("a", "quality").unlink(missing_ok=True)
            fill(disk / "filler", pages)
            outcomes.add(outcome(results))
            assert {path: path.read_bytes() for path in good} == good
            assert not list(results.folder("a").rglob(".*.json.*-*"))  # no half of a new file
            (disk / "filler").unlink()
            run(results)
            assert state(results) == "done"
        assert "ENOSPC" in outcomes
        assert outcomes <= {"ENOSPC", "done"}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def outcome(results: Results) -> str:
    try:
        run(results)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "done"


def fill(path: Path, pages: int) -> None:
    """All of the disk but some pages."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT)
    try:
        with contextlib.suppress(OSError):
            while os.write(handle, b"x" * 4096):
                pass
        os.ftruncate(handle, os.lseek(handle, 0, os.SEEK_CUR) - 4096 * pages)
    finally:
        os.close(handle)


def test_progress_and_time_left_are_told(results: Results) -> None:
    fake.trouble(results.root, "a", "quality-1", "hang")
    running = child(results, 0.3)
    try:
        eventually(lambda: ("a", "quality", 1) in fake.ran(results.root))
        (row,) = read_status(results, ["a"])
        assert (row.state, row.stage) == ("running", "quality")
        assert (row.done, row.total) in ((0, 0), (1, 3))
        assert 0.5 <= row.share < 0.75
        assert row.seconds_left is not None
        assert 0 < row.seconds_left < 30
    finally:
        running.kill()
        running.wait()


def test_the_second_of_two_runs_is_refused_with_the_first_ones_name(results: Results) -> None:
    fake.trouble(results.root, "a", "calibrate-1", "hang")
    first = child(results)
    try:
        eventually(lambda: ("a", "calibrate", 1) in fake.ran(results.root))
        second = child(results)
        _, said = second.communicate(timeout=30)
        assert second.returncode
        owner = f"is held by {getpass.getuser()} on {os.uname().nodename} (process {first.pid})"
        assert owner.encode() in said
        assert state(results) == "running"
        assert len(fake.ran(results.root)) == 2
    finally:
        first.kill()
        first.wait()
    begin = time.monotonic()
    run(results)  # the dead one's lock is taken over at once
    assert time.monotonic() - begin < 10
    assert state(results) == "done"


def test_many_at_once_and_one_does_it(results: Results) -> None:
    runs = [child(results, 0.05) for _ in range(4)]
    codes = [one.wait(60) for one in runs]
    assert codes.count(0) >= 1
    counts = [fake.ran(results.root).count(unit) for unit in set(fake.ran(results.root))]
    assert set(counts) == {1}
    assert state(results) == "done"
