"""Nodes that only tests need; copied into the `custom_nodes` of a real ComfyUI."""

from __future__ import annotations

import json
from typing import Any

OVERRIDE = "optimized_attention_override"


class CountingOverride:
    """A model whose attention goes through an override that counts."""

    CATEGORY, FUNCTION, RETURN_TYPES = "tests", "patch", ("MODEL",)
    calls: dict[str, int] = {}  # noqa: RUF012

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "name": ("STRING", {})}}

    def patch(self, model: Any, name: str) -> tuple[Any]:
        found = model.clone()
        self.calls[name] = 0

        def override(func: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return func(*args, **kwargs)

        found.model_options["transformer_options"][OVERRIDE] = override
        return (found,)


class Readings:
    """Rows of the run of a model, and what the counting override counted."""

    CATEGORY, FUNCTION, RETURN_TYPES, OUTPUT_NODE = "tests", "read", (), True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",), "samples": ("LATENT",)}}

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")

    def read(self, model: Any, samples: Any) -> dict[str, Any]:  # noqa: ARG002
        from jali.comfyui.choice import patch_of

        patch = patch_of(model)
        stats = None if patch is None else patch.run.stats()
        found = {
            "counted": CountingOverride.calls,
            "cost": None if stats is None else stats.cost,
            "sparse_cost": None if stats is None else stats.sparse_cost,
            "dense": None if stats is None else stats.dense,
            "rows": [] if stats is None else [
                [row.step, row.layer, row.branch, row.tokens, row.cost] for row in stats.rows
            ],
            "tables": None if patch is None else patch.run.tables.bytes,
        }  # fmt: skip
        return {"ui": {"text": [json.dumps(found)]}}


class UnknownModel:
    """A MODEL whose transformer jali has never heard of."""

    CATEGORY, FUNCTION, RETURN_TYPES = "tests", "make", ("MODEL",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"model": ("MODEL",)}}

    def make(self, model: Any) -> tuple[Any]:
        found = model.clone()
        kind = type("MochiModel", (type(model.model.diffusion_model).__mro__[1],), {})
        found.add_object_patch("diffusion_model", kind())
        return (found,)


class MoreFrames:
    """A prompt that brings frames of its own, whose tokens the latents do not tell of."""

    CATEGORY, FUNCTION, RETURN_TYPES = "tests", "add", ("CONDITIONING",)

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {"required": {"prompt": ("CONDITIONING",), "samples": ("LATENT",)}}

    def add(self, prompt: Any, samples: Any) -> tuple[Any]:
        more = {"time_dim_concat": samples["samples"][:, :, :1]}
        return ([[text, {**own, **more}] for text, own in prompt],)


NODE_CLASS_MAPPINGS = {
    kind.__name__: kind for kind in (CountingOverride, Readings, UnknownModel, MoreFrames)
}
