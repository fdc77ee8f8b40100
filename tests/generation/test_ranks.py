"""Several processes for one clip: the same clip, written once."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("av")

import forked
from jali.clips.clip import read_clip
from jali.generation import Settings, produce, read_run
from jali.generation.ranks import check_ranks


def make_clip(environment: dict[str, str], checkpoint: str, folder: Path) -> None:
    """What one process of several does."""
    os.environ |= environment
    # diffusers asks for an accelerator; on a CPU it gets the CPU.
    torch._C._get_accelerator = lambda *_: torch.device("cpu")  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: 2  # type: ignore[assignment]
    settings = Settings(
        "wan-t2v-1.3b", path=checkpoint, method="entropy", budget=0.4, height=64, width=64,
        options={"q_block": 16, "k_block": 16}, num_frames=9, steps=3, device="cpu",
        arguments={"max_sequence_length": 16}, context_parallel=2,
    )  # fmt: skip
    made = produce("wan-t2v-1.3b", ["a red ball"], settings, folder)
    assert len(made.clips) == 1


def test_two_ranks_make_the_clip_of_one(
    checkpoint: Path, pipe: Any, settings: Callable[..., Settings], tmp_path: Path
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    running = [
        forked.start(make_clip, shared | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                     str(checkpoint), tmp_path / "two")
        for rank in range(2)
    ]  # fmt: skip
    for process in running:
        process.join(120)
        assert process.exitcode == 0
    two = read_run(tmp_path / "two")
    assert two.settings.context_parallel == 2
    one = produce(pipe, ["a red ball"], settings(), tmp_path / "one")
    frames = [read_clip(run.path(run.clips[0].lossless)).frames for run in (one, two)]
    apart = (frames[0].int() - frames[1].int()).abs()
    assert int(apart.max()) <= 1  # sums in another order may round the other way
    assert one.clips[0].sparse_calls == two.clips[0].sparse_calls > 0


def test_a_wrong_number_of_processes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"torchrun --nproc-per-node 4 -m jali generate"):
        check_ranks(Settings("nano", context_parallel=4))
    with pytest.raises(ValueError, match=r"tensor_parallel 2 needs 2 processes"):
        check_ranks(Settings("nano", tensor_parallel=2))
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(ValueError, match=r"8 processes, but the run is for 1: give --context-par"):
        check_ranks(Settings("nano"))
    check_ranks(Settings("nano", context_parallel=8))
