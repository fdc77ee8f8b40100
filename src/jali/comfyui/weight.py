"""Weights under ComfyUI's names: whether a recipe is of a model, and nano's own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from jali.comfyui.family import Family
from jali.integration.fingerprint import is_readable, values_of
from jali.integration.recipe import OTHER_WEIGHTS, Recipe

# Of Wan, from diffusers' names to those of the authors, which ComfyUI keeps.
WAN = (
    (r"^condition_embedder\.text_embedder\.linear_1", "text_embedding.0"),
    (r"^condition_embedder\.text_embedder\.linear_2", "text_embedding.2"),
    (r"^condition_embedder\.time_embedder\.linear_1", "time_embedding.0"),
    (r"^condition_embedder\.time_embedder\.linear_2", "time_embedding.2"),
    (r"^condition_embedder\.time_proj", "time_projection.1"),
    (r"^proj_out", "head.head"),
    (r"^scale_shift_table", "head.modulation"),
    (r"\.scale_shift_table", ".modulation"),
    (r"\.attn1\.", ".self_attn."),
    (r"\.attn2\.", ".cross_attn."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".o."),
    (r"\.norm2\.", ".norm3."),
    (r"\.ffn\.net\.0\.proj\.", ".ffn.0."),
    (r"\.ffn\.net\.2\.", ".ffn.2."),
)
NAMES: Mapping[str, tuple[tuple[str, str], ...]] = {"WanModel": WAN}


def comfy_name(family: str, name: str) -> str | None:
    """A parameter's name in ComfyUI, from that in diffusers; None where it is not known."""
    if family not in NAMES:
        return None
    for pattern, other in NAMES[family]:
        name = re.sub(pattern, other, name)
    return name


def check_recipe(recipe: Recipe, family: Family, transformer: nn.Module) -> None:
    """Refuse a recipe of another model, in a sentence. ComfyUI has another configuration than
    diffusers, so the class and, where their names are known, a few weights have to do. Of a model
    with two experts either will be met here."""
    kinds = {found.kind for found in recipe.fingerprints.values()}
    if not kinds & set(family.diffusers):
        raise ValueError(
            f"the recipe is of {recipe.model}, a {', '.join(sorted(kinds))}, and this model is a "
            f"{type(transformer).__name__}"
        )
    parameters = dict(transformer.named_parameters())
    problems = []
    for known in recipe.fingerprints.values():
        names = {name: comfy_name(family.name, name) for name in known.weights}
        found = {
            name: values_of(parameters[own].detach())
            for name, own in names.items()
            if own in parameters and is_readable(parameters[own])
        }
        missing = [name for name, own in names.items() if own and own not in parameters]
        problem = known.other_weights(replace(known, weights=found), "recipe")
        problems.append(f"it has no {missing[0]}" if missing else problem)
    if all(problems):
        raise ValueError(
            f"the weights are not those of {recipe.model}, which the recipe was made with: "
            f"{problems[0]}. {OTHER_WEIGHTS}"
        )


def wan_weights(weights: Mapping[str, object]) -> dict[str, object]:
    """A state dict of diffusers' Wan under ComfyUI's names."""
    return {str(comfy_name("WanModel", name)): value for name, value in weights.items()}
