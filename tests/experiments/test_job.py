"""One experiment: kept where nothing changed, resumed where it died, honest about where it is."""

from __future__ import annotations

import contextlib
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
from jali.experiments.job import OtherSettingsError, read_config, run_experiment
from jali.experiments.journal import Entry
from jali.experiments.place import Place
from jali.experiments.status import standings

E = Experiment(tag="a", model="nano", budget=0.5)
STAGES = ("calibrate", "benchmark", "quality", "report")
CHILD = """
import sys
from jali.experiments import Experiment, Place, run_experiment
import fake
place = Place(sys.argv[1], sys.argv[2])
stages = fake.stages(float(sys.argv[3]))
run_experiment(Experiment(tag="a", model="nano", budget=0.5), place, stages)
"""


def run(place: Place, experiment: Experiment = E, **options: bool) -> None:
    run_experiment(experiment, place, fake.stages(), **options)


def child(place: Place, seconds: float = 0.0) -> subprocess.Popen[bytes]:
    arguments = [str(place.results), str(place.logs), str(seconds)]
    return subprocess.Popen(
        [sys.executable, "-c", CHILD, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )


def state(place: Place, tag: str = "a") -> str:
    return standings(place, [tag])[0].state


def test_everything_is_where_esa_puts_it(place: Place) -> None:
    run(place)
    folder = place.results / "a"
    assert {"config.json", "speed.json", "quality.json"} <= {p.name for p in folder.iterdir()}
    assert "calibrate: done in" in (place.logs / "a.log").read_text()
    assert read_config(place, "a") == E
    assert state(place) == "done"
    assert not (folder / "lock.json").exists()


def test_a_finished_experiment_is_not_done_again(place: Place) -> None:
    run(place)
    before = fake.ran(place.results)
    files = {p: p.read_bytes() for p in place.folder("a").rglob("*.json") if p.name != "state.json"}
    run(place)
    assert fake.ran(place.results) == before
    assert all(path.read_bytes() == content for path, content in files.items())
    entry = Entry.read(place.state("a"))
    assert entry is not None
    assert set(entry.stages.values()) == {"kept"}


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("unit", [0, 2])
def test_killed_anywhere_it_goes_on_from_there(place: Place, stage: str, unit: int) -> None:
    fake.trouble(place.results, "a", f"{stage}-{unit}", "kill")
    died = child(place)
    assert died.wait(60) == -signal.SIGKILL
    assert state(place) == "lost"
    begun = fake.ran(place.results)
    assert begun[-1] == ("a", stage, unit)
    run(place)
    assert state(place) == "done"
    again = fake.ran(place.results)[len(begun) :]
    assert again[0] == ("a", stage, unit)  # only the unit in progress is done twice
    expected = [("a", s, u) for s in STAGES for u in range(fake.UNITS)]
    assert begun[:-1] + again == expected


def test_the_same_as_if_nothing_had_happened(place: Place, tmp_path: Path) -> None:
    fake.trouble(place.results, "a", "quality-1", "kill")
    assert child(place).wait(60) == -signal.SIGKILL
    run(place)
    other = Place(tmp_path / "other", tmp_path / "other-logs")
    run(other)
    for name in ("config.json", "speed.json", "quality.json"):
        assert (place.folder("a") / name).read_bytes() == (other.folder("a") / name).read_bytes()


def test_a_failure_is_told_and_resumed(place: Place) -> None:
    fake.trouble(place.results, "a", "benchmark-1", "raise")
    with pytest.raises(RuntimeError, match="told to fail"):
        run(place)
    (row,) = standings(place, ["a"])
    assert (row.state, row.stage) == ("failed", "benchmark")
    assert "the fake stage was told to fail" in row.why
    assert "told to fail" in (place.logs / "a.log").read_text()
    run(place)
    assert state(place) == "done"
    assert standings(place, ["a"])[0].attempts == 2


def test_ctrl_c_and_sigterm_leave_no_lock(place: Place) -> None:
    fake.trouble(place.results, "a", "benchmark-1", "interrupt")
    with pytest.raises(KeyboardInterrupt):
        run(place)
    assert state(place) == "failed"
    assert not place.lock("a").exists()
    fake.trouble(place.results, "a", "quality-1", "hang")
    running = child(place)
    eventually(lambda: ("a", "quality", 1) in fake.ran(place.results))
    assert state(place) == "running"
    running.terminate()
    assert running.wait(20) != 0
    assert "SIGTERM" in standings(place, ["a"])[0].why
    assert not place.lock("a").exists()
    run(place)
    assert state(place) == "done"


def test_changed_inputs_redo_what_depends_on_them(place: Place) -> None:
    run(place)
    (place.folder("a") / "calibrate.json").write_text("{}")  # no longer what the stage wrote
    before = len(fake.ran(place.results))
    run(place)
    entry = Entry.read(place.state("a"))
    assert entry is not None
    assert entry.stages["calibrate"] == "done"
    # It came out the same, so what reads it is unchanged.
    assert entry.stages["quality"] == "kept"
    assert len(fake.ran(place.results)) == before
    run(place, replace(E, budget=0.25), overwrite=True)
    entry = Entry.read(place.state("a"))
    assert entry is not None
    assert entry.stages["calibrate"] == "kept"  # a budget is nothing to this one
    assert entry.stages["benchmark"] == "done"


def test_another_experiment_under_the_same_tag_is_refused(place: Place) -> None:
    run(place)
    before = place.config("a").read_bytes()
    with pytest.raises(OtherSettingsError, match=r"budget 0.5, now 0.25.*another tag"):
        run(place, replace(E, budget=0.25))
    assert place.config("a").read_bytes() == before
    assert state(place) == "done"


@pytest.mark.parametrize("name", ["speed.json", "quality.json"])
@pytest.mark.parametrize("damage", ["", "{", "[]", "null", '{"rows": []}', "\x00\xff"])
def test_a_damaged_result_is_told_and_made_again(place: Place, name: str, damage: str) -> None:
    run(place)
    good = (place.folder("a") / name).read_bytes()
    (place.folder("a") / name).write_text(damage)
    (row,) = standings(place, ["a"])
    assert row.state == "damaged"
    assert name in row.why
    run(place)
    assert (place.folder("a") / name).read_bytes() == good
    assert state(place) == "done"


@pytest.mark.parametrize("damage", ["", "{", '{"kind": "jali-state", "version": 1}', "\x00"])
def test_an_unreadable_state_is_not_the_end(place: Place, damage: str) -> None:
    run(place)
    place.state("a").write_text(damage)
    assert state(place) == "damaged"
    run(place)
    assert state(place) == "done"


def test_an_unreadable_config_is_not_guessed(place: Place) -> None:
    run(place)
    place.config("a").write_text("{")
    assert state(place) == "damaged"
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        run(place)
    run(place, overwrite=True)
    assert state(place) == "done"


def test_a_record_cannot_point_elsewhere(place: Place) -> None:
    run(place)
    path = place.record("a", "quality")
    record = json.loads(path.read_text())
    record["outputs"] = {"../../../etc/passwd": "0"}
    path.write_text(json.dumps(record))
    assert state(place) == "damaged"
    run(place)
    assert state(place) == "done"


def test_a_full_disk_loses_nothing(place: Place) -> None:
    fake.trouble(place.results, "a", "quality-1", "full")
    with pytest.raises(OSError, match="No space left"):
        run(place)
    (row,) = standings(place, ["a"])
    assert row.state == "failed"
    assert "no space left on the disk" in row.why
    run(place)
    assert fake.ran(place.results).count(("a", "calibrate", 0)) == 1


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    """Full from the beginning, or a little later: wherever the last page goes."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("this machine mounts no tmpfs")
    try:
        place = Place(disk / "results", tmp_path / "logs")
        run(place)
        good = {path: path.read_bytes() for path in (place.speed("a"), place.quality("a"))}
        outcomes = set()
        for pages in range(8):
            place.record("a", "quality").unlink(missing_ok=True)
            fill(disk / "filler", pages)
            outcomes.add(outcome(place))
            assert {path: path.read_bytes() for path in good} == good
            assert not list(place.folder("a").rglob(".*.json.*-*"))  # no half of a new file
            (disk / "filler").unlink()
            run(place)
            assert state(place) == "done"
        assert "ENOSPC" in outcomes
        assert outcomes <= {"ENOSPC", "done"}
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def outcome(place: Place) -> str:
    try:
        run(place)
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


def test_progress_and_time_left_are_told(place: Place) -> None:
    fake.trouble(place.results, "a", "quality-1", "hang")
    running = child(place, 0.3)
    try:
        eventually(lambda: ("a", "quality", 1) in fake.ran(place.results))
        (row,) = standings(place, ["a"])
        assert (row.state, row.stage) == ("running", "quality")
        assert (row.done, row.total) in ((0, 0), (1, 3))
        assert 0.5 <= row.share < 0.75
        assert row.seconds_left is not None
        assert 0 < row.seconds_left < 30
    finally:
        running.kill()
        running.wait()


def test_the_second_of_two_runs_is_refused_with_the_first_ones_name(place: Place) -> None:
    fake.trouble(place.results, "a", "calibrate-1", "hang")
    first = child(place)
    try:
        eventually(lambda: ("a", "calibrate", 1) in fake.ran(place.results))
        second = child(place)
        _, said = second.communicate(timeout=30)
        assert second.returncode
        owner = f"is held by {getpass.getuser()} on {os.uname().nodename} (process {first.pid})"
        assert owner.encode() in said
        assert state(place) == "running"
        assert len(fake.ran(place.results)) == 2
    finally:
        first.kill()
        first.wait()
    begin = time.monotonic()
    run(place)  # the dead one's lock is taken over at once
    assert time.monotonic() - begin < 10
    assert state(place) == "done"


def test_many_at_once_and_one_does_it(place: Place) -> None:
    runs = [child(place, 0.05) for _ in range(4)]
    codes = [one.wait(60) for one in runs]
    assert codes.count(0) >= 1
    counts = [fake.ran(place.results).count(unit) for unit in set(fake.ran(place.results))]
    assert set(counts) == {1}
    assert state(place) == "done"
