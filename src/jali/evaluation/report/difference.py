"""How far a clip is from its reference, as a film of its own, made from the files that lost least.

The films on the page are lossy, and a codec's losses look like differences: they are measured here
instead. The film is grey, the mean over the channels of |a - b|, and holds its square root: so a
codec's rounding is small where the difference is small, which is what people magnify.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from jali.clips.clip import encode_mp4
from jali.clips.source import open_source
from jali.evaluation.quality.pairs import FoundClip, check_sizes, lengths_differ
from jali.evaluation.report.film import Film

_BATCH = 4  # frames at once, as floats


@dataclass(frozen=True, slots=True)
class Difference:
    """Frames of 255·√(|a − b| / 255), the mean of |a − b| in each, and whether a file was lossy."""

    film: Film
    means: tuple[float, ...]
    lossy: bool


def read_difference(reference: FoundClip, clip: FoundClip, fps: float) -> Difference:
    """Of two clips of one size and length."""
    check_sizes([(reference, clip)])
    one, other = open_source(reference.path), open_source(clip.path)
    means: list[float] = []

    def frames() -> Iterator[Tensor]:
        counts = [0, 0]
        for batches in itertools.zip_longest(one.batches(_BATCH), other.batches(_BATCH)):
            for side, batch in enumerate(batches):
                counts[side] += 0 if batch is None else len(batch.frames)
            if counts[0] != counts[1]:
                raise lengths_differ(reference, counts[0], clip, counts[1])
            a, b = (batch.frames.float() for batch in batches)
            apart = (a - b).abs().mean(-1, keepdim=True)
            means.extend(round(mean, 3) for mean in apart.mean((1, 2, 3)).tolist())
            yield (apart * 255).sqrt().round().to(torch.uint8).expand(-1, -1, -1, 3)

    data = encode_mp4(frames(), fps)
    film = Film(data, "video/mp4", len(means), one.height, one.width, fps)
    return Difference(film, tuple(means), one.lossy or other.lossy)
