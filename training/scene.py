"""The world nano was shown: scenes as numbers, and the sentences that describe them.

A scene is one object that moves over a background, perhaps with a smaller one behind or before it.
`Scenes` holds many of them as tensors, so that drawing a set and filming it are both quick.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from jali.nano.grammar import COLOURS, MOTIONS, SHAPES

TEXTURES = ("plain", "striped", "dotted", "checkered", "shiny")
# Backgrounds are dull, so that an object's colour can be told from them by a program.
GROUND_COLOURS = {
    "grey": (0.50, 0.50, 0.52),
    "white": (0.88, 0.88, 0.86),
    "black": (0.09, 0.09, 0.10),
    "brown": (0.42, 0.33, 0.26),
    "navy": (0.20, 0.24, 0.34),
}
GROUNDS = ("plain", "striped", "checkered", "dotted", "cloudy", "wavy", "tiled")
DRIFTS = ("", "left", "right", "up", "down")
LIGHTS = (
    "",
    "it gets darker",
    "it gets brighter",
    "light comes from the left",
    "light comes from the right",
)
SIDES = ("", "behind it", "in front of it")
SIZES = ("small", "large")

COLOUR_NAMES = tuple(COLOURS)
MOTION_NAMES = tuple(MOTIONS)
GROUND_NAMES = tuple(GROUND_COLOURS)
SPINS = MOTION_NAMES.index("spins")
WORD_KINDS = (
    "size", "colour", "texture", "shape", "motion", "ground", "ground_colour", "side",
    "other_colour", "other_shape", "drift", "light",
)  # fmt: skip


@dataclass(frozen=True)
class Scenes:
    """n scenes. Words are indices [n] into the tables above; the rest are numbers.

    Lengths are in heights of the picture, time in units of 32 frames.
    """

    colour: Tensor
    shape: Tensor
    texture: Tensor
    motion: Tensor
    size: Tensor
    ground: Tensor
    ground_colour: Tensor
    drift: Tensor
    light: Tensor
    side: Tensor
    other_colour: Tensor
    other_shape: Tensor
    centre: Tensor  # [n, 2], of the main object at time 0
    velocity: Tensor  # [n, 2]
    radius: Tensor  # [n]
    growth: Tensor  # [n], of the logarithm of the radius
    angle: Tensor
    spin: Tensor
    fineness: Tensor  # [n], of the object's texture
    ground_fineness: Tensor
    ground_angle: Tensor
    ground_drift: Tensor  # [n, 2]
    phases: Tensor  # [n, 12], of clouds
    other_centre: Tensor  # [n, 2]
    other_velocity: Tensor
    other_radius: Tensor
    other_angle: Tensor

    def __len__(self) -> int:
        return len(self.colour)

    def __getitem__(self, index: Tensor | slice) -> Scenes:
        return Scenes(*(getattr(self, f.name)[index] for f in fields(self)))

    def to(self, device: torch.device | str) -> Scenes:
        return Scenes(*(getattr(self, f.name).to(device) for f in fields(self)))

    def captions(self, seed: int | None = None) -> list[str]:
        """A sentence for every scene. With a seed some leave details out, as people do."""
        return [sentence for sentence, _ in self.told(seed)]

    def told(self, seed: int | None = None) -> list[tuple[str, dict[str, int]]]:
        """Sentences, and which words each of them says, as indices by kind."""
        chance = None if seed is None else random.Random(seed)
        words = {name: getattr(self, name).tolist() for name in WORD_KINDS}
        return [
            tell({name: values[i] for name, values in words.items()}, chance)
            for i in range(len(self))
        ]


def tell(scene: dict[str, int], chance: random.Random | None) -> tuple[str, dict[str, int]]:
    """The sentence for one scene of indices, and those that it says."""
    said: dict[str, int] = {}

    def say(kind: str, table: Sequence[str], share: float = 1.0) -> list[str]:
        if chance is not None and chance.random() >= share:
            return []
        word = table[scene[kind]]
        if word == "plain":  # goes without saying
            return []
        said[kind] = scene[kind]
        return [word]

    size = say("size", SIZES, 0.7)
    colour = say("colour", COLOUR_NAMES)
    thing = [*size, *colour, *say("texture", TEXTURES, 0.8), *say("shape", SHAPES)]
    text = f"{_a(thing)} {say('motion', tuple(MOTIONS.values()))[0]}"
    if chance is None or chance.random() < 0.8:
        ground = [*say("ground_colour", GROUND_NAMES), *say("ground", GROUNDS), "background"]
        text += f" over {_a(ground)}"
    if scene["side"] and (side := say("side", SIDES, 0.8)):
        other = [*say("other_colour", COLOUR_NAMES), *say("other_shape", SHAPES)]
        text += f", {side[0]} {_a(other)}"
    if scene["drift"] and (drift := say("drift", DRIFTS, 0.8)):
        text += f", the background drifts {drift[0]}"
    if scene["light"] and (light := say("light", LIGHTS, 0.8)):
        text += f", {light[0]}"
    return text, said


def _a(words: list[str]) -> str:
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def held_out(colour: Tensor, shape: Tensor, motion: Tensor) -> Tensor:
    """Which combinations training never shows: one in eleven, spread over all words."""
    return (colour + 3 * shape + 5 * motion) % 11 == 0


@dataclass(frozen=True)
class Dice:
    """Random numbers for so many scenes, the same for the same seed."""

    count: int
    generator: torch.Generator

    def index(self, below: int, count: int | None = None) -> Tensor:
        shape = (self.count if count is None else count,)
        return torch.randint(below, shape, generator=self.generator)

    def uniform(self, low: float, high: float) -> Tensor:
        return low + (high - low) * torch.rand(self.count, generator=self.generator)

    def choose(self, weights: Sequence[float]) -> Tensor:
        """Indices, each with a probability in proportion to its weight."""
        return torch.multinomial(torch.tensor(weights), self.count, True, generator=self.generator)

    def sign(self) -> Tensor:
        return self.choose([1.0, 1.0]) * 2.0 - 1.0


def sample_scenes(count: int, seed: int, aspect: float = 1.0, unseen: bool = False) -> Scenes:
    """Scenes at random; `unseen` gives combinations that training leaves out, else only others."""
    dice = Dice(count, torch.Generator().manual_seed(seed))
    colour, shape, motion = sample_combinations(dice, unseen)
    texture = dice.choose([1.0] * len(TEXTURES))
    # A plain ball or ring that spins looks like one that does not.
    round_shape, even = (shape == 0) | (shape == 4), (texture == 0) | (texture == 4)
    texture = torch.where((motion == SPINS) & round_shape & even, 1, texture)
    size = dice.choose([1.0, 1.0])
    radius = torch.where(size == 1, dice.uniform(0.26, 0.32), dice.uniform(0.18, 0.22))
    centre, velocity = _sample_path(dice, motion, aspect)
    radius, growth = _sample_growth(dice, motion, radius)
    spin = dice.sign() * dice.uniform(1.6, 2.6)
    drift = dice.choose([6.0, 1, 1, 1, 1])
    drifts = torch.tensor([[0.0, 0], [-1, 0], [1, 0], [0, -1], [0, 1]])
    side = dice.choose([5.0, 3, 2])
    other_colour = (colour + 1 + dice.index(7)) % 8
    around = dice.uniform(0, 6.2832)
    away = radius * dice.uniform(0.9, 1.5)
    offset = torch.stack((around.cos() * away, around.sin() * away), 1)
    # Standing where the main object is half way, the other one is passed or covered.
    other_centre = centre + velocity / 2 + offset
    edge = torch.tensor([aspect, 1.0])
    return Scenes(
        colour=colour,
        shape=shape,
        texture=texture,
        motion=motion,
        size=size,
        ground=dice.choose([1.0] * len(GROUNDS)),
        ground_colour=dice.choose([1.0] * len(GROUND_COLOURS)),
        drift=drift,
        light=dice.choose([5.0, 1, 1, 1, 1]),
        side=side,
        other_colour=other_colour,
        other_shape=dice.index(len(SHAPES)),
        centre=centre,
        velocity=velocity.float(),
        radius=radius,
        growth=growth,
        angle=dice.uniform(-0.25, 0.25),
        spin=torch.where(motion == SPINS, spin, torch.zeros(count)),
        fineness=dice.uniform(0.8, 1.15),
        ground_fineness=dice.uniform(0.8, 1.2),
        ground_angle=dice.uniform(-0.6, 0.6),
        ground_drift=drifts[drift] * dice.uniform(0.25, 0.4)[:, None],
        phases=torch.rand(count, 12, generator=dice.generator) * 6.2832,
        other_centre=other_centre.clamp(min=0.12).minimum(edge - 0.12),
        other_velocity=torch.zeros(count, 2),
        other_radius=dice.uniform(0.085, 0.115),
        other_angle=dice.uniform(-0.3, 0.3),
    )


def sample_combinations(dice: Dice, unseen: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Colour, shape and motion of every scene: those that training leaves out, or the others."""
    pool = 16 * dice.count + 64 if unseen else 2 * dice.count + 64
    colour, shape, motion = (dice.index(len(table), pool) for table in (COLOURS, SHAPES, MOTIONS))
    rows = (held_out(colour, shape, motion) == unseen).nonzero()[: dice.count, 0]
    return colour[rows], shape[rows], motion[rows]


def _sample_path(dice: Dice, motion: Tensor, aspect: float) -> tuple[Tensor, Tensor]:
    """Where the main object is at time 0, and how it moves, so that it stays in the picture."""
    still = [[0, 0]] * 4
    direction = torch.tensor([[-1, 0], [1, 0], [0, -1], [0, 1], *still])[motion]
    speed = dice.uniform(0.40, 0.55)
    wander = torch.stack((dice.uniform(-0.22, 0.22) * aspect, dice.uniform(-0.2, 0.2)), 1)
    moving = direction.abs().sum(1, keepdim=True) > 0
    along = direction.abs() * wander * 0.35 - direction * (speed / 2)[:, None]
    across = (1 - direction.abs()) * wander
    centre = torch.tensor([aspect / 2, 0.5]) + torch.where(moving, along + across, wander)
    return centre, direction * speed[:, None]


def _sample_growth(dice: Dice, motion: Tensor, radius: Tensor) -> tuple[Tensor, Tensor]:
    """The radius at time 0 and how its logarithm changes."""
    grows, shrinks = motion == 4, motion == 5
    growth = torch.where(grows, dice.uniform(0.7, 0.9), torch.zeros(dice.count))
    growth = torch.where(shrinks, -dice.uniform(0.8, 1.0), growth)
    radius = torch.where(grows, radius * 0.62, radius)
    return torch.where(shrinks, radius * 1.25, radius), growth


def prompts(count: int, seed: int = 0) -> tuple[str, ...]:
    """Sentences about combinations that training never showed."""
    return tuple(sample_scenes(count, seed=900_000 + seed, unseen=True).captions())
