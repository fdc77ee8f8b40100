"""The nodes as ComfyUI shows them. What they do is loaded when they run."""

from __future__ import annotations

from typing import Any

from jali.name import USUAL, method_names

ON_ERROR = ("error", "dense")
SPEND = ("total", "budget", "own")


class SparseAttention:
    """MODEL in, MODEL out: its self-attention is sparse wherever it is sampled."""

    CATEGORY = "model/patch"
    DESCRIPTION = (
        "Makes the self-attention of a video or image model sparse, without training. Put it "
        "between the loader (and LoRAs, and a node that chooses the dense attention) and the "
        "sampler."
    )
    RETURN_TYPES = ("MODEL",)
    FUNCTION = "patch"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        share = {"min": 0.0, "max": 1.0, "step": 0.01}
        return {
            "required": {
                "model": ("MODEL",),
                "method": (
                    list(method_names()),
                    {"default": USUAL, "tooltip": "How blocks of keys are chosen."},
                ),
                "spend": (
                    list(SPEND),
                    {"default": "total", "tooltip": "What `share` is of. total: of all attention "
                     "work of the run, most of it in the first steps. budget: of every sparse "
                     "call. own: nothing, the method's own threshold or pattern decides."},
                ),
                "share": (
                    "FLOAT", {**share, "default": 0.5, "tooltip": "How much is done; 1 is all."},
                ),
                "start_percent": (
                    "FLOAT",
                    {**share, "default": 0.0, "tooltip": "Steps before this share of the *steps* "
                     "stay dense (not of the noise). With `budget`, 0.2 is a good start."},
                ),
                "end_percent": (
                    "FLOAT",
                    {**share, "default": 1.0, "tooltip": "Steps after this share of the steps stay "
                     "dense."},
                ),
                "dense_blocks": (
                    "STRING",
                    {"default": "", "tooltip": "Blocks that stay dense, such as 0, 1, 47-49 or -1 "
                     "for the last one."},
                ),
                "min_tokens": (
                    "INT",
                    {"default": 4096, "min": 0, "max": 10_000_000, "tooltip": "Shorter sequences "
                     "stay dense."},
                ),
                "on_error": (
                    list(ON_ERROR),
                    {"default": "error", "tooltip": "What to do where the model, its tokens or the "
                     "recipe do not fit: stop with a sentence, or go on densely."},
                ),
                "verbose": (
                    "BOOLEAN",
                    {"default": False, "tooltip": "Say once per shape, in the console, why a call "
                     "stayed dense."},
                ),
            },
            "optional": {
                "options": (
                    "STRING",
                    {"default": "", "tooltip": "Options of the method, such as tau: 1.3 for sol; "
                     "several with commas."},
                ),
                "recipe": (
                    "STRING",
                    {"default": "", "tooltip": "A file that `jali tune` made. It says method, "
                     "spend, share, start, end, blocks and options: all those above are not read."},
                ),
            },
        }  # fmt: skip

    def patch(self, model: Any, on_error: str, **asked: Any) -> tuple[Any]:
        """The model with its patch, or as it was where that fails and the user said so."""
        from jali.comfyui.choice import patched

        return (patched(model, on_error, **asked),)


class Statistics:
    """What came of the latest sampling of a patched model, in one line."""

    CATEGORY = "model/patch"
    DESCRIPTION = "Shows what the latest sampling with a jali Sparse Attention model did."
    RETURN_TYPES = ("STRING",)
    RETURN_NAMES = ("line",)
    FUNCTION = "read"
    OUTPUT_NODE = True

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        return {
            "required": {
                "model": ("MODEL", {"tooltip": "What the jali Sparse Attention node gave."}),
                "samples": ("LATENT", {"tooltip": "What the sampler gave: it is waited for."}),
            }
        }

    @classmethod
    def IS_CHANGED(cls, **_: Any) -> float:
        return float("nan")  # it is of the latest sampling, not of its inputs

    def read(self, model: Any, samples: Any) -> dict[str, Any]:  # noqa: ARG002
        from jali.comfyui.choice import patch_of

        patch = patch_of(model)
        line = "no jali Sparse Attention in this model" if patch is None else patch.run.summary()
        return {"ui": {"text": [line]}, "result": (line,)}


class NanoModel:
    """nano, the small text-to-video model inside jali: to try a workflow without a download."""

    CATEGORY = "loaders"
    DESCRIPTION = (
        "nano, a text-to-video model of 9 million weights that comes with jali. It knows coloured "
        "shapes that move: a red ball moves left."
    )
    RETURN_TYPES = ("MODEL", "CLIP", "VAE", "LATENT")
    FUNCTION = "load"

    @classmethod
    def INPUT_TYPES(cls) -> dict[str, Any]:
        side = {"min": 16, "max": 1024, "step": 8}
        return {
            "required": {
                "width": ("INT", {**side, "default": 320}),
                "height": ("INT", {**side, "default": 192}),
                "length": (
                    "INT",
                    {"default": 37, "min": 1, "max": 257, "step": 4, "tooltip": "Frames: one more "
                     "than a multiple of four."},
                ),
            }
        }  # fmt: skip

    def load(self, width: int, height: int, length: int) -> tuple[Any, Any, Any, Any]:
        from jali.comfyui.nano import empty_latents, load_nano

        return (*load_nano(), empty_latents(width, height, length))
