"""Does nano make what it is asked for? Held-out prompts, generated, read back by the judge.

    python -m training.evidence --output evidence.json --sheet sheet.png

Prompts are those of the second world, which the shipped weights know, or with `--world first` of
the first.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.nano import folder
from training.adherence import ASPECTS, COUNTS, scores
from training.sheet import ROWS, save_strips, sheet, strip
from training.truth import WORLDS, judge_of_truth

__all__ = ["ASPECTS", "COUNTS", "WORLDS", "generate", "judge_of_truth", "scores"]


def generate(
    pipe: Any,
    sentences: Sequence[str],
    height: int,
    width: int,
    frames: int,
    steps: int,
    guidance: float,
    batch: int,
    seed: int = 0,
) -> Iterator[Tensor]:
    """Clips [F, H, W, 3] in 0…1, one for every sentence; clip i has its own noise, seed + i."""
    for first in range(0, len(sentences), batch):
        some = list(sentences[first : first + batch])
        dice = [torch.Generator("cpu").manual_seed(seed + first + i) for i in range(len(some))]
        out = pipe(
            some, height=height, width=width, num_frames=frames, num_inference_steps=steps,
            guidance_scale=guidance, generator=dice, output_type="pt",
        )  # fmt: skip
        yield from out.frames.permute(0, 1, 3, 4, 2).float()


def main() -> None:
    from diffusers import WanPipeline

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=folder())
    parser.add_argument("--world", choices=WORLDS, default="second", help="of the prompts")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--shift", type=float, help="of the noise levels, instead of the model's")
    parser.add_argument("--sheet", type=Path, help="a picture of the first twelve clips")
    parser.add_argument("--strips", type=Path, help="a folder for strips of them, one a file")
    parser.add_argument(
        "--round-trip", action="store_true", help="judge true films after the autoencoder, too"
    )
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--height", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--frames", type=int, default=33)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    pipe = WanPipeline.from_pretrained(str(asked.weights), torch_dtype=dtype).to(asked.device)
    pipe.set_progress_bar_config(disable=True)
    if asked.shift:
        pipe.scheduler = pipe.scheduler.from_config(pipe.scheduler.config, shift=asked.shift)
    world = WORLDS[asked.world]
    sentences = world.scene.prompts(asked.prompts)
    size = {"height": asked.height, "width": asked.width, "frames": asked.frames}
    clips = list(
        generate(
            pipe, sentences, steps=asked.steps, guidance=asked.guidance, batch=asked.batch, **size
        )
    )
    found = scores(sentences, clips)
    found |= size | {"steps": asked.steps, "guidance": asked.guidance, "dtype": str(dtype)}
    found |= {"world": asked.world, "shift": pipe.scheduler.config.shift}
    found["judge_of_truth"] = judge_of_truth(world, asked.prompts, **size, device=asked.device)
    if asked.round_trip:
        found["judge_of_round_trip"] = judge_of_truth(
            world, asked.prompts, **size, device=asked.device, vae=pipe.vae
        )
    asked.output.write_text(json.dumps(found, indent=1) + "\n")
    for aspect, tally in found["tallies"].items():
        true = found["judge_of_truth"]["tallies"][aspect]
        print(  # noqa: T201
            f"{aspect:8} {tally['right']:3} of {tally['asked']:3}, of true films "
            f"{true['right']} of {true['asked']}"
        )
    if asked.sheet:
        sheet(found["rows"][:ROWS], [strip(clip) for clip in clips[:ROWS]]).save(asked.sheet)
    if asked.strips:
        save_strips(clips[:ROWS], asked.strips)


if __name__ == "__main__":
    main()
