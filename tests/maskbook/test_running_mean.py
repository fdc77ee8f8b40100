"""The running mean on disk: killed anywhere, it goes on as if nothing had happened."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jali.maskbook.calibration.running_mean import RunningMean

SHAPE = (3, 2, 1, 2, 4, 5)
PROMPTS = 3


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
TOUCHES = ("fsync", "replace", "unlink", "posix_fallocate", "open", "listdir")


def kill_after(touch: int) -> Callable[[], None]:
    """Make the n-th touch of the disk the last thing this process does."""
    count = 0

    def counted(real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            out = real(*args, **kwargs)
            count += 1
            if count == touch:
                os.kill(os.getpid(), signal.SIGKILL)
            return out

        return call

    def arm() -> None:
        for name in TOUCHES:
            setattr(os, name, counted(getattr(os, name)))
        RunningMean.put = counted(RunningMean.put)  # type: ignore[method-assign]

    return arm


def test_killed_at_every_touch_of_the_disk(tmp_path: Path) -> None:
    want = values(work(tmp_path / "whole"))
    touch, ended = 0, signal.SIGKILL
    lost = []
    while ended:
        touch += 1
        folder = tmp_path / f"m{touch}"

        def run(folder: Path = folder, touch: int = touch) -> None:
            kill_after(touch)()
            work(folder)

        ended = in_a_child(run)
        before = RunningMean.load(folder)
        lost.append(0 if before is None else before.done)
        assert np.array_equal(values(work(folder)), want), f"killed at touch {touch}"
        assert sorted(os.listdir(folder)) == ["mean-3.f32", "state.json"] or ended
    assert touch > 30  # the test reached the end, so it killed at every one of them
    assert lost == sorted(lost)  # later kills never lose more
    assert lost[-1] == PROMPTS


def test_killed_while_it_is_removed(tmp_path: Path) -> None:
    touch, ended = 0, signal.SIGKILL
    while ended:
        touch += 1
        folder = tmp_path / f"r{touch}"
        work(folder)

        def run(folder: Path = folder, touch: int = touch) -> None:
            mean = RunningMean.load(folder)
            kill_after(touch)()
            assert mean is not None
            mean.remove()

        ended = in_a_child(run)
        if folder.exists():
            left = RunningMean.load(folder)
            assert left is None or left.done == PROMPTS
    assert touch > 2
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
