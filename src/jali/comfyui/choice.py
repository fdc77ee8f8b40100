"""From what a node was asked to a patched model."""

from __future__ import annotations

import logging
import re
from typing import Any

from torch import nn

from jali.adapters import Run
from jali.comfyui.family import Family, family_of
from jali.comfyui.patch import KEY, Patch
from jali.comfyui.weight import check_recipe
from jali.error import shorten
from jali.integration.choice import with_total
from jali.integration.recipe import Recipe
from jali.methods import Dense, Method, Schedule
from jali.name import USUAL
from jali.presets.method import read_method
from jali.strict_yaml import parse_yaml
from jali.value import check_choice, check_share

log = logging.getLogger("jali")

# `WrappersMP` of ComfyUI, by value: importing it would need ComfyUI.
OUTER_SAMPLE, DIFFUSION_MODEL = "outer_sample", "diffusion_model"


def patched(model: Any, on_error: str, *, verbose: bool = False, **asked: Any) -> Any:
    """A clone of a MODEL that samples sparsely. What cannot be is refused in a sentence, or with
    `on_error` "dense" said, and the model is as it was."""
    check_choice("on_error", on_error, ("error", "dense"))
    try:
        transformer = model.get_model_object("diffusion_model")
        family = family_of(transformer)
        run = make_run(transformer, family, **asked)
    except (ValueError, TypeError, OSError) as error:
        if on_error != "dense":
            raise
        log.warning("jali: %s; the model stays dense", shorten(error))
        return model
    patch = Patch(run, family, on_error, verbose)
    found = model.clone()
    for kind, wrapper in (
        (OUTER_SAMPLE, patch.around_sampling),
        (DIFFUSION_MODEL, patch.around_model),
    ):
        found.remove_wrappers_with_key(kind, KEY)  # of two nodes in a row the later one counts
        found.add_wrapper_with_key(kind, KEY, wrapper)
    return found


def patch_of(model: Any) -> Patch | None:
    """What a patched MODEL carries."""
    found = model.get_wrappers(DIFFUSION_MODEL, KEY)
    return found[-1].__self__ if found else None


def make_run(
    transformer: nn.Module,
    family: Family,
    *,
    method: str = USUAL,
    spend: str = "total",
    share: float = 0.5,
    start_percent: float = 0.0,
    end_percent: float = 1.0,
    dense_blocks: str = "",
    min_tokens: int = 0,
    options: str = "",
    recipe: str = "",
) -> Run:
    """The run that a node's inputs stand for."""
    if recipe.strip():
        found = Recipe.read(recipe.strip())
        check_recipe(found, family, transformer)
        return Run(recipe=found, min_tokens=min_tokens)
    check_choice("spend", spend, ("total", "budget", "own"))
    for name, value in (("start_percent", start_percent), ("end_percent", end_percent)):
        check_share(name, value)
    if start_percent >= end_percent:
        raise ValueError(
            f"start_percent {start_percent:g} is not before end_percent {end_percent:g}: no step "
            f"would be sparse"
        )
    layers = len(family.attentions(transformer))
    chosen = read_method({"method": method, "options": read_options(options)}, method)
    if isinstance(chosen, Dense):
        return Run(chosen)
    if spend == "budget":
        chosen = chosen.with_budget(share)
    scheduled: Method = Schedule(
        chosen,
        dense_steps=float(start_percent),
        dense_last_steps=round(1.0 - end_percent, 9),
        dense_layers=read_blocks(dense_blocks, layers),
    )
    if spend == "total":
        scheduled = with_total(scheduled, share, None)
    return Run(scheduled, min_tokens=min_tokens)


def read_options(text: str) -> dict[str, Any]:
    """Options as they are typed: tau: 1.3, q_block: 128."""
    if not text.strip():
        return {}
    found = parse_yaml("{" + text.strip().removeprefix("{").removesuffix("}") + "}")
    if not isinstance(found, dict) or None in found.values():
        raise ValueError(f"options are names with values, such as tau: 1.3, got {text!r}")
    return found


def read_blocks(text: str, layers: int) -> tuple[int, ...]:
    """Numbers of blocks as people type them: 0, 1, 47-49, -1."""
    blocks: list[int] = []
    for part in filter(None, re.split(r"[,\s]+", text.strip())):
        found = re.fullmatch(r"(-?\d+)|(\d+)-(\d+)", part)
        if found is None:
            raise ValueError(
                f"dense_blocks are numbers such as 0, 1, 47-49 or -1, got {part!r} in {text!r}"
            )
        one, first, last = found.groups()
        blocks += [int(one)] if one else range(int(first), int(last) + 1)
    for block in blocks:
        if not -layers <= block < layers:
            raise ValueError(f"dense_blocks names block {block}, and this model has {layers}")
    return tuple(dict.fromkeys(blocks))
