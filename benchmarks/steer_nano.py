"""Control while running on nano's hardest prompts: does steering budgets by probe rows gain?

    python -m benchmarks.steer_nano --device cuda --dtype bf16 --seconds 500

Many prompts run on one curve; the errors of probe rows on the first half of them are what is usual.
Of the second half the hardest (least PSNR against dense) run again with steering, and once more
without it at the total that steering came to: what is gained is gained at equal work.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.nano_quality import Metrics, Studio, machine
from benchmarks.tune_nano import DTYPES, paired
from jali import load_pipeline, sparse_processor_mode
from jali.evaluation.arena.row import read_method_spec
from jali.files import check_place, write_json
from jali.integration.steering import Steering
from jali.methods import Schedule
from jali.planning.curve import Curve
from training.evidence import WORLDS

START = time.monotonic()


def say(*words: object) -> None:
    print(f"{time.monotonic() - START:5.0f} s", *words, flush=True)


class Prompts:
    """Clips of some prompts, one after the other, each with the noise of its number."""

    def __init__(self, pipe: Any, asked: argparse.Namespace, sentences: Sequence[str]) -> None:
        size = {"height": asked.height, "width": asked.width, "num_frames": asked.frames}
        self.studio = Studio(pipe, tuple(sentences), size, 4.0, 1, asked.device)
        self.steps = asked.steps

    def make(
        self, numbers: Sequence[int], method: Schedule | None, steering: Steering | None = None
    ) -> tuple[Tensor, list[float], list[tuple[float, ...]]]:
        """Frames, costs and errors by step, of each."""
        clips, costs, errors = [], [], []
        with contextlib.ExitStack() as stack:
            run = None
            if method is not None:
                mode = sparse_processor_mode(self.studio.pipe, method=method, steering=steering)
                run = stack.enter_context(mode)
            for number in numbers:
                clips.append(self.studio._some(number, self.steps))
                if run is not None:
                    costs.append(run.stats().cost)
                    errors.append(run.run.errors() if steering is not None else ())
        return self.studio.frames(torch.cat(clips)), costs, errors

    def psnr(self, numbers: Sequence[int], clips: Tensor, dense: Tensor) -> list[float]:
        some = tuple(self.studio.sentences[number] for number in numbers)
        found: list[float] = Metrics(some, None).compare(clips, dense)["clips"]["psnr"]
        return found


def measure(prompts: Prompts, method: str, total: float, hardest: int) -> dict[str, Any]:
    count = len(prompts.studio.sentences)
    first, second = range(count // 2), range(count // 2, count)
    plain = Schedule(read_method_spec(method).make(), curve=Curve(total))
    _, _, errors = prompts.make(first, plain, Steering())
    usual = tuple(fmean(several) for several in zip(*errors, strict=True))
    say("usual errors", *(f"{error:.3f}" for error in usual))
    dense, _, _ = prompts.make(second, None)
    before, costs, _ = prompts.make(second, plain)
    values = prompts.psnr(second, before, dense)
    places = sorted(range(len(second)), key=lambda place: values[place])[:hardest]
    hard = [second[place] for place in places]
    now, steered_costs, _ = prompts.make(hard, plain, Steering(usual))
    reached = fmean(steered_costs) - fmean(costs) + total
    as_much = replace(plain, curve=Curve(min(0.95, reached)))
    equal, equal_costs, _ = prompts.make(hard, as_much)
    own = dense[places]
    found = {"steered": prompts.psnr(hard, now, own), "as_much": prompts.psnr(hard, equal, own)}
    return {
        "method": method, "total": total, "usual": usual, "prompts": hard, "all": values,
        "plain": {"psnr": [values[place] for place in places], "cost": fmean(costs)},
        "steered": {"psnr": found["steered"], "costs": steered_costs},
        "as_much": {"psnr": found["as_much"], "cost": fmean(equal_costs)},
        "gain_at_equal_work": paired(found["steered"], found["as_much"]),
    }  # fmt: skip


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/steer-h200.json"))
    made.add_argument("--methods", nargs="+", default=["entropy", "rd"])
    made.add_argument("--totals", nargs="+", type=float, default=[0.4, 0.3])
    made.add_argument("--prompts", type=int, default=64)
    made.add_argument("--hardest", type=int, default=8)
    made.add_argument("--steps", type=int, default=12)
    made.add_argument("--height", type=int, default=192)
    made.add_argument("--width", type=int, default=320)
    made.add_argument("--frames", type=int, default=37)
    made.add_argument("--seconds", type=float, default=float("inf"), help="begin nothing later")
    made.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    made.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    check_place(asked.output)
    sentences = WORLDS["second"].scene.prompts(asked.prompts)
    pipe = load_pipeline("nano", device=asked.device, dtype=DTYPES[asked.dtype])
    pipe.set_progress_bar_config(disable=True)
    prompts = Prompts(pipe, asked, sentences)
    result: dict[str, Any] = {
        "machine": machine(asked.device), "date": time.strftime("%Y-%m-%d"), "dtype": asked.dtype,
        "size": prompts.studio.size, "steps": asked.steps, "count": asked.prompts, "rows": [],
    }  # fmt: skip
    slowest = 0.0
    for total in asked.totals:
        for method in asked.methods:
            begun = time.monotonic()
            if begun - START + slowest > asked.seconds:
                say("the seconds are over, or would be")
                return 0
            row = measure(prompts, method, total, asked.hardest)
            result["rows"].append(row)
            write_json(asked.output, result, sort_keys=False)
            say(
                f"{method} {total:g}: plain {fmean(row['plain']['psnr']):.2f} dB, steered "
                f"{fmean(row['steered']['psnr']):.2f} at {fmean(row['steered']['costs']):.3f}, as "
                f"much work without {fmean(row['as_much']['psnr']):.2f}; gain",
                row["gain_at_equal_work"],
            )
            slowest = max(slowest, time.monotonic() - begun)
    return 0


if __name__ == "__main__":
    sys.exit(main())
