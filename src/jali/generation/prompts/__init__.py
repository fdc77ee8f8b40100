"""Prompts that ship with the package: diverse enough to calibrate and to measure with."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path


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
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"there is no prompt file {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read as a text file: {error}") from None
    found = parse(text)
    if not found:
        raise ValueError(f"{path} holds no prompts: one a line is expected")
    return found


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
    texts = tuple(given or ())
    if any(not text.strip() for text in texts):
        raise ValueError("--prompt is empty")
    if file is not None:
        texts += read_prompts(file)
    if not texts:
        texts, count = default_prompts(model), shipped if count is None else count
    if count is not None and count > len(texts):
        raise ValueError(f"--num-prompts is {count}, but there are only {len(texts)} prompts")
    return texts[:count]


def parse(text: str) -> tuple[str, ...]:
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))
