"""Filming scenes: distance fields, textures and light, as one batch of tensors on any device."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jali.nano.grammar import COLOURS
from training.scene import GROUND_COLOURS, Scenes

DARK = 0.5  # the second tone of an object's texture, as a share of its colour
FRAMES_PER_UNIT = 32.0


def film(
    scenes: Scenes,
    frames: int,
    height: int,
    width: int,
    *,
    pixels_per_unit: int | None = None,
    corner: Tensor | None = None,
    start: Tensor | None = None,
) -> Tensor:
    """Clips in [-1, 1]: fp32 [n, 3, frames, height, width].

    A window of a larger picture is filmed where `pixels_per_unit` (its height) and `corner`
    [n, 2] (in pixels) are given; `start` [n] is the first frame's number.
    """
    device = scenes.radius.device
    unit = pixels_per_unit or height
    y = (torch.arange(height, device=device) + 0.5).view(1, 1, -1, 1)
    x = (torch.arange(width, device=device) + 0.5).view(1, 1, 1, -1)
    if corner is not None:
        x, y = x + corner[:, 0].view(-1, 1, 1, 1), y + corner[:, 1].view(-1, 1, 1, 1)
    x, y = x / unit, y / unit
    t = torch.arange(frames, device=device).view(1, -1)
    if start is not None:
        t = t + start.view(-1, 1)
    t = (t / FRAMES_PER_UNIT)[:, :, None, None]

    picture = _ground(scenes, x, y, t)
    main = _object(scenes, x, y, t, 1.0 / unit)
    other = _other(scenes, x, y, t, 1.0 / unit)
    for layer, sides in ((other, (1,)), (main, (0, 1, 2)), (other, (2,))):
        colour, cover = layer
        shown = sum(scenes.side == side for side in sides)
        cover = (cover * _per_scene(torch.as_tensor(shown).float())).unsqueeze(1)
        picture = picture * (1 - cover) + colour * cover
    lit = _light(scenes, x, t, width / unit)
    return (picture * lit.unsqueeze(1)).clamp(0, 1) * 2 - 1


def _per_scene(value: Tensor) -> Tensor:
    """[n] beside frames, rows and columns."""
    return value.view(-1, 1, 1, 1)


def _palette(table: dict[str, tuple[float, float, float]], index: Tensor) -> Tensor:
    colours = torch.tensor(list(table.values()), device=index.device)
    return colours[index].view(len(index), 3, 1, 1, 1)


def _soft(distance: Tensor, pixel: float) -> Tensor:
    """Cover of a pixel by what lies at negative distance."""
    return (0.5 - distance / (1.5 * pixel)).clamp(0, 1)


def _wave(x: Tensor, softness: float = 5.0) -> Tensor:
    """A square wave with soft edges, in 0…1."""
    return torch.sigmoid(softness * torch.sin(x))


def _turned(x: Tensor, y: Tensor, angle: Tensor) -> tuple[Tensor, Tensor]:
    c, s = angle.cos(), angle.sin()
    return x * c + y * s, y * c - x * s


def _object(s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float) -> tuple[Tensor, Tensor]:
    radius = _per_scene(s.radius) * torch.exp(_per_scene(s.growth) * t)
    u = x - _per_scene(s.centre[:, 0]) - _per_scene(s.velocity[:, 0]) * t
    v = y - _per_scene(s.centre[:, 1]) - _per_scene(s.velocity[:, 1]) * t
    u, v = _turned(u, v, _per_scene(s.angle) + _per_scene(s.spin) * t)
    u, v = u / radius, v / radius
    cover = _soft(distance(u, v, _per_scene(s.shape)) * radius, pixel)
    tone = _texture(u, v, _per_scene(s.texture), _per_scene(s.fineness))
    colour = _palette(COLOURS, s.colour) * (DARK + (1 - DARK) * tone).unsqueeze(1)
    glow = (
        0.45 * torch.exp(-3.5 * ((u + 0.3) ** 2 + (v + 0.35) ** 2)) * (_per_scene(s.texture) == 4)
    )
    return colour * (1 - glow.unsqueeze(1)) + glow.unsqueeze(1), cover


def _other(s: Scenes, x: Tensor, y: Tensor, t: Tensor, pixel: float) -> tuple[Tensor, Tensor]:
    radius = _per_scene(s.other_radius)
    u = x - _per_scene(s.other_centre[:, 0]) - _per_scene(s.other_velocity[:, 0]) * t
    v = y - _per_scene(s.other_centre[:, 1]) - _per_scene(s.other_velocity[:, 1]) * t
    u, v = _turned(u, v, _per_scene(s.other_angle))
    cover = _soft(distance(u / radius, v / radius, _per_scene(s.other_shape)) * radius, pixel)
    return _palette(COLOURS, s.other_colour), cover


def distance(u: Tensor, v: Tensor, shape: Tensor) -> Tensor:
    """Signed distance (about) to the outline of each shape of radius 1."""
    r = torch.sqrt(u * u + v * v + 1e-9)
    around = torch.atan2(u, -v)
    fifth = (around / (2 * math.pi / 5) + 0.5).remainder(1.0) - 0.5
    fields = (
        r - 0.88,
        torch.maximum(u.abs(), v.abs()) - 0.80,
        torch.maximum(0.866 * u.abs() - 0.5 * v, v) - 0.55,
        (r - (1.05 - 1.25 * fifth.abs())) * 0.65,
        (r - 0.66).abs() - 0.26,
        torch.minimum(
            torch.maximum(u.abs() - 0.95, v.abs() - 0.32),
            torch.maximum(u.abs() - 0.32, v.abs() - 0.95),
        ),
        torch.maximum(r - 0.95, 0.82 - torch.sqrt((u - 0.5) ** 2 + v * v + 1e-9)),
        torch.maximum(u.abs() - 1.0, v.abs() - 0.34),
    )
    out = fields[0].expand(torch.broadcast_shapes(u.shape, shape.shape))
    for i, field in enumerate(fields[1:], 1):
        out = torch.where(shape == i, field, out)
    return out


def _texture(u: Tensor, v: Tensor, texture: Tensor, fineness: Tensor) -> Tensor:
    """Tone 0…1 of an object's surface."""
    f = 6.0 * fineness
    tone = torch.ones_like(u)
    dots = _wave_dots(u * f * 1.2, v * f * 1.2)
    for i, made in ((1, _wave(v * f)), (2, dots), (3, _checks(u * f * 0.85, v * f * 0.85))):
        tone = torch.where(texture == i, made, tone)
    shade = (1.0 - 0.35 * (u * u + v * v)).clamp(0.3, 1)
    return torch.where(texture == 4, shade, tone)


def _wave_dots(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(6 * (torch.cos(x) + torch.cos(y) + 0.1))


def _checks(x: Tensor, y: Tensor) -> Tensor:
    return torch.sigmoid(8 * torch.sin(x) * torch.sin(y))


def _ground(s: Scenes, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
    x = x - _per_scene(s.ground_drift[:, 0]) * t
    y = y - _per_scene(s.ground_drift[:, 1]) * t
    u, v = _turned(x, y, _per_scene(s.ground_angle))
    f = 22.0 * _per_scene(s.ground_fineness)
    clouds = torch.zeros_like(u)
    for i in range(6):
        a = s.phases[:, i]
        turn = _per_scene(a + 1.1 * i)
        clouds = clouds + torch.sin(
            (u * turn.cos() + v * turn.sin()) * (5.0 + 3.0 * i) + _per_scene(s.phases[:, 6 + i])
        ) / (1 + 0.35 * i)
    made = (
        _wave(v * f),
        _checks(u * f * 0.8, v * f * 0.8),
        _wave_dots(u * f, v * f),
        torch.sigmoid(1.6 * clouds),
        _wave(v * f + 1.8 * torch.sin(u * f * 0.5)),
        torch.sigmoid(9 * (torch.maximum(torch.cos(u * f * 0.7), torch.cos(v * f * 0.7)) - 0.82)),
    )
    tone = torch.ones_like(u) * 0.7
    for i, field in enumerate(made, 1):
        tone = torch.where(_per_scene(s.ground) == i, field, tone)
    colour = _palette(GROUND_COLOURS, s.ground_colour)
    # The second tone is a share brighter, and a little up from black, so that it shows on both.
    return (colour * (0.72 + 0.36 * tone.unsqueeze(1)) + 0.05 * tone.unsqueeze(1)).clamp(0, 1)


def _light(s: Scenes, x: Tensor, t: Tensor, span: float) -> Tensor:
    kind = _per_scene(s.light)
    lit = torch.ones_like(x * t)
    lit = torch.where(kind == 1, 1.0 - 0.5 * t.clamp(0, 1.2), lit)
    lit = torch.where(kind == 2, 0.5 + 0.5 * t.clamp(0, 1.0), lit)
    across = (x / span).clamp(0, 1)
    lit = torch.where(kind == 3, 1.0 - 0.45 * across, lit)
    return torch.where(kind == 4, 0.55 + 0.45 * across, lit)
