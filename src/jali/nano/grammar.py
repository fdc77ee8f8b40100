"""The words nano knows, and what a prompt asks for in them."""

from __future__ import annotations

import re
from dataclasses import dataclass

# Names, and the red, green and blue that training painted them with.
COLOURS = {
    "red": (0.90, 0.12, 0.12),
    "orange": (0.98, 0.52, 0.08),
    "yellow": (0.97, 0.87, 0.12),
    "green": (0.15, 0.75, 0.20),
    "cyan": (0.10, 0.80, 0.85),
    "blue": (0.15, 0.35, 0.95),
    "purple": (0.58, 0.20, 0.88),
    "pink": (0.97, 0.30, 0.68),
}
SHAPES = ("ball", "square", "triangle", "star", "ring", "cross", "moon", "bar")
MOTIONS = {
    "left": "moves left",
    "right": "moves right",
    "up": "moves up",
    "down": "moves down",
    "grows": "grows",
    "shrinks": "shrinks",
    "spins": "spins",
    "stays": "stays still",
}


@dataclass(frozen=True, slots=True)
class Wish:
    """What a prompt asks for, in the words of the grammar; None where it does not say."""

    colour: str | None
    shape: str | None
    motion: str | None


def understand(prompt: str) -> Wish:
    """The main object of a prompt. Words after the first comma are about something else."""
    text = prompt.lower()
    main = re.split(r",| over ", text)[0]
    words = re.findall(r"[a-z]+", main)
    motion = next((name for name, phrase in MOTIONS.items() if phrase in text), None)
    return Wish(
        colour=next((w for w in words if w in COLOURS), None),
        shape=next((w for w in words if w in SHAPES), None),
        motion=motion,
    )
