"""Whether clips show what their prompts ask for, aspect by aspect.

An aspect counts where the prompt names it; "plain" and "still" are never said. Speed and texture
are read from the thing of the named colour.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jali.nano.grammar import understand
from training.judge import Clip
from training.judge.view import asked_view
from training.world.film import unit
from training.world.sentence import asked_objects, read
from training.world.words import DIRECTIONS, KINDS

ASPECTS = ("colour", "shape", "motion")
# Those that only some prompts name.
DETAILS = ("speed", "texture", "ground", "view", "light")
# Whether nothing is there that was not asked for, and whether all of it is.
COUNTS = ("no_more", "no_less")


@dataclass(frozen=True, slots=True)
class Tally:
    """How often something was asked for, and how often it was there."""

    right: int
    asked: int

    @property
    def interval(self) -> tuple[float, float]:
        """Where the true share lies with 95 % certainty, after Wilson."""
        if not self.asked:
            return 0.0, 1.0
        z, n, p = 1.96, self.asked, self.right / self.asked
        middle = p + z * z / (2 * n)
        reach = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
        low, high = ((middle + sign * reach) / (1 + z * z / n) for sign in (-1, 1))
        return max(0.0, low), min(1.0, high)

    def facts(self) -> dict[str, Any]:
        interval = [round(x, 4) for x in self.interval]
        return {"right": self.right, "asked": self.asked, "interval": interval}


def asked_of(sentence: str) -> dict[str, Any]:
    """What a sentence asks for, None where it does not say."""
    wish, said = understand(sentence), read(sentence)
    named = {kind: KINDS[kind][said[kind]] if kind in said else None for kind in DETAILS}
    if named["view"]:
        named["view"] = asked_view(named["view"])
    if wish.motion not in DIRECTIONS:  # how fast something grows or spins is not read
        named["speed"] = None
    return {a: getattr(wish, a) for a in ASPECTS} | named | {"things": asked_objects(sentence)}


def seen_in(frames: Tensor, asked: dict[str, Any]) -> dict[str, Any]:
    """What a clip [F, H, W, 3] shows of it; details only where they were asked for."""
    clip = Clip(frames)
    colour = asked["colour"] or clip.verdict.colour
    readers: dict[str, Callable[[], str | None]] = {
        "speed": lambda: clip.speed(unit(len(frames)), colour),
        "texture": lambda: clip.texture(colour) if colour else None,
        "ground": lambda: clip.ground,
        "view": lambda: clip.view,
        "light": lambda: clip.light,
    }
    details = {a: readers[a]() if asked[a] is not None else None for a in DETAILS}
    return {a: getattr(clip.verdict, a) for a in ASPECTS} | details | {"things": clip.things}


def scores(sentences: Sequence[str], clips: Iterable[Tensor]) -> dict[str, Any]:
    """The share of clips that show what was asked for, tallies of all aspects, every verdict."""
    rows = []
    for sentence, clip in zip(sentences, clips, strict=True):
        asked = asked_of(sentence)
        seen = seen_in(clip, asked)
        told = [a for a in asked if a not in DETAILS or asked[a] is not None]
        rows.append(
            {"prompt": sentence}
            | {f"asked_{a}": asked[a] for a in told}
            | {f"seen_{a}": seen[a] for a in told}
        )
    found = tallies(rows)
    always = {a: found[a].right / len(rows) for a in (*ASPECTS, *COUNTS)}
    facts = {a: tally.facts() for a, tally in found.items()}
    return {"prompts": len(rows), **always, "tallies": facts, "rows": rows}


def tallies(rows: Sequence[dict[str, Any]]) -> dict[str, Tally]:
    """Of every aspect, from the verdicts."""
    found = {}
    for aspect in (*ASPECTS, *DETAILS):
        named = [r for r in rows if r.get(f"asked_{aspect}") is not None]
        right = sum(r[f"asked_{aspect}"] == r[f"seen_{aspect}"] for r in named)
        found[aspect] = Tally(right, len(named))
    more = sum(r["seen_things"] <= r["asked_things"] for r in rows)
    less = sum(r["seen_things"] >= r["asked_things"] for r in rows)
    return found | {"no_more": Tally(more, len(rows)), "no_less": Tally(less, len(rows))}


def wrong(row: dict[str, Any]) -> list[str]:
    """In words, what a verdict (one of the rows) finds otherwise than asked."""
    asked = [name.removeprefix("asked_") for name in row if name.startswith("asked_")]
    return [
        f"{a}: {row[f'seen_{a}'] or 'none'}, asked {row[f'asked_{a}'] or 'none'}"
        for a in asked
        if row[f"asked_{a}"] != row[f"seen_{a}"]
    ]
