"""A command line in PSA's words: which preset it means, and what here is not as there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from jali.name import USUAL

if TYPE_CHECKING:
    from jali.presets import Preset

FLAG = "--use_psa"
# With one of these the attention is chosen, and is not PSA's to choose.
CHOSEN = ("--method", "--preset", "--config", "--option", "--masks")
# What differs in the attention itself, whatever the model.
LEVELS = (
    "levels are exact, there rounded to kernel tiles (as by aligned: true in a preset file)",
    "text and a block's own keys are always read",
)


def as_psa(typed: Sequence[str], words: list[str], usual_model: str) -> list[str]:
    """The translated `words` of a command with the preset that PSA would run, if PSA's flag or one
    of PSA's names of a model was `typed`; what that means, and what differs, is said on stderr."""
    model = _value(words, "--model") or usual_model
    asked = FLAG in typed
    if not asked and "_" not in model:  # PSA's names have one, the registry's none
        return words
    from jali.integration.models.psa import PSA_MODELS

    if asked:
        words = _with_preset(words, model)
    elif model.lower() in PSA_MODELS and not any(_has(words, flag) for flag in CHOSEN):
        _say(f"without {FLAG} PSA is dense; here the method is {USUAL} (--method dense)")
    elif "--attention_preset" in {word.partition("=")[0] for word in typed}:
        _say(f"without {FLAG} PSA is dense whatever its preset; here the preset runs")
    for sentence in _differences(words, model):
        _say(sentence)
    return words


def _with_preset(words: list[str], model: str) -> list[str]:
    """The preset that PSA takes by itself, or the one that is named (a dense one is dense in PSA
    too), in the place of `--method psa`."""
    from jali.presets import load_preset

    if _has(words, "--option") or _has(words, "--masks"):
        return words
    name, config = _value(words, "--preset"), _value(words, "--config")
    try:
        preset = load_preset(name, model, config)
        if name is None and config is None and preset.method.base.name != "psa":
            preset = load_preset("psa_balanced", model)  # the model's own default is another method
    except (ValueError, OSError):
        return words  # whoever reads the words says what is wrong with them
    if preset.method.base.name not in ("psa", "dense"):
        return words  # which are refused: two methods at once
    _say(f"{FLAG}: {_describe(preset)}")
    at = words.index("--method")  # the preset names it
    words = [*words[:at], *words[at + 2 :]]
    return words if name is not None or config is not None else [*words, "--preset", preset.name]


def _describe(preset: Preset) -> str:
    from jali.methods import Dense, Schedule

    text = f"preset {preset.name}"
    if isinstance(preset.method, Dense):
        return f"{text}, which is dense"
    first = preset.method.dense_steps if isinstance(preset.method, Schedule) else 0
    share = f"{first:.0%} of the" if isinstance(first, float) else f"{first}"
    return f"{text}, the first {share} steps dense" if first else f"{text}, no step dense"


def _differences(words: Sequence[str], model: str) -> Iterator[str]:
    from jali.integration.models.psa import PSA_MODELS
    from jali.integration.models.registry import MODELS, model_card

    psa = PSA_MODELS.get(model.lower())
    if psa is None:
        psa = next((found for found in PSA_MODELS.values() if found.model == model.lower()), None)
        if psa is None:
            if model in MODELS:
                yield f"{model} is no model of PSA's: the preset is jali's own"
            return
        card = model_card(psa.names[0])
        size = f"{card.height}×{card.width}×{card.frames} (height, width, frames)"
        if psa.defaults:
            yield f"PSA's size for {model} is {size}: --model {psa.names[0]} has it"
    else:
        card = model_card(model)
        yield (
            f"{model} is {card.name} with PSA's defaults: {card.height}×{card.width} pixels "
            f"(height × width), {card.frames} frames, {card.steps} steps, guidance "
            f"{card.guidance.scale}"
        )
    told = [sentence for flag, sentence in psa.options.items() if not _has(words, flag)]
    levels = LEVELS if _has(words, "--preset") else ()
    yield f"not as in PSA: {'; '.join((*told, *psa.differences, *levels))}"


def _has(words: Sequence[str], flag: str) -> bool:
    return any(word.partition("=")[0] == flag for word in words)


def _value(words: Sequence[str], flag: str) -> str | None:
    """The last value of an option, which is the one that counts."""
    found = None
    for at, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name == flag:
            found = value if equals else (words[at + 1] if at + 1 < len(words) else None)
    return found


def _say(sentence: str) -> None:
    typer.echo(f"jali: {sentence}", err=True)
