"""How long whole clips of nano take on this machine's CPU, and how near they are to the dense ones.

    python -m benchmarks.clip_times --output benchmarks/results/clip-times-large.json \\
      --prompts 3 "entropy esa .54 12" "rd exponential .4,.35 12"

Rows are written as for `nano_quality.py`, all with as many steps. Of every prompt the dense clip is
made first and the rows follow, so that times are compared that were taken minutes apart. Seconds
are of all there is between noise and latents. The file is written after every clip, and made anew.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.nano_quality import WORLD, Studio, machine, say, weights_digest
from benchmarks.row_spec import RowSpec, make, read_rows
from jali import load_pipeline
from jali.error import InputError
from jali.evaluation.arena.score import Scorer
from jali.files import check_place, write_json
from jali.generation.machine import cpu_name
from jali.nano import folder
from training.evidence import WORLDS

SIZE = {"height": 192, "width": 320, "frames": 37}
GUIDANCE = 4.0


def of_prompt(studio: Studio, steps: int, rows: Sequence[RowSpec]) -> dict[str, Any]:
    """The dense clip of the studio's one prompt, and one of every row."""
    made = studio.make(steps)
    dense, found = studio.frames(made.latents), {"dense": {"seconds": made.seconds}}
    say(studio.sentences[0], f"\n  dense {made.seconds:.1f} s")
    for row in rows:
        made = studio.make(steps, row.spread(make(row), row.total, studio.layers))
        found[str(row)] = {
            "seconds": made.seconds, "achieved": made.cost, "planning": made.planning,
            **nearness(studio.frames(made.latents), dense),
        }  # fmt: skip
        say(f"  {row}: {found[str(row)]}")
    return found


def nearness(clip: Tensor, dense: Tensor) -> dict[str, float]:
    return {name: values[0] for name, values in Scorer().compare(clip, dense).items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rows", nargs="+", help="METHOD SCHEDULE TOTAL STEPS, see row_spec.py")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=3)
    for name, usual in SIZE.items():
        parser.add_argument(f"--{name}", type=int, default=usual)
    asked = parser.parse_args(arguments)
    try:
        rows = read_rows(asked.rows)
        if len({row.steps for row in rows}) != 1:
            raise InputError("rows of several numbers of steps do not compare: give them one")
        check_place(asked.output)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    sentences = tuple(WORLDS[WORLD].scene.prompts(asked.prompts))
    pipe = load_pipeline("nano", device="cpu", dtype=torch.float32)
    pipe.set_progress_bar_config(disable=True)
    size = {"height": asked.height, "width": asked.width, "num_frames": asked.frames}
    studio, steps = Studio(pipe, sentences[:1], size, GUIDANCE, 1, "cpu"), rows[0].steps
    result: dict[str, Any] = {
        "machine": {**machine("cpu"), "cpu": cpu_name(), "threads": torch.get_num_threads()},
        "date": time.strftime("%Y-%m-%d"), "dtype": "float32", "weights": weights_digest(folder()),
        "size": size, "tokens": studio.tokens, "steps": steps, "guidance": GUIDANCE, "clips": {},
    }  # fmt: skip
    for row in rows:  # what happens at first use is nobody's speed
        studio.make(1, make(row).with_budget(row.total))
    for sentence in sentences:
        found = of_prompt(replace(studio, sentences=(sentence,)), steps, rows)
        result["clips"][sentence] = found
        write_json(asked.output, result, sort_keys=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())
