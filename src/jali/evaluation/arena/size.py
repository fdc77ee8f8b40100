"""How much an arena makes where nobody says; known without torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from jali.generation.settings import Settings

TOTALS, PROMPTS = (0.5, 0.4, 0.3), 4
# A first ranking: three clips are the fewest that have an interval.
QUICK_TOTALS, QUICK_PROMPTS, QUICK_STEPS = (0.4,), 3, 6
QUICK_NANO: Mapping[str, Any] = {"height": 128, "width": 128, "num_frames": 33}


def usual_size(settings: Settings, quick: bool) -> tuple[Settings, tuple[float, ...], int]:
    """The settings, totals and how many of the shipped prompts. A quick arena has fewer steps, and
    smaller clips of nano, where the settings do not say how many."""
    from jali.integration.models.registry import model_card

    if not quick:
        return settings, TOTALS, PROMPTS
    card = model_card(settings.model)
    usual: dict[str, Any] = {"steps": min(QUICK_STEPS, card.steps)}
    usual |= QUICK_NANO if card.name == "nano" else {}
    own = {name: value for name, value in usual.items() if getattr(settings, name) is None}
    return replace(settings, **own), QUICK_TOTALS, QUICK_PROMPTS
