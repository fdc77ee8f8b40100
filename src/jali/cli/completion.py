"""What a shell proposes after an option; without torch, so that it comes at once."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from jali import name

Propose = Callable[[str], list[str]]


def models(incomplete: str) -> list[str]:
    from jali.integration.models.registry import MODELS

    return _of(MODELS, incomplete)


def presets(ctx: typer.Context, incomplete: str) -> list[str]:
    """Those of the model that was named before, or of all."""
    model = str(ctx.params.get("model") or "").lower()
    return _of(name.preset_names(model if model in name.model_names() else None), incomplete)


def methods(incomplete: str) -> list[str]:
    return _of((*name.method_names(), "cached"), incomplete)


def registered(incomplete: str) -> list[str]:
    """Methods without `cached`, which is none by itself."""
    return _of(name.method_names(), incomplete)


def contestants(incomplete: str) -> list[str]:
    """What an arena takes."""
    return _of(("all", *name.method_names()[1:]), incomplete)


def backends(incomplete: str) -> list[str]:
    return _of(name.backend_names(), incomplete)


def words(*known: str) -> Propose:
    """One of a few words."""
    return lambda incomplete: _of(known, incomplete)


def several(propose: Propose) -> Propose:
    """Names between commas: the last one is completed."""

    def last(incomplete: str) -> list[str]:
        before, comma, rest = incomplete.rpartition(",")
        return [f"{before}{comma}{found}" for found in propose(rest)]

    return last


def _of(known: Iterable[str], begun: str) -> list[str]:
    return [word for word in known if word.startswith(begun)]


SETTINGS: dict[str, Callable[..., list[str]]] = {
    "model": models,
    "method": methods,
    "preset": presets,
    "backend": backends,
    "device": words("cuda", "cpu"),
    "dtype": words("bf16", "fp16", "fp32"),
}
