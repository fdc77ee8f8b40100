"""What one process of several does in the test of several: run as `python rank.py …`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from jali.generation import Settings, produce


def main(ranks: int, checkpoint: str, folder: str) -> None:
    # diffusers asks for an accelerator; on a CPU it gets the CPU.
    torch._C._get_accelerator = lambda *_: torch.device("cpu")  # type: ignore[assignment]
    torch.accelerator.device_count = lambda: ranks  # type: ignore[assignment]
    torch.set_num_threads(1)
    settings = Settings(
        "wan-t2v-1.3b", path=checkpoint, method="entropy", budget=0.4, height=64, width=64,
        options={"q_block": 16, "k_block": 16}, num_frames=9, steps=3, device="cpu",
        arguments={"max_sequence_length": 16}, context_parallel=ranks,
    )  # fmt: skip
    made = produce("wan-t2v-1.3b", ["a red ball"], settings, Path(folder))
    assert len(made.clips) == 1


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:])
