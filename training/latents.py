"""Clips as the transformer sees them: filmed and encoded once, kept in files."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from training import config
from training.autoencoder import encode_whole
from training.state import weights_of
from training.trainer import say
from training.world.film import film
from training.world.scene import sample_scenes

LONGEST = 176  # bytes: the longest caption has 160, then its end, and zeros

FEWEST = 64  # clips of a set, at however small a pace


@dataclass(frozen=True, slots=True)
class Set:
    """Clips of one size that are encoded once."""

    frames: int
    height: int
    width: int
    count: int

    @property
    def name(self) -> str:
        return f"{self.height}x{self.width}x{self.frames}"

    @property
    def aspect(self) -> float:
        return self.width / self.height


PICTURES, WIDE_PICTURES = Set(1, 128, 128, 12_000), Set(1, 192, 320, 4_000)
CLIPS, WIDE_CLIPS, LONG_CLIPS = (
    Set(33, 128, 128, 4_000), Set(37, 192, 320, 1_600), Set(81, 128, 192, 700)
)  # fmt: skip
SETS = (PICTURES, WIDE_PICTURES, CLIPS, WIDE_CLIPS, LONG_CLIPS)


@dataclass
class Latents:
    """Encoded clips of one size, and their captions as bytes."""

    latents: Tensor  # bf16 [n, z, f, h, w]
    tokens: Tensor  # int16 [n, longest], 0 where there is none


@torch.no_grad()
def encode_set(vae: Any, which: Set, seed: int) -> Latents:
    device = next(vae.parameters()).device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    half = config.autoencoder().to(device, dtype)
    half.load_state_dict(vae.state_dict())
    pixels = which.frames * which.height * which.width
    batch = min(which.count, max(1, 48 * 33 * 128 * 128 // pixels))
    found: list[Tensor] = []
    captions: list[str] = []
    while len(captions) < which.count:
        scenes = sample_scenes(batch, seed + len(found), which.aspect)
        # A picture is any moment of its scene, not always the first.
        start = torch.randint(0, 33, (batch,)).to(device) if which.frames == 1 else None
        clips = film(scenes.to(device), which.frames, which.height, which.width, start=start)
        encoded = [encode_whole(half, some.to(dtype)) for some in clips.split(-(-batch // 3))]
        found.append(torch.cat(encoded).chunk(2, 1)[0].bfloat16())
        captions += scenes.captions(seed + len(found))
    ids = config.tokenizer()(captions, padding="max_length", max_length=LONGEST).input_ids
    return Latents(torch.cat(found), torch.tensor(ids, dtype=torch.int16, device=device))


def load_latents(
    folder: Path, vae: Any, wanted: set[Set], pace: float, seed: int, device: torch.device
) -> dict[Set, Latents]:
    """Latents of some sets, made where this autoencoder has not left them in the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256()
    for weight in weights_of(vae).values():
        digest.update(weight.numpy().tobytes())
    sets = {}
    for i, which in enumerate(SETS):
        if which not in wanted:
            continue
        file = folder / f"{which.name}-{digest.hexdigest()[:12]}-{seed}.pt"
        if not file.exists():
            fewer = replace(which, count=max(FEWEST, int(which.count * min(1.0, pace))))
            latents = encode_set(vae, fewer, seed + 2 * 10**6 + i * 10**5)
            part = file.with_suffix(".part")
            torch.save({"latents": latents.latents, "tokens": latents.tokens}, part)
            part.rename(file)
        saved = torch.load(file, weights_only=True, map_location=device)
        say(f"latents {which.name}: {len(saved['latents'])}")
        sets[which] = Latents(**saved)
    return sets


def statistics(sets: list[Latents]) -> tuple[list[float], list[float]]:
    """Mean and deviation per channel, every size with the same weight."""
    means, squares = [], []
    for latents in sets:
        some = latents.latents[:1000].float()
        means.append(some.mean((0, 2, 3, 4)))
        squares.append((some**2).mean((0, 2, 3, 4)))
    mean = torch.stack(means).mean(0)
    std = (torch.stack(squares).mean(0) - mean**2).sqrt()
    return [round(x, 5) for x in mean.tolist()], [round(x, 5) for x in std.tolist()]


def channels(values: list[float], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(1, -1, 1, 1, 1)
