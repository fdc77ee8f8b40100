"""Does nano make what it is asked for? Held-out prompts, generated, read back by the judge.

python -m training.evidence --output evidence.json --sheet sheet.png

Prompts are those of the first world, which the shipped weights know, or with `--world second` of
the second.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.nano import folder
from jali.nano.grammar import understand
from training import film, scene
from training.judge import count_things, judge
from training.world import film as second_film
from training.world import scene as second_scene
from training.world.sentence import asked_objects


@dataclass(frozen=True, slots=True)
class World:
    """Scenes, and how they are filmed."""

    scene: Any
    film: Any

    def film_one(self, scenes: Any, i: int, frames: int, height: int, width: int) -> Tensor:
        """One of the scenes: [F, H, W, 3] in 0…1."""
        clip = self.film.film(scenes[slice(i, i + 1)], frames, height, width)[0]
        return (clip.permute(1, 2, 3, 0) + 1) / 2


WORLDS = {"first": World(scene, film), "second": World(second_scene, second_film)}
ASPECTS = ("colour", "shape", "motion")
# Whether nothing is there that was not asked for, and whether all of it is.
COUNTS = ("no_more", "no_less")


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


def scores(sentences: Sequence[str], clips: Sequence[Tensor]) -> dict[str, Any]:
    """The share of clips that show what was asked for, and every verdict."""
    rows = []
    for sentence, clip in zip(sentences, clips, strict=True):
        wish, seen = understand(sentence), judge(clip)
        rows.append(
            {"prompt": sentence}
            | {f"asked_{a}": getattr(wish, a) for a in ASPECTS}
            | {f"seen_{a}": getattr(seen, a) for a in ASPECTS}
            | {"asked_things": asked_objects(sentence), "seen_things": count_things(clip)}
        )
    right = {
        a: sum(row[f"asked_{a}"] == row[f"seen_{a}"] for row in rows) / len(rows) for a in ASPECTS
    }
    right["no_more"] = sum(r["seen_things"] <= r["asked_things"] for r in rows) / len(rows)
    right["no_less"] = sum(r["seen_things"] >= r["asked_things"] for r in rows) / len(rows)
    return {"prompts": len(rows), **right, "rows": rows}


def judge_of_truth(
    world: World, count: int, height: int, width: int, frames: int, device: str
) -> dict[str, float]:
    """How often the judge is right about filmed scenes: what a perfect model would get."""
    scenes = world.scene.sample_scenes(count, 900_000, width / height, unseen=True)
    there = scenes.to(device)
    clips = [world.film_one(there, i, frames, height, width) for i in range(count)]
    found = scores(scenes.captions(), clips)
    return {a: found[a] for a in (*ASPECTS, *COUNTS)}


def sheet(sentences: Sequence[str], clips: Sequence[Tensor], path: Path, shown: int = 6) -> None:
    """A contact sheet: one row per clip, time from left to right, the prompt above."""
    from matplotlib.figure import Figure

    picture = Figure(figsize=(12, 1.55 * len(clips)), layout="constrained")
    axes = picture.subplots(len(clips), 1, squeeze=False)[:, 0]
    for axis, sentence, clip in zip(axes, sentences, clips, strict=True):
        picked = clip[_spread(len(clip), shown)]
        strip = torch.cat(list(torch.nn.functional.pad(picked, (0, 0, 2, 2), value=1.0)), 1)
        axis.imshow(strip.cpu().clamp(0, 1).numpy())
        axis.set_title(sentence, fontsize=7, loc="left", pad=2)
        axis.axis("off")
    picture.savefig(path, dpi=90)


def _spread(length: int, count: int) -> Tensor:
    return torch.linspace(0, length - 1, min(count, length)).round().long()


def main() -> None:
    from diffusers import WanPipeline

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--weights", type=Path, default=folder())
    parser.add_argument("--world", choices=WORLDS, default="first", help="of the prompts")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--clips", type=Path, help="keep some frames of the first twelve clips")
    parser.add_argument("--shift", type=float, help="of the noise levels, instead of the model's")
    parser.add_argument("--sheet", type=Path)
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
    asked.output.write_text(json.dumps(found, indent=1) + "\n")
    print({a: found[a] for a in (*ASPECTS, *COUNTS)}, found["judge_of_truth"])  # noqa: T201
    if asked.sheet:
        sheet(sentences[:12], clips[:12], asked.sheet)
    if asked.clips:
        picked = [clip[_spread(len(clip), 6)].mul(255).byte().cpu() for clip in clips[:12]]
        torch.save({"prompts": sentences[:12], "clips": torch.stack(picked)}, asked.clips)


if __name__ == "__main__":
    main()
