"""Prompts that ship with the package: diverse enough to calibrate and to measure with."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from jali import files
from jali.error import ArgumentError, show

# Text encoders read a few hundred words; a file of more than this is something else.
LONGEST_PROMPT, LARGEST_FILE = 10_000, 16 * 2**20


def default_prompts(model: str) -> tuple[str, ...]:
    """The prompts a model gets when nobody names any: for images, for videos, or nano's own."""
    from jali.integration.models.registry import model_card

    card = model_card(model)
    name = "nano" if card.name == "nano" else "image" if card.image else "video"
    file = resources.files("jali.generation.prompts") / f"{name}.txt"
    return parse(file.read_text(encoding="utf-8"))


def read_prompts(path: str | Path) -> tuple[str, ...]:
    """One prompt a line; empty lines and lines that begin with # are left out."""
    path = Path(path).expanduser()
    if path.is_dir():
        raise ArgumentError("prompts", f": {path} is a folder, which cannot be read as a text file")
    try:
        found = parse(files.read_text(path, LARGEST_FILE))
    except FileNotFoundError:
        raise ArgumentError("prompts", f": there is no prompt file {path}") from None
    except files.UnreadableError as error:
        raise ArgumentError(
            "prompts", f": the prompts cannot be read as a text file: {error}"
        ) from None
    if not found:
        raise ArgumentError("prompts", f": {path} holds no prompts: one a line is expected")
    for prompt in found:
        check_prompt(prompt, f"a prompt of {path}")
    return found


def check_prompt(prompt: str, what: str = "a prompt") -> None:
    """A prompt is a text that can be written down; ValueError where it is not."""
    if not prompt.strip():
        raise ValueError(f"{what} is empty")
    if len(prompt) > LONGEST_PROMPT:
        raise ValueError(
            f"{what} has {len(prompt):,} letters, and the longest may have {LONGEST_PROMPT:,}: "
            f"{show(prompt)}"
        )
    # Bytes that are no UTF-8 arrive as half letters.
    if any("\ud800" <= c <= "\udfff" or (c < " " and c not in "\t\r\n") for c in prompt):
        raise ValueError(f"{what} must be text in UTF-8 without control signs, got {show(prompt)}")


def select_prompts(
    model: str,
    given: Sequence[str] | None = None,
    file: str | Path | None = None,
    count: int | None = None,
    shipped: int | None = None,
) -> tuple[str, ...]:
    """The first `count` of what was asked for: `given`, then those of the file.

    Without either, the first `count` of the model's shipped set, or else `shipped` of them. An
    empty prompt, and a count of more than there are, raise a ValueError.
    """
    texts = tuple(as_typed(text) for text in given or ())
    for text in texts:
        check_prompt(text, "--prompt")
    if file is not None:
        texts += read_prompts(file)
    if not texts:
        texts, count = default_prompts(model), shipped if count is None else count
    if count is not None and count > len(texts):
        raise ArgumentError("num_prompts", f"is {count}, but there are only {len(texts)} prompts")
    return texts[:count]


def as_typed(text: str) -> str:
    """An argument of a command in UTF-8, which a terminal set to ASCII gives as half letters."""
    try:
        return os.fsencode(text).decode()
    except UnicodeError:
        return text


def parse(text: str) -> tuple[str, ...]:
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))
