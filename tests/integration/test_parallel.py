"""Ulysses and tensor parallelism: several ranks give what one gives."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from jali.integration.families import FAMILIES
from jali.integration.parallel import Ranks, across_ranks, joint_order
from jali.methods import Entropy, RfV2, Schedule
from jali.tokens.grid import TokenGrid

HERE = Path(__file__).parent


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_ranks_agree_with_one(ranks: int, tmp_path: Path) -> None:
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, HERE / "ranks.py", str(rank), str(ranks), tmp_path / "store"],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env,
        )
        for rank in range(ranks)
    ]  # fmt: skip
    try:
        said = [worker.communicate(timeout=300)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0] * ranks, "\n".join(said)


def test_the_order_of_a_joint_sequence() -> None:
    grid = TokenGrid.video(1, 2, 4, text=4)
    order = joint_order(FAMILIES["FluxTransformer2DModel"], grid, 2, torch.device("cpu"))
    assert order is not None
    # Two ranks with two text and four image tokens each.
    held = torch.tensor([0, 1, 10, 11, 12, 13, 2, 3, 14, 15, 16, 17])
    assert held[order].tolist() == [0, 1, 2, 3, *range(10, 18)]
    wan = FAMILIES["WanTransformer3DModel"]
    assert joint_order(wan, TokenGrid.video(1, 2, 4), 2, torch.device("cpu")) is None
    with pytest.raises(ValueError, match="do not divide among 3 ranks"):
        joint_order(FAMILIES["FluxTransformer2DModel"], grid, 3, torch.device("cpu"))


def test_only_methods_that_share_among_heads_change() -> None:
    ranks = Ranks(4, 3, None)
    assert across_ranks(RfV2(), ranks) == RfV2()
    method = across_ranks(Schedule(Entropy(), dense_steps=2), ranks)
    assert isinstance(method, Schedule)
    assert method.dense_steps == 2
    assert method.inner.ranks is ranks  # type: ignore[attr-defined]
