"""What is true, and how well the judge reads it: films of held-out scenes, read back.

python -m training.truth --output FILE                   # minutes on a CPU
python -m training.truth --output FILE --weights FOLDER  # also as that autoencoder returns them
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import film, scene
from training.adherence import scores, wrong
from training.autoencoder import decode_whole, encode_whole
from training.latents import CLIPS, LONG_CLIPS, WIDE_CLIPS
from training.state import load_state
from training.world import film as second_film
from training.world import scene as second_scene

SEED = 900_000  # that of `prompts`


@dataclass(frozen=True, slots=True)
class World:
    """Scenes, and how they are filmed."""

    scene: Any
    film: Any

    def film_one(self, scenes: Any, i: int, frames: int, height: int, width: int) -> Tensor:
        """One of the scenes: [F, H, W, 3] in 0…1."""
        clip = self.film.film(scenes[slice(i, i + 1)], frames, height, width)[0]
        return (clip.permute(1, 2, 3, 0) + 1) / 2

    def held_out(
        self, count: int, frames: int, height: int, width: int, device: str
    ) -> tuple[list[str], Iterator[Tensor]]:
        """Sentences and true clips of combinations that training never showed."""
        scenes = self.scene.sample_scenes(count, SEED, width / height, unseen=True)
        there = scenes.to(device)
        films = (self.film_one(there, i, frames, height, width) for i in range(count))
        return scenes.captions(), films


WORLDS = {"first": World(scene, film), "second": World(second_scene, second_film)}


def judge_of_truth(
    world: World, count: int, height: int, width: int, frames: int, device: str, vae: Any = None
) -> dict[str, Any]:
    """How often the judge is right about filmed scenes: what a perfect model would get.

    With an autoencoder, about what it returns of them: what a perfect transformer would get.
    """
    sentences, clips = world.held_out(count, frames, height, width, device)
    if vae is not None:
        clips = (returned(vae, clip) for clip in clips)
    found = scores(sentences, clips)
    return {name: value for name, value in found.items() if name not in ("prompts", "rows")}


@torch.no_grad()
def returned(vae: Any, clip: Tensor) -> Tensor:
    """A clip [F, H, W, 3] in 0…1, encoded and decoded."""
    there = (clip.permute(3, 0, 1, 2)[None] * 2 - 1).to(vae.dtype)
    latents = encode_whole(vae, there).chunk(2, 1)[0]
    back = decode_whole(vae, latents)[0].float()
    return ((back.permute(1, 2, 3, 0) + 1) / 2).clamp(0, 1)


def measured(count: int, device: str) -> Iterator[dict[str, Any]]:
    """The judge's own score and time, size by size."""
    for size in (CLIPS, WIDE_CLIPS, LONG_CLIPS):
        shape = {"frames": size.frames, "height": size.height, "width": size.width}
        sentences, films = WORLDS["second"].held_out(count, **shape, device=device)
        clips = [clip.mul(255).round().byte() for clip in films]
        start = time.monotonic()
        found = scores(sentences, clips)
        took = round(time.monotonic() - start, 1)
        missed = [row for row in found["rows"] if wrong(row)]
        yield shape | {"seconds": took, "tallies": found["tallies"], "missed": missed}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--weights", type=Path, help="of an autoencoder: a model or a state")
    parser.add_argument("--films", type=int, default=64)
    parser.add_argument("--few", type=int, default=16, help="of the smallest go through it")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    vae = load_state(asked.weights).autoencoder.to(asked.device).eval() if asked.weights else None
    on_gpu = asked.device.startswith("cuda")
    where = torch.cuda.get_device_name() if on_gpu else f"a CPU, {torch.get_num_threads()} threads"
    facts = {
        "machine": {"device": where, "torch": torch.__version__},
        "date": f"{datetime.now(UTC):%Y-%m-%d}",
        "films": asked.films,
        "sizes": list(measured(asked.films, asked.device)),
    }
    if vae is not None:
        small = {"frames": CLIPS.frames, "height": CLIPS.height, "width": CLIPS.width}
        back = judge_of_truth(WORLDS["second"], asked.few, **small, device=asked.device, vae=vae)
        facts["returned"] = small | {"films": asked.few, "tallies": back["tallies"]}
    asked.output.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
