"""The running mean on disk: killed anywhere, it goes on as if nothing had happened."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jali.maskbook.calibration.running_mean import RunningMean

pytestmark = pytest.mark.usefixtures("no_waiting_for_the_disk")

SHAPE = (3, 2, 1, 2, 4, 5)
PROMPTS = 3


@pytest.fixture
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is killed leaves behind what it wrote, on the disk or not yet: only a power
    cut needs the waiting. The calls are still there, to be killed after."""
    monkeypatch.setattr(os, "fsync", lambda _: None)
    monkeypatch.setattr(np.memmap, "flush", lambda _: None)


def sample(prompt: int, step: int, layer: int) -> Any:
    g = np.random.default_rng((prompt, step, layer))
    return g.random(SHAPE[2:], dtype=np.float32)


def work(folder: Path) -> RunningMean:
    """Everything a calibration does to the folder, from wherever it stands."""
    mean = RunningMean.load(folder) or RunningMean(folder, 0, {"shape": SHAPE})
    folder.mkdir(exist_ok=True)
    while mean.done < PROMPTS:
        mean.begin()
        for step in range(SHAPE[0]):
            for layer in range(SHAPE[1]):
                mean.put(step, layer, sample(mean.done, step, layer))
        mean.commit({"last": mean.done})
    return mean


def values(mean: RunningMean) -> Any:
    return np.stack([[mean.slab(s, la) for la in range(SHAPE[1])] for s in range(SHAPE[0])])


def test_it_is_the_mean(tmp_path: Path) -> None:
    got = values(work(tmp_path / "m"))
    want = np.mean(
        [[[sample(p, s, la) for la in range(2)] for s in range(3)] for p in range(PROMPTS)], axis=0
    )
    assert np.allclose(got, want, atol=1e-6)
    assert sorted(os.listdir(tmp_path / "m")) == ["mean-3.f32", "state.json"]


def in_a_child(run: Callable[[], None]) -> int:
    """The signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:
            os._exit(77)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    assert not os.WIFEXITED(status) or os.WEXITSTATUS(status) == 0
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


# Everything that touches the disk, and the moment after it.
TOUCHES = ("fsync", "replace", "unlink", "posix_fallocate", "open", "listdir", "scandir", "rmdir")


@contextmanager
def after_every_touch(act: Callable[[int], None]) -> Iterator[None]:
    """Do something after the n-th touch of the disk."""
    count, busy = 0, False

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count, busy
            out = real(*args, **kwargs)
            if not busy:  # what it does touches the disk too
                count, busy = count + 1, True
                act(count)
                busy = False
            return out

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in TOUCHES:
            patch.setattr(os, name, counted(getattr(os, name)))
        patch.setattr(RunningMean, "put", counted(RunningMean.put))
        yield


def left_by_a_kill(folder: Path, run: Callable[[], Any]) -> list[Path]:
    """The folder as a kill after each touch of the disk would leave it."""
    copies: list[Path] = []

    def copy(touch: int) -> None:
        copies.append(folder.with_name(f"{folder.name}-{touch}"))
        if folder.exists():
            shutil.copytree(folder, copies[-1])

    with after_every_touch(copy):
        run()
    return copies


def test_killed_at_every_touch_of_the_disk(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folders = left_by_a_kill(folder, lambda: work(folder))
    want = values(work(folder))
    done = []
    for touch, left in enumerate(folders, 1):
        before = RunningMean.load(left)
        done.append(0 if before is None else before.done)
        assert np.array_equal(values(work(left)), want), f"killed at touch {touch}"
        assert done[-1] == PROMPTS or not list(left.glob("mean-[12].f32"))
    assert len(done) > 30
    assert done == sorted(done)  # later kills never lose more
    assert done[-1] == PROMPTS


@pytest.mark.parametrize("touch", [4, 13, 22, 30])
def test_really_killed(tmp_path: Path, touch: int) -> None:
    """A kill leaves what the copies of the test above say."""
    folder = tmp_path / "m"
    want = left_by_a_kill(tmp_path / "whole", lambda: work(tmp_path / "whole"))[touch - 1]

    def die(now: int) -> None:
        if now == touch:
            os.kill(os.getpid(), signal.SIGKILL)

    def run() -> None:
        with after_every_touch(die):
            work(folder)

    assert in_a_child(run) == signal.SIGKILL
    assert contents(folder) == contents(want)


def contents(folder: Path) -> dict[str, bytes]:
    """Files by name; that of a file which is not whole yet is drawn by lot."""
    return {path.name.split(".json")[0]: path.read_bytes() for path in folder.iterdir()}


def test_killed_while_it_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "r"
    mean = work(folder)
    folders = left_by_a_kill(folder, mean.remove)
    assert len(folders) > 2
    for left in folders:
        found = RunningMean.load(left)
        assert found is None or found.done == PROMPTS
    assert not folder.exists()


def test_a_full_disk_before_a_prompt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mean = work(tmp_path / "m")
    before = values(mean)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        mean.begin()
    again = RunningMean.load(tmp_path / "m")
    assert again is not None
    assert np.array_equal(values(again), before)


def test_a_damaged_folder_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    work(folder)
    with (folder / "mean-3.f32").open("r+b") as file:
        file.truncate(8)
    with pytest.raises(ValueError, match=r"8 bytes instead of .*delete"):
        RunningMean.load(folder)
    (folder / "state.json").write_text("{")
    with pytest.raises(ValueError, match="delete"):
        RunningMean.load(folder)
