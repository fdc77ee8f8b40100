"""Scenes of the second world as numbers, many at once."""

from __future__ import annotations

import random
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from jali.nano.grammar import SHAPES
from training.scene import Dice, held_out, sample_combinations
from training.world import words
from training.world.sentence import tell
from training.world.words import KINDS

__all__ = ["Scenes", "held_out", "prompts", "sample_scenes"]

PHASES = 48  # random numbers for noise, of an object and of the background each
# From behind the background's surface to before the main object.
DEPTHS = {"behind": 0.6, "front": 1.5}
RADII = {"behind": (0.10, 0.13), "front": (0.08, 0.11)}
# Slow, as always, quick.
PATHS = torch.tensor([[0.40, 0.52], [0.27, 0.34], [0.62, 0.74]])
GROWTHS = torch.tensor([[0.72, 0.90], [0.50, 0.60], [1.00, 1.15]])
SPINS = torch.tensor([[1.8, 2.6], [1.1, 1.4], [3.2, 4.2]])


@dataclass(frozen=True)
class Scenes:
    """n scenes. Words are indices [n] into `words.KINDS`; the rest are numbers.

    Lengths are in heights of the picture, time in units of `film.unit(frames)` frames.
    """

    size: Tensor
    colour: Tensor
    fine: Tensor
    texture: Tensor
    shape: Tensor
    motion: Tensor
    speed: Tensor
    ground_colour: Tensor
    ground: Tensor
    behind_colour: Tensor  # -1 where there is none
    behind_shape: Tensor
    front_colour: Tensor  # -1 where there is none
    front_shape: Tensor
    view: Tensor
    light: Tensor
    aspect: Tensor  # width over height
    centre: Tensor  # [n, 2], of the main object at time 0
    velocity: Tensor  # [n, 2]
    radius: Tensor
    growth: Tensor  # of the logarithm of the radius
    angle: Tensor
    spin: Tensor
    fineness: Tensor  # of the object's texture
    ground_fineness: Tensor
    ground_angle: Tensor
    drift: Tensor  # [n, 2], of the background
    zoom: Tensor  # of the logarithm of the background's size
    parallax: Tensor  # 1 where the camera moves, 0 where the background does
    phases: Tensor  # [n, PHASES] in 0…1
    ground_phases: Tensor
    behind_centre: Tensor  # [n, 2]
    behind_radius: Tensor
    behind_angle: Tensor
    front_centre: Tensor
    front_radius: Tensor
    front_angle: Tensor

    def __len__(self) -> int:
        return len(self.colour)

    def __getitem__(self, index: Tensor | slice) -> Scenes:
        return Scenes(*(getattr(self, f.name)[index] for f in fields(self)))

    def to(self, device: torch.device | str) -> Scenes:
        return Scenes(*(getattr(self, f.name).to(device) for f in fields(self)))

    def objects(self) -> Tensor:
        """How many things there are: [n]."""
        return 1 + (self.behind_colour >= 0).long() + (self.front_colour >= 0).long()

    def captions(self, seed: int | None = None) -> list[str]:
        """A sentence for every scene; with a seed some leave details out."""
        chance = None if seed is None else random.Random(seed)
        told = {kind: getattr(self, kind).tolist() for kind in KINDS}
        return [tell({kind: told[kind][i] for kind in KINDS}, chance) for i in range(len(self))]


def sample_scenes(count: int, seed: int, aspect: float = 1.0, unseen: bool = False) -> Scenes:
    """Scenes at random; `unseen` gives combinations that training leaves out, else only others."""
    dice = Dice(count, torch.Generator().manual_seed(seed))
    colour, shape, motion = sample_combinations(dice, unseen)
    texture = dice.choose([2.0, *[1.0] * (len(words.TEXTURES) - 1)])
    even = (texture == words.PLAIN) | (texture == words.SHINY)
    # A plain ball or ring that spins looks like one that does not.
    round_shape = (shape == SHAPES.index("ball")) | (shape == SHAPES.index("ring"))
    texture = torch.where((motion == words.SPINS) & round_shape & even, 1, texture)
    pattern = torch.isin(texture, torch.tensor(words.PATTERNS))
    fine = dice.choose([2.0, 1.0]) * pattern
    speed = dice.choose([2.0, 1.0, 1.0]) * (motion != words.STAYS)
    size = dice.choose([1.0, 1.0])
    radius = torch.where(size == 1, dice.uniform(0.26, 0.32), dice.uniform(0.18, 0.22))
    radius, growth = _growth(dice, motion, radius, _between(dice, GROWTHS[speed]))
    centre, velocity = _path(dice, motion, _between(dice, PATHS[speed]), radius, aspect)
    others = _others(dice, colour, centre + velocity / 2, radius, growth, aspect)
    company = (others["behind_colour"] >= 0).long() + (others["front_colour"] >= 0).long()
    # At most two clauses after the background, or sentences would outgrow their buffer.
    view = dice.choose([9.0, *[0.6] * 4, *[0.9] * 4, 1.8, 1.8]) * (company < 2)
    light = dice.choose([5.0, *[1.0] * 5]) * (company + (view > 0) < 2)
    turning = dice.sign() * _between(dice, SPINS[speed])
    return Scenes(
        size=size,
        colour=colour,
        fine=fine,
        texture=texture,
        shape=shape,
        motion=motion,
        speed=speed,
        ground_colour=dice.choose([1.0] * len(words.GROUND_COLOURS)),
        ground=dice.choose([1.0] * len(words.GROUNDS)),
        view=view,
        light=light,
        aspect=torch.full((count,), aspect),
        centre=centre,
        velocity=velocity,
        radius=radius,
        growth=growth,
        angle=dice.uniform(-0.25, 0.25),
        spin=torch.where(motion == words.SPINS, turning, torch.zeros(count)),
        fineness=dice.uniform(0.85, 1.1) * torch.where(fine == 1, 1.7, 1.0),
        ground_fineness=dice.uniform(0.85, 1.25),
        ground_angle=dice.uniform(-0.6, 0.6),
        **_camera(dice, view),
        phases=torch.rand(count, PHASES, generator=dice.generator),
        ground_phases=torch.rand(count, PHASES, generator=dice.generator),
        **others,
    )


def _between(dice: Dice, bounds: Tensor) -> Tensor:
    """A number between two, for every scene: [n] from [n, 2]."""
    return bounds[:, 0] + (bounds[:, 1] - bounds[:, 0]) * dice.uniform(0, 1)


def _path(
    dice: Dice, motion: Tensor, speed: Tensor, radius: Tensor, aspect: float
) -> tuple[Tensor, Tensor]:
    """Where the main object is at time 0, and how it moves, so that it stays in the picture."""
    still = [[0.0, 0.0]] * 4
    direction = torch.tensor([[-1.0, 0], [1, 0], [0, -1], [0, 1], *still])[motion]
    room = torch.tensor([aspect / 2, 0.5]) - 1.05 * radius[:, None]
    room = room.minimum(torch.tensor([0.18 * aspect, 0.2])).clamp(min=0.06)
    wander = torch.stack((dice.uniform(-1, 1), dice.uniform(-1, 1)), 1) * room
    along = direction.abs()
    # Half of the path lies before the middle.
    wander = wander * (1 - along * 0.7)
    middle = torch.tensor([aspect / 2, 0.5]) + wander
    velocity = direction * speed[:, None]
    return middle - velocity / 2, velocity


def _growth(dice: Dice, motion: Tensor, radius: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
    """The radius at time 0 and how its logarithm changes; half way it is what the size says."""
    signs = {"grows": 1.0, "shrinks": -1.0}
    sign = torch.tensor([signs.get(phrase, 0.0) for phrase in KINDS["motion"]])[motion]
    growth = sign * rate
    shown = torch.where(growth.abs() > 0, radius * dice.uniform(0.8, 0.88), radius)
    return shown * torch.exp(-growth / 2), growth


def _others(
    dice: Dice, colour: Tensor, middle: Tensor, radius: Tensor, growth: Tensor, aspect: float
) -> dict[str, Tensor]:
    """Smaller things about where the main object is half way, all of different colours."""
    count, colours = dice.count, len(KINDS["colour"])
    order = torch.rand(count, colours, generator=dice.generator)
    order.scatter_(1, colour[:, None], 2.0)  # the main object's own comes last
    order = order.argsort(1)
    kinds = dice.choose([10.0, 4.0, 3.0, 3.0])  # none, behind, in front, both
    half = radius * torch.exp(growth / 2)
    found: dict[str, Tensor] = {}
    taken = torch.full((count, 2), 9.0)  # far away
    for i, (which, (low, high)) in enumerate(RADII.items()):
        there = (kinds == i + 1) | (kinds == 3)
        wanted = half * (1.25 if which == "behind" else 1.05)
        spots = torch.rand(count, 24, 2, generator=dice.generator)
        spots = 0.14 + spots * (torch.tensor([aspect, 1.0]) - 0.28)
        away = (spots - middle[:, None]).norm(dim=-1)
        crowd = (0.30 - (spots - taken[:, None]).norm(dim=-1)).clamp(min=0)
        best = ((away / wanted[:, None] - 1).abs() + 8 * crowd).argmin(1)
        place = spots[torch.arange(count), best]
        taken = torch.where(there[:, None], place, taken)
        found[f"{which}_colour"] = torch.where(there, order[:, i], -1)
        found[f"{which}_shape"] = dice.index(len(SHAPES))
        found[f"{which}_centre"] = place
        found[f"{which}_radius"] = dice.uniform(low, high)
        found[f"{which}_angle"] = dice.uniform(-0.3, 0.3)
    return found


def _camera(dice: Dice, view: Tensor) -> dict[str, Tensor]:
    ways = torch.tensor([[-1.0, 0], [1, 0], [0, -1], [0, 1]])
    still = torch.zeros(1, 2)
    # A camera that pans left moves what it sees to the right.
    drifts = torch.cat((still, ways, -ways, still, still))[view]
    zooms = torch.tensor([*[0.0] * 9, 1.0, -1.0])[view]
    return {
        "drift": drifts * dice.uniform(0.25, 0.42)[:, None],
        "zoom": zooms * dice.uniform(0.35, 0.55),
        "parallax": (view > 4).float(),
    }


def prompts(count: int, seed: int = 0) -> tuple[str, ...]:
    """Sentences about combinations that training never showed."""
    return tuple(sample_scenes(count, seed=900_000 + seed, unseen=True).captions())
