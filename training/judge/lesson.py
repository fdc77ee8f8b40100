"""The lesson that the probes learn from: pictures of scenes that training may use, at any moment.

    python -m training.judge.lesson

makes `probe.safetensors` again, in about a minute and always the same. A model draws less exactly
than a program, so every picture is shown twice: as it is, and drawn by a shaking hand.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

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
BENT = 0.7  # pixels
STAINED = 0.01  # of white


def picture(scene: Scenes, moment: Tensor) -> Tensor:
    """A frame of one scene: [1, H, W, 3] in 0…1, in 256 steps."""
    size = ground.HIGH, round(ground.HIGH * ASPECT)
    clip = film(scene, 1, *size, start=moment, pace=unit(FRAMES))[0].permute(1, 2, 3, 0)
    return ((clip + 1) * 127.5).round() / 255


def shaken(rgb: Tensor, dice: torch.Generator) -> Tensor:
    """A picture [1, H, W, 3] a little bent, blurred, and stained."""
    high, wide = rgb.shape[1:3]

    def rough(channels: int, size: int) -> Tensor:
        """Smooth noise whose waves are about so many pixels long: [1, channels, H, W]."""
        few = torch.randn(1, channels, high // size + 2, wide // size + 2, generator=dice)
        return F.interpolate(few, (high, wide), mode="bicubic", align_corners=True)

    y, x = torch.meshgrid(torch.arange(high), torch.arange(wide), indexing="ij")
    bend = BENT * rough(2, 12)[0]
    grid = torch.stack((2 * (x + bend[0] + 0.5) / wide - 1, 2 * (y + bend[1] + 0.5) / high - 1), -1)
    picture = rgb.permute(0, 3, 1, 2)
    picture = F.grid_sample(picture, grid[None], padding_mode="border", align_corners=False)
    picture = F.avg_pool2d(picture, 3, 1, 1, count_include_pad=False)
    picture = picture + STAINED * (rough(3, 3) + rough(3, 12))
    return picture.clamp(0, 1).permute(0, 2, 3, 1)


def lessons(count: int = PICTURES) -> dict[str, tuple[Tensor, Tensor]]:
    """Features [n, k] and answers [n] of both probes."""
    scenes = sample_scenes(count, SEED, ASPECT)
    scenes.light[:] = 0  # told from a whole film, and then taken away, not so from a picture
    dice = torch.Generator().manual_seed(SEED)
    moments = torch.randint(FRAMES, (count,), generator=dice)
    surfaces, grounds, kept = [], [], []
    for i in range(count):
        exact = picture(scenes[slice(i, i + 1)], moments[i : i + 1])
        for rgb in (exact, shaken(exact, dice)):
            grounds.append(ground.features(background(rgb, ground.HIGH), NO_LIGHT))
            colour = int(scenes.colour[i])
            found, weight = texture.features(rgb, despeckled(labels(rgb) == colour), colour)
            if float(weight.sum()) > 0:
                surfaces.append(found)
                kept.append(i)
    return {
        "texture": (torch.cat(surfaces), scenes.texture[kept]),
        "ground": (torch.cat(grounds), scenes.ground.repeat_interleave(2)),
    }


def main() -> None:
    learned = lessons()
    save({name: fit(*learned[name], len(table)) for name, table in TABLES.items()}, FILE)


if __name__ == "__main__":
    main()
