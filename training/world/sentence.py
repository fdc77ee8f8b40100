"""Sentences about a scene, and what a sentence says."""

from __future__ import annotations

import random
import re

from training.world.words import KINDS

PLACES = {"behind": "behind it", "front": "in front of it"}


def tell(scene: dict[str, int], chance: random.Random | None = None) -> str:
    """The sentence for one scene, given as indices into `KINDS` and -1 for an object that is not
    there. With chance some details are left out, as people do; never an object."""

    def say(kind: str, share: float = 1.0) -> list[str]:
        word = KINDS[kind][scene[kind]]
        silent = word in ("", "plain") or (chance is not None and chance.random() >= share)
        return [] if silent else [word]

    texture = say("texture", 0.85)
    thing = [*say("size", 0.7), *say("colour"), *(say("fine") if texture else []), *texture]
    text = " ".join([_a([*thing, *say("shape")]), *say("motion"), *say("speed", 0.85)])
    if chance is None or chance.random() < 0.85:
        text += f" over {_a([*say('ground_colour'), *say('ground'), 'background'])}"
    for which, place in PLACES.items():
        if scene[f"{which}_colour"] >= 0:
            text += f", {place} {_a([*say(f'{which}_colour'), *say(f'{which}_shape')])}"
    return ", ".join([text, *say("view", 0.85), *say("light", 0.85)])


def _a(words: list[str]) -> str:
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"


def read(sentence: str) -> dict[str, int]:
    """What a sentence says, as indices by kind: the inverse of `tell`."""
    head, *clauses = sentence.lower().rstrip(". ").split(", ")
    main, _, ground = head.partition(" over ")
    said = _words(main, ("size", "colour", "fine", "texture", "shape", "motion", "speed"))
    said |= _words(ground, ("ground_colour", "ground"))
    for clause in clauses:
        for which, place in PLACES.items():
            if clause.startswith(place):
                kinds = (f"{which}_colour", f"{which}_shape")
                said |= _words(clause.removeprefix(place), kinds)
        for kind in ("view", "light"):
            if clause in KINDS[kind]:
                said[kind] = KINDS[kind].index(clause)
    return said


def _words(text: str, kinds: tuple[str, ...]) -> dict[str, int]:
    return {
        kind: i
        for kind in kinds
        for i, word in enumerate(KINDS[kind])
        if word and re.search(rf"\b{word}\b", text)
    }


def asked_objects(sentence: str) -> int:
    """How many things a sentence speaks of."""
    return 1 + sum(f"{which}_shape" in read(sentence) for which in PLACES)
