"""Filming scenes of the second world: surfaces, shadows, camera and light, many clips at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from jali.nano.grammar import COLOURS
from training.film import distance
from training.world import pattern, words
from training.world.scene import DEPTHS, Scenes

DARK = 0.52  # the second tone of an object's texture, as a share of its colour
SHADE = 0.34  # what a shadow takes from the background
FALL = (0.022, 0.034)  # where a thing's shadow falls, in heights
SOFT = 0.3  # how soft it is, in radii


def unit(frames: int) -> float:
    """Frames in a unit of time: long clips are slower, or things would leave the picture."""
    return 32.0 if frames <= 48 else 0.8 * (frames - 1)


def film(
    scenes: Scenes,
    frames: int,
    height: int,
    width: int,
    *,
    pixels_per_unit: int | None = None,
    corner: Tensor | None = None,
    start: Tensor | None = None,
    pace: float | None = None,
) -> Tensor:
    """Clips in [-1, 1]: fp32 [n, 3, frames, height, width].

    A window of a larger picture is filmed where `pixels_per_unit` (its height) and `corner`
    [n, 2] (in pixels) are given; `start` [n] is the first frame's number, and `pace` the frames
    in a unit of time where they are more than are filmed.
    """
    device, n = scenes.radius.device, len(scenes)
    high = pixels_per_unit or height
    y = (torch.arange(height, device=device) + 0.5).view(1, 1, -1, 1)
    x = (torch.arange(width, device=device) + 0.5).view(1, 1, 1, -1)
    if corner is not None:
        x, y = x + corner[:, 0].view(-1, 1, 1, 1), y + corner[:, 1].view(-1, 1, 1, 1)
    t = torch.arange(frames, device=device).view(1, -1)
    if start is not None:
        t = t + start.view(-1, 1)
    t = (t / (pace or unit(frames)))[:, :, None, None].expand(n, -1, 1, 1)
    x, y = (x / high).expand(n, 1, 1, -1), (y / high).expand(n, 1, -1, 1)

    pixel = 1.0 / high
    picture = _ground(scenes, x, y, t, pixel)
    for paint in (_behind, _main, _front):
        colour, cover, shadow = paint(scenes, x, y, t, pixel)
        picture = picture * (1 - SHADE * shadow.unsqueeze(1))
        cover = cover.unsqueeze(1)
        picture = picture * (1 - cover) + colour * cover
    return (picture * _light(scenes, x, t).unsqueeze(1)).clamp(0, 1) * 2 - 1


def _per(value: Tensor) -> Tensor:
    """[n] beside frames, rows and columns."""
    return value.view(-1, 1, 1, 1)


def _turned(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    c, s = angle.cos(), angle.sin()
    return x * c + y * s, y * c - x * s


def _painted(table: dict[str, tuple[float, float, float]], index: Tensor) -> Tensor:
    colours = torch.tensor(list(table.values()), device=index.device)
    return colours[index.clamp(min=0)].view(len(index), 3, 1, 1, 1)


def _each(kinds: Tensor, like: Tensor, makers: dict[int, Callable[[Tensor], Tensor]]) -> Tensor:
    """One tone for every kind, made only for the scenes that have it; 1 for kinds without."""
    tone = torch.ones_like(like)
    for kind in sorted(set(kinds.tolist()) & set(makers)):
        rows = (kinds == kind).nonzero()[:, 0]
        tone[rows] = makers[kind](rows)
    return tone


# Things


def surface(s: Scenes, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where on the main object a point of the picture lies, its radius being 1; and its radius."""
    radius = _per(s.radius) * torch.exp(_per(s.growth) * t)
    u = x - _per(s.centre[:, 0]) - _per(s.velocity[:, 0]) * t
    v = y - _per(s.centre[:, 1]) - _per(s.velocity[:, 1]) * t
    u, v = _turned(u, v, _per(s.angle) + _per(s.spin) * t)
    return u / radius, v / radius, radius


def _main(
    s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float
) -> tuple[Tensor, Tensor, Tensor]:
    u, v, radius = surface(s, x, y, t)
    cover = pattern.inside(-distance(u, v, _per(s.shape)) * radius, pixel)
    tone = DARK + (1 - DARK) * _texture(s, u, v, pixel / radius)
    # Light from above left, which does not turn with the thing.
    du = (x - _per(s.centre[:, 0]) - _per(s.velocity[:, 0]) * t) / radius
    dv = (y - _per(s.centre[:, 1]) - _per(s.velocity[:, 1]) * t) / radius
    tone = tone * (1 - 0.07 * (du + dv)).clamp(0.8, 1.1)
    shiny = _per(s.texture == words.SHINY)
    tone = torch.where(shiny, tone * (1.06 - 0.34 * (du * du + dv * dv)).clamp(0.4, 1), tone)
    glow = 0.5 * torch.exp(-5.0 * ((du + 0.32) ** 2 + (dv + 0.36) ** 2)) * shiny
    colour = _painted(COLOURS, s.colour) * tone.unsqueeze(1)
    colour = colour * (1 - glow.unsqueeze(1)) + glow.unsqueeze(1)
    u, v, _ = surface(s, x - FALL[0], y - FALL[1], t)
    return colour, cover, _shadow(distance(u, v, _per(s.shape)))


def _shadow(distance: Tensor) -> Tensor:
    away = (0.5 - distance / SOFT).clamp(0, 1)
    return away * away * (3 - 2 * away)


def _behind(
    s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _other(s, x, y, t, pixel, "behind")


def _front(
    s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _other(s, x, y, t, pixel, "front")


def _other(
    s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float, which: str
) -> tuple[Tensor, Tensor, Tensor]:
    """One of the smaller things, which stand in the world and move as the camera does."""
    there = getattr(s, f"{which}_colour") >= 0
    centre = getattr(s, f"{which}_centre")
    angle, shape = _per(getattr(s, f"{which}_angle")), _per(getattr(s, f"{which}_shape"))
    x, y, scale = _through_camera(s, x, y, t, DEPTHS[which] * _per(s.parallax))
    radius = _per(getattr(s, f"{which}_radius"))

    def away(dx: float, dy: float) -> Tensor:
        u, v = x - _per(centre[:, 0]) - dx / scale, y - _per(centre[:, 1]) - dy / scale
        u, v = _turned(u, v, angle)
        return distance(u / radius, v / radius, shape)

    tone = 1 - 0.07 * ((x - _per(centre[:, 0])) + (y - _per(centre[:, 1]))) / radius
    colour = _painted(COLOURS, getattr(s, f"{which}_colour")) * tone.clamp(0.8, 1.1).unsqueeze(1)
    cover = pattern.inside(-away(0, 0) * radius * scale, pixel)
    return colour, cover * _per(there), _shadow(away(*FALL)) * _per(there)


def _through_camera(
    s: Scenes, x: Tensor, y: Tensor, t: Tensor, depth: Tensor | float
) -> tuple[Tensor, Tensor, Tensor]:
    """Points of the world seen at points of the picture, and how much larger it looks there."""
    scale = torch.exp(_per(s.zoom) * depth * t)
    middle = _per(s.aspect) / 2
    x = (x - middle) / scale + middle - _per(s.drift[:, 0]) * depth * t
    y = (y - 0.5) / scale + 0.5 - _per(s.drift[:, 1]) * depth * t
    return x, y, scale


def _texture(s: Scenes, u: Tensor, v: Tensor, pixel: Tensor) -> Tensor:
    """Tone 0…1 of the main object's surface; `pixel` in its own units."""
    u, v, pixel = torch.broadcast_tensors(u, v, pixel)
    period = 0.62 / _per(s.fineness)

    def waves(rows: Tensor, longest: float, shortest: float, count: int = 16) -> Tensor:
        return pattern.noise(u[rows], v[rows], s.phases[rows][:, :count], longest, shortest)

    def patches(rows: Tensor) -> Tensor:
        # The slope of the noise is about 6 a radius where it crosses the limit.
        return pattern.inside((waves(rows, 1.3, 0.5, 10) + 0.12) / 6, pixel[rows])

    def veins(rows: Tensor) -> Tensor:
        bent = 1.1 * waves(rows, 1.6, 0.35, 12)
        return 0.5 + 0.5 * torch.sin((u[rows] + 0.5 * v[rows] + bent) * 7.0)

    makers = {
        "striped": lambda r: pattern.stripes(v[r], period[r] * 1.25, pixel[r]),
        "dotted": lambda r: pattern.dots(u[r], v[r], period[r] * 0.85, pixel[r]),
        "checkered": lambda r: pattern.checks(u[r], v[r], period[r] * 1.25, pixel[r]),
        "grainy": lambda r: torch.sigmoid(2.2 * waves(r, 0.5, 0.26)),
        "marbled": veins,
        "patchy": patches,
    }
    return _each(s.texture, u, {words.TEXTURES.index(k): make for k, make in makers.items()})


# Background


def _ground(s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float) -> Tensor:
    full = torch.ones(1, device=x.device).view(1, 1, 1, 1)
    x0, y0, scale = _through_camera(s, x, y, t, full)
    u, v = _turned(x0, y0, _per(s.ground_angle))
    footprint = (pixel / scale).expand_as(u)
    size = 1 / _per(s.ground_fineness)
    seed = _per(s.ground_phases[:, 0]) * 9

    def waves(r: Tensor, longest: float, shortest: float, count: int) -> Tensor:
        a, b = u[r] / size[r], v[r] / size[r]
        return pattern.noise(a, b, s.ground_phases[r][:, :count], longest, shortest)

    def foliage(r: Tensor) -> Tensor:
        return pattern.leaves(u[r], v[r], 0.19 * size[r], footprint[r], seed[r])

    makers = {
        "plain": lambda r: 0.6 + 0.12 * waves(r, 1.6, 0.6, 6),
        "striped": lambda r: pattern.stripes(v[r], 0.17 * size[r], footprint[r]),
        "checkered": lambda r: pattern.checks(u[r], v[r], 0.24 * size[r], footprint[r]),
        "dotted": lambda r: pattern.dots(u[r], v[r], 0.14 * size[r], footprint[r]),
        "cloudy": lambda r: torch.sigmoid(2.2 * waves(r, 0.9, 0.10, 24)),
        "wavy": lambda r: pattern.stripes(
            v[r] + 0.03 * size[r] * torch.sin(u[r] * 13 / size[r]), 0.15 * size[r], footprint[r]
        ),
        "tiled": lambda r: pattern.tiles(u[r], v[r], 0.13 * size[r], footprint[r], seed[r]),
        "leafy": foliage,
        "grainy": lambda r: torch.sigmoid(
            1.5 * waves(r, 0.11, 0.055, 24) + 0.8 * waves(r, 0.9, 0.3, 8)
        ),
        "wooden": lambda r: pattern.planks(
            u[r], v[r], 0.22 * size[r], footprint[r], s.ground_phases[r]
        ),
        "hilly": lambda r: _hills(s[r], x[r], y[r], t[r], pixel),
    }
    tone = _each(s.ground, u, {words.GROUNDS.index(k): make for k, make in makers.items()})
    tone = tone.unsqueeze(1)
    colour = _painted(words.GROUND_COLOURS, s.ground_colour)
    # The second tone is a share brighter, and a little up from black, so that it shows on both.
    return (colour * (0.66 + 0.44 * tone) + 0.05 * tone).clamp(0, 1)


def _hills(s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float) -> Tensor:
    """Ridges one before the other under a sky; the nearer, the darker and the faster."""
    tone = 1.3 - 0.55 * y + 0 * x * t
    for layer in range(3):
        depth = 0.45 + 0.45 * layer
        a, b, scale = _through_camera(s, x, y, t, torch.full_like(t, depth))
        phases = s.ground_phases[:, 12 * layer : 12 * layer + 12]
        line = pattern.noise(a, a * 0, phases[:, :6], 1.1, 0.22)
        ridge = 0.40 + 0.19 * layer + (0.075 + 0.01 * layer) * line
        trees = pattern.noise(a, b, phases, 0.22, 0.07)
        own = 0.62 - 0.45 * layer + (0.10 + 0.03 * layer) * trees
        cover = pattern.inside((b - ridge) * scale, pixel)
        tone = tone * (1 - cover) + own * cover
    return tone


# Light


def lights(across: Tensor, t: Tensor) -> dict[str, Tensor]:
    """Every light by its words: brightness at places 0…1 from left to right, at times t."""
    passing = torch.exp(-((across - 1.5 * t.clamp(0, 1.1) + 0.25) / 0.26).square())
    return {
        "it gets darker": 1 - 0.5 * t.clamp(0, 1.2),
        "it gets brighter": 0.5 + 0.5 * t.clamp(0, 1),
        "light comes from the left": 1 - 0.45 * across,
        "light comes from the right": 0.55 + 0.45 * across,
        "a shadow passes": 1 - 0.5 * passing,
    }


def _light(s: Scenes, x: Tensor, t: Tensor) -> Tensor:
    even = torch.ones_like(x * t)
    for name, lit in lights((x / _per(s.aspect)).clamp(0, 1), t).items():
        even = torch.where(_per(s.light) == words.LIGHTS.index(name), lit, even)
    return even
