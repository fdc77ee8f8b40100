"""Reading a clip back: what does it show, without having been told?

No network judges here. Colours are told by hue, motion by where the coloured pixels go, shapes by
laying known outlines over them; light and camera by what they do to the background; textures and
backgrounds by a linear probe on features of patterns. How often all this is right about true clips
is measured beside every result (`training/evidence.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from jali.nano.grammar import COLOURS
from training.judge import ground, motion, outline, probe, texture, thing
from training.judge import light as lighting
from training.judge import view as viewing
from training.judge.background import Background, background, resized
from training.judge.colour import despeckled, labels, shown, spread, unit
from training.judge.pattern import flat

__all__ = ["Clip", "Verdict", "count_things", "judge", "speed"]

ROWS = 64  # in which light and camera are told
# Frames in which textures and backgrounds are looked at.
MOMENTS, FEW_MOMENTS = 9, 5


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a clip shows; None where nothing coloured is seen."""

    colour: str | None
    shape: str | None
    motion: str | None


class Clip:
    """A clip [F, H, W, 3], uint8 or 0…1, and what is read from it: each thing once, when asked."""

    def __init__(self, frames: Tensor) -> None:
        self.rgb = unit(frames)

    @cached_property
    def labels(self) -> Tensor:
        return labels(self.rgb)

    def mask(self, colour: int) -> Tensor:
        """Where a colour is: [F, H, W]."""
        return despeckled(self.labels == colour)

    @cached_property
    def main(self) -> tuple[int, Tensor]:
        """The colour that there is most of, and where it is."""
        seen = self.labels[self.labels >= 0]
        most = int(torch.bincount(seen, minlength=len(COLOURS)).argmax())
        return most, self.mask(most)

    @cached_property
    def verdict(self) -> Verdict:
        most, mask = self.main
        seen = shown(mask)
        if int(seen.sum()) < 2:
            return Verdict(None, None, None)
        does = motion.motion(self.rgb, mask, seen)
        return Verdict(list(COLOURS)[most], outline.shape(mask[seen]), does)

    def speed(self, unit: float, colour: str | None = None) -> str | None:
        """Of a colour (or the main one) that moves: "", "slowly" or "quickly", with `unit` frames
        to a unit of time."""
        most, mask = self.main
        if colour is not None and list(COLOURS).index(colour) != most:
            mask = self.mask(list(COLOURS).index(colour))
        return motion.pace(mask, shown(mask), unit)

    @cached_property
    def things(self) -> int:
        """How many coloured things there are."""
        return thing.count(self.labels)

    def texture(self, colour: str) -> str | None:
        """What is drawn on the thing of a colour; None where there is none."""
        index = list(COLOURS).index(colour)
        rgb = resized(self.rgb[spread(len(self.rgb), MOMENTS)], ground.HIGH)
        mask = despeckled(labels(rgb) == index)
        found, weight = texture.features(rgb, mask, index)
        if not len(found):
            return None
        return probe.answer("texture", found, weight, flat(found, texture.RADII))

    @cached_property
    def _behind(self) -> Background:
        return background(self.rgb, ROWS)

    @cached_property
    def _light(self) -> lighting.Light:
        return lighting.light(self._behind)

    @property
    def light(self) -> str:
        """In the words of a sentence, "" where it does not change."""
        return self._light.words

    @cached_property
    def view(self) -> str | None:
        """What the background does: "still", a direction, "in" or "out"."""
        return viewing.view(self._behind, self._light)

    @cached_property
    def ground(self) -> str | None:
        """What the background is made of."""
        picked = spread(len(self.rgb), FEW_MOMENTS).to(self.rgb.device)
        behind = background(self.rgb[picked], ground.HIGH)
        lit = lighting.Light(self.light, self._light.field[picked])
        found = ground.features(behind, lit)
        return probe.answer("ground", found, behind.seen.sum((1, 2)), flat(found, ground.RADII))


def judge(frames: Tensor) -> Verdict:
    """Colour, shape and motion of a clip [F, H, W, 3], uint8 or 0…1."""
    return Clip(frames).verdict


def count_things(frames: Tensor) -> int:
    """How many coloured things a clip shows."""
    return Clip(frames).things


def speed(frames: Tensor, unit: float) -> str | None:
    """Of something that moves: "", "slowly" or "quickly", with `unit` frames to a unit of time."""
    return Clip(frames).speed(unit)
