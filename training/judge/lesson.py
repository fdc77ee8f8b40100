"""The lesson that the probes learn from: pictures of scenes that training may use, at any moment.

    python -m training.judge.lesson

makes `probe.safetensors` again, in seconds and always the same.
"""

from __future__ import annotations

import torch
from torch import Tensor

from training.judge import ground, texture
from training.judge.background import background
from training.judge.colour import despeckled, labels
from training.judge.light import NO_LIGHT
from training.judge.probe import FILE, TABLES, fit, save
from training.world.film import film, unit
from training.world.scene import Scenes, sample_scenes

PICTURES, SEED = 1600, 3_000_000
FRAMES = 33  # of the films that the pictures are of
ASPECT = 1.25


def picture(scene: Scenes, moment: Tensor) -> Tensor:
    """A frame of one scene: [1, H, W, 3] in 0…1, in 256 steps."""
    size = ground.HIGH, round(ground.HIGH * ASPECT)
    clip = film(scene, 1, *size, start=moment, pace=unit(FRAMES))[0].permute(1, 2, 3, 0)
    return ((clip + 1) * 127.5).round() / 255


def lessons(count: int = PICTURES) -> dict[str, tuple[Tensor, Tensor]]:
    """Features [n, k] and answers [n] of both probes."""
    scenes = sample_scenes(count, SEED, ASPECT)
    scenes.light[:] = 0  # told from a whole film, and then taken away, not so from a picture
    moments = torch.randint(FRAMES, (count,), generator=torch.Generator().manual_seed(SEED))
    surfaces, grounds, kept = [], [], []
    for i in range(count):
        rgb = picture(scenes[slice(i, i + 1)], moments[i : i + 1])
        grounds.append(ground.features(background(rgb, ground.HIGH), NO_LIGHT))
        colour = int(scenes.colour[i])
        found, weight = texture.features(rgb, despeckled(labels(rgb) == colour), colour)
        if float(weight.sum()) > 0:
            surfaces.append(found)
            kept.append(i)
    return {
        "texture": (torch.cat(surfaces), scenes.texture[kept]),
        "ground": (torch.cat(grounds), scenes.ground),
    }


def main() -> None:
    learned = lessons()
    save({name: fit(*learned[name], len(table)) for name, table in TABLES.items()}, FILE)


if __name__ == "__main__":
    main()
