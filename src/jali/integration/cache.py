"""Caches between steps (of diffusers, and cache-dit), as far as a run has to know of them."""

from __future__ import annotations

import re
from typing import Any

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
        # Casting and offloading keep no state, and skip nothing.
        names = [type(hook).__name__ for hook in _hooks(part) if hook._is_stateful]
        if names and name and not any(f"{own}.".startswith(f"{name}.") for own in seen):
            return f"a cache ({names[0]} on {name}) may skip parts of a call unseen"
    return None


def judged_layers(transformer: RunTransformer) -> int:
    """How many of the first self-attentions a cache compares between steps to decide what it skips.

    First-block cache takes one block, cache-dit its `Fn_compute_blocks`. Other caches go by steps,
    or by numbers that were measured before.
    """
    module = transformer.module()
    if module is None:
        return 0
    of_cache_dit = getattr(module, "_context_kwargs", None)
    if hasattr(module, "_context_manager") and isinstance(of_cache_dit, dict):
        config = of_cache_dit.get("cache_config")
        return int(getattr(config, "Fn_compute_blocks", None) or 0)
    for name, part in module.named_modules():
        if any(type(hook).__name__ == "FBCHeadBlockHook" for hook in _hooks(part)):
            layers = transformer.family.layers
            inside = (f"{name}.{own}" for own, _ in part.named_modules())
            return sum(bool(re.search(layers, own)) for own in inside)
    return 0


def warning_of_judged(layers: int) -> str:
    """What to know where a cache judges by self-attentions that are sparse."""
    which, how = "the first block", "keep it dense with dense_first_layer=True"
    if layers > 1:
        which = f"the first {layers} blocks"
        how = (
            f"keep them dense with Schedule(method, dense_layers=range({layers})), or let it "
            f"compare one (Fn_compute_blocks=1) and keep that dense with dense_first_layer=True"
        )
    return (
        f"a cache decides by how much {which} changed since the last step, and that is sparse "
        f"here: what the plan reads differently counts as change, so it skips less than its "
        f"threshold was chosen for (on nano a fifth less: docs/stacking.md); {how}"
    )


def _hooks(part: Any) -> list[Any]:
    """Those of diffusers."""
    registry = getattr(part, "_diffusers_hook", None)
    return [] if registry is None else list(registry.hooks.values())
