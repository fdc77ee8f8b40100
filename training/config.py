"""nano's parts: stock classes of diffusers and transformers, only smaller."""

from __future__ import annotations

from typing import Any

# Pixels to latents: 4 frames and 4×4 pixels to one position of 16 channels.
AUTOENCODER: dict[str, Any] = {
    "base_dim": 24,
    "decoder_base_dim": 32,
    "z_dim": 16,
    "dim_mult": [1, 2, 2],
    "num_res_blocks": 2,
    "temperal_downsample": [True, True],
    "scale_factor_temporal": 4,
    "scale_factor_spatial": 4,
    "is_residual": True,
}
TRANSFORMER: dict[str, Any] = {
    "patch_size": [1, 2, 2],
    "num_attention_heads": 4,
    "attention_head_dim": 64,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 128,
    "freq_dim": 256,
    "ffn_dim": 896,
    "num_layers": 8,
}
# Bytes, not words: 256 of them and three special ones, rounded up.
TEXT_ENCODER: dict[str, Any] = {
    "vocab_size": 384,
    "d_model": 128,
    "d_kv": 32,
    "d_ff": 256,
    "num_layers": 2,
    "num_heads": 4,
    "dropout_rate": 0.0,
}
DEVIATION = 0.1  # of the autoencoder's posterior
SHIFT = 3.0  # of the noise levels in training, on the small grid
SAMPLING_SHIFT = 5.0  # of the scheduler, between those of the small and the large grid in training
TEXT_LENGTH = 512  # what WanPipeline pads prompts to


def autoencoder(**changes: Any) -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(**{**AUTOENCODER, **changes})


def transformer() -> Any:
    from diffusers import WanTransformer3DModel

    return WanTransformer3DModel(**TRANSFORMER)


def text_encoder() -> Any:
    from transformers import UMT5Config, UMT5EncoderModel

    return UMT5EncoderModel(UMT5Config(**TEXT_ENCODER))


def tokenizer() -> Any:
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


def pipeline(vae: Any, model: Any, encoder: Any) -> Any:
    """The parts as an ordinary WanPipeline."""
    from diffusers import FlowMatchEulerDiscreteScheduler, WanPipeline

    return WanPipeline(
        tokenizer=tokenizer(),
        text_encoder=encoder,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SAMPLING_SHIFT),
        transformer=model,
    )
