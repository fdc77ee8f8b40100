"""Prompts that ship with the package: diverse enough to calibrate and to measure with."""

from __future__ import annotations

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


def parse(text: str) -> tuple[str, ...]:
    lines = (line.strip() for line in text.splitlines())
    return tuple(line for line in lines if line and not line.startswith("#"))
