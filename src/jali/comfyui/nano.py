"""nano as ComfyUI's own kinds of things: a MODEL, a CLIP, a VAE and empty latents.

ComfyUI's detection guesses other heads and text than nano has, so the configuration is said.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from jali.comfyui.weight import wan_weights
from jali.integration.models.registry import model_card

TEXT = 512  # tokens of every prompt, as Wan pads them
CHANNELS = 16
PIXELS, FRAMES = 4, 4  # behind a place of the latents


def load_nano() -> tuple[Any, Text, Decoder]:
    """MODEL, CLIP and VAE."""
    try:
        from jali.integration.models.pipeline import load_pipeline

        pipe = load_pipeline("nano", device="cpu", dtype="fp32")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"nano needs {error.name}, which ComfyUI's Python does not have: "
            f"pip install 'jali[diffusers]' there",
            name=error.name,
        ) from error
    return _model(pipe.transformer), Text(pipe), Decoder(pipe.vae)


def empty_latents(width: int, height: int, length: int) -> dict[str, Tensor]:
    """Where sampling begins."""
    frames = (length - 1) // FRAMES + 1
    return {"samples": torch.zeros(1, CHANNELS, frames, height // PIXELS, width // PIXELS)}


class Text:
    """What `CLIPTextEncode` asks of a CLIP."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def tokenize(self, text: str, **_: Any) -> str:
        return text

    @torch.no_grad()
    def encode_from_tokens_scheduled(self, tokens: str, **_: Any) -> list[Any]:
        found, _none = self._pipe.encode_prompt(
            tokens, do_classifier_free_guidance=False, max_sequence_length=TEXT, device="cpu"
        )
        return [[found, {}]]


class Decoder:
    """What `VAEDecode` asks of a VAE."""

    def __init__(self, vae: Any) -> None:
        self._vae = vae

    @torch.no_grad()
    def decode(self, latents: Tensor, **_: Any) -> Tensor:
        """[B, C, T, H, W] -> frames [B, T, H, W, 3] in 0..1."""
        config = self._vae.config
        mean, std = (
            torch.tensor(values).view(1, -1, 1, 1, 1)
            for values in (config.latents_mean, config.latents_std)
        )
        found = self._vae.decode(latents.to("cpu", torch.float32) * std + mean, return_dict=False)
        return ((found[0] + 1) / 2).clamp(0, 1).movedim(1, -1)


def _model(transformer: Any) -> Any:
    import comfy.latent_formats
    import comfy.model_management
    import comfy.model_patcher
    import comfy.supported_models

    class Latents(comfy.latent_formats.LatentFormat):  # type: ignore[misc]
        latent_channels = CHANNELS
        latent_dimensions = 3
        spacial_downscale_ratio = PIXELS
        temporal_downscale_ratio = FRAMES

    known = model_card("nano").shift
    shift = 1.0 if known is None else known.small

    class Nano(comfy.supported_models.WAN21_T2V):  # type: ignore[misc]
        sampling_settings = {"shift": shift}  # noqa: RUF012
        latent_format = Latents

    own = transformer.config
    config = Nano(
        {
            "image_model": "wan2.1",
            "model_type": "t2v",
            "patch_size": tuple(own.patch_size),
            "in_dim": own.in_channels,
            "out_dim": own.out_channels,
            "dim": own.num_attention_heads * own.attention_head_dim,
            "ffn_dim": own.ffn_dim,
            "freq_dim": own.freq_dim,
            "text_dim": own.text_dim,
            "num_heads": own.num_attention_heads,
            "num_layers": own.num_layers,
            "qk_norm": True,
            "cross_attn_norm": own.cross_attn_norm,
            "eps": own.eps,
        }
    )
    config.set_inference_dtype(torch.float32, None)
    weights = wan_weights(transformer.state_dict())
    model = config.get_model(weights, "")
    model.diffusion_model.load_state_dict(weights, strict=True)
    manage = comfy.model_management
    model.to(manage.unet_offload_device())
    return comfy.model_patcher.ModelPatcher(
        model,
        load_device=manage.get_torch_device(),
        offload_device=manage.unet_offload_device(),
    )
