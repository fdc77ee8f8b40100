"""Caches of diffusers, as far as they make calls of a transformer unlike each other."""

from __future__ import annotations

import re

from jali.integration.transformer import RunTransformer


def unseen_cache(transformer: RunTransformer) -> str | None:
    """Why calls cannot be compared, as a sentence: a cache may skip what a run does not see.

    A cache on the whole model, on blocks or on self-attentions is seen where it skips, for then
    self-attentions are missing. One on anything else (cross-attentions, projections) is not.
    """
    module = transformer.module()
    if module is None:
        return None
    modules = dict(module.named_modules())
    seen = [name for name in modules if re.search(transformer.family.layers, name)]
    for name, part in modules.items():
        registry = getattr(part, "_diffusers_hook", None)
        hooks = () if registry is None else registry.hooks.values()
        # Casting and offloading keep no state, and skip nothing.
        names = [type(hook).__name__ for hook in hooks if hook._is_stateful]
        if names and name and not any(f"{own}.".startswith(f"{name}.") for own in seen):
            return f"a cache ({names[0]} on {name}) may skip parts of a call unseen"
    return None
