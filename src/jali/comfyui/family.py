"""What ComfyUI's models are: where their self-attentions lie, and what their tokens are.

Data only; names are those of ComfyUI's own classes and arguments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from jali.tokens.grid import Box, Segment, Text, TokenGrid


@dataclass(frozen=True)
class Family:
    """One transformer class of ComfyUI.

    `blocks` are its lists of blocks in the order in which they run, `attention` is the module in
    each that holds nothing but the self-attention; without one the block has no other attention.
    """

    name: str
    blocks: tuple[str, ...]
    attention: str | None = None
    text: str = "none"  # or "first", "last": where text lies in the sequence
    texts: tuple[str, ...] = ("context",)  # arguments that become text tokens, all of them
    references: str | None = None  # an argument with images whose tokens follow
    diffusers: tuple[str, ...] = ()  # the same model there, as recipes name it

    def attentions(self, model: nn.Module) -> list[nn.Module]:
        """Its self-attentions, or the blocks that hold one each, in order of execution."""
        found = [block for name in self.blocks for block in getattr(model, name)]
        return [getattr(block, self.attention) for block in found] if self.attention else found

    def grid(self, model: nn.Module, given: Mapping[str, Any], tokens: int) -> TokenGrid | str:
        """What so many tokens are in a call with these arguments, or a sentence why that is not
        known."""
        latents = given["x"]
        if not isinstance(latents, Tensor) or latents.dim() not in (4, 5):
            return f"the latents of this {type(model).__name__} are no video and no image"
        patch = _patch(model)
        segments: list[Segment] = [_box(latents, patch)]
        for image in (given.get(self.references) or ()) if self.references else ():
            segments.append(_box(image, patch))
        text = sum(_length(given.get(name)) for name in self.texts) if self.text != "none" else 0
        if text:
            at = 0 if self.text == "first" else len(segments)
            segments.insert(at, Text(text))
        grid = TokenGrid(tuple(segments))
        if grid.tokens != tokens:
            return (
                f"the attention of this {type(model).__name__} has {tokens} tokens, and its "
                f"latents are {grid}, which is {grid.tokens}: what the others are is not known"
            )
        return grid


FAMILIES = (
    Family("WanModel", ("blocks",), "self_attn", diffusers=("WanTransformer3DModel",)),
    Family(
        "LTXVModel", ("transformer_blocks",), "attn1", diffusers=("LTXVideoTransformer3DModel",),
    ),
    Family(
        "HunyuanVideo", ("double_blocks", "single_blocks"), text="last",
        texts=("context", "txt_byt5", "clip_fea"), diffusers=("HunyuanVideoTransformer3DModel",),
    ),
    Family(
        "Flux", ("double_blocks", "single_blocks"), text="first", references="ref_latents",
        diffusers=("FluxTransformer2DModel",),
    ),
    Family(
        "QwenImageTransformer2DModel", ("transformer_blocks",), text="first",
        references="ref_latents", diffusers=("QwenImageTransformer2DModel",),
    ),
)  # fmt: skip


def family_of(model: Any) -> Family:
    """The family of a diffusion model by the names of its classes; refuses what is not known."""
    names = [kind.__name__ for kind in type(model).__mro__]
    for family in FAMILIES:
        if family.name in names and all(hasattr(model, part) for part in family.blocks):
            return family
    raise ValueError(
        f"{names[0]} is no model that jali knows in ComfyUI; those are "
        f"{', '.join(family.name for family in FAMILIES)}"
    )


def _patch(model: Any) -> tuple[int, int, int]:
    """Frames, rows and columns of the latents behind a token."""
    size = getattr(model, "patch_size", None)
    if size is None:
        size = model.patchifier.patch_size
    sizes: Sequence[int] = (size, size) if isinstance(size, int) else tuple(size)
    deep, high, wide = (1, *sizes) if len(sizes) == 2 else sizes
    return deep, high, wide


def _box(latents: Tensor, patch: tuple[int, int, int]) -> Box:
    """The tokens of latents [B, C, (T,) H, W]; sides are padded up, as ComfyUI does."""
    frames = latents.shape[2] if latents.dim() == 5 else 1
    sides = (frames, *latents.shape[-2:])
    return Box(*(-(-side // step) for side, step in zip(sides, patch, strict=True)))


def _length(text: Any) -> int:
    return int(text.shape[1]) if isinstance(text, Tensor) else 0
