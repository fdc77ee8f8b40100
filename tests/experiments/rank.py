"""One process of an experiment."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping

os.environ["HF_HUB_OFFLINE"] = "1"

import torch

from jali.experiments import Experiment, Results, run_experiment
from jali.experiments.stages import all_stages

SMALL = {
    "model": "wan-t2v-1.3b", "height": 128, "width": 320, "num_frames": 5, "steps": 3,
    "bench_steps": 2, "bench_repeats": 1, "calibration_prompts": 1, "num_prompts": 2,
    "metrics": ("psnr", "ssim"), "device": "cpu", "threads": 1, "budget": 0.4,
}  # fmt: skip


def experiment(checkpoint: str, **changes: object) -> Experiment:
    return Experiment(**{"tag": "a", "path": checkpoint, **SMALL, **changes}).completed()  # type: ignore[arg-type]


def main(
    checkpoint: str,
    results: Results,
    kill: str,
    env: Mapping[str, str],
    changes: Mapping[str, object],
) -> None:
    """`kill` names a stage and how far it is when this process is killed."""
    os.environ.update(env)
    ranks = int(env.get("WORLD_SIZE", "1"))
    if ranks > 1:
        # diffusers asks for an accelerator; on a CPU it gets the CPU.
        torch._C._get_accelerator = lambda *_: torch.device("cpu")  # type: ignore[assignment]
        torch.accelerator.device_count = lambda: ranks  # type: ignore[assignment]

    def told(stage: str, done: int, total: int, what: str) -> None:  # noqa: ARG001
        if f"{stage} {done}" == kill:
            os.kill(os.getpid(), signal.SIGKILL)

    run_experiment(experiment(checkpoint, **changes), results, all_stages(), on_progress=told)
