"""The words of the second world. Those of the first keep their places in front."""

from __future__ import annotations

from jali.nano.grammar import MOTIONS, SHAPES
from training import scene as first

SIZES = first.SIZES
COLOUR_NAMES = first.COLOUR_NAMES
MOTION_PHRASES = tuple(MOTIONS.values())
TEXTURES = (*first.TEXTURES, "grainy", "marbled", "patchy")
FINE = ("", "finely")
SPEEDS = ("", "slowly", "quickly")
GROUNDS = (*first.GROUNDS, "leafy", "grainy", "wooden", "hilly")
GROUND_COLOURS = first.GROUND_COLOURS | {"sand": (0.74, 0.66, 0.53), "olive": (0.40, 0.43, 0.31)}
GROUND_NAMES = tuple(GROUND_COLOURS)
DIRECTIONS = ("left", "right", "up", "down")
# What the picture does around the main object. A drifting background leaves the things before it
# alone; a camera moves them too, the nearer the more. Both follow the main object.
VIEWS = (
    "",
    *(f"the background drifts {way}" for way in DIRECTIONS),
    *(f"the camera pans {way}" for way in DIRECTIONS),
    "the camera zooms in",
    "the camera zooms out",
)
LIGHTS = (*first.LIGHTS, "a shadow passes")

PLAIN, SHINY = TEXTURES.index("plain"), TEXTURES.index("shiny")
PATTERNS = tuple(TEXTURES.index(name) for name in ("striped", "dotted", "checkered"))
SPINS, STAYS = list(MOTIONS).index("spins"), list(MOTIONS).index("stays")

# Everything a sentence can say, and in which words.
KINDS = {
    "size": SIZES,
    "colour": COLOUR_NAMES,
    "fine": FINE,
    "texture": TEXTURES,
    "shape": SHAPES,
    "motion": MOTION_PHRASES,
    "speed": SPEEDS,
    "ground_colour": GROUND_NAMES,
    "ground": GROUNDS,
    "behind_colour": COLOUR_NAMES,
    "behind_shape": SHAPES,
    "front_colour": COLOUR_NAMES,
    "front_shape": SHAPES,
    "view": VIEWS,
    "light": LIGHTS,
}
