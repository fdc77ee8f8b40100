"""Whole diffusers pipelines, small and offline: real classes, random weights, no hub."""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import diffusers
import torch

# Up to 0.36 Qwen-Image wants the text lengths beside the mask, and padding at the end only.
OLD = tuple(map(int, diffusers.__version__.split(".")[:2])) <= (0, 36)

T5 = {
    "vocab_size": 384, "d_model": 32, "d_kv": 8, "d_ff": 37, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "dropout_rate": 0.0,
}  # fmt: skip


def byte_tokenizer(length: int = 512) -> Any:
    """A byte-level tokenizer without merges, for slots that want a fast tokenizer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<pad>", "<s>", "</s>"]
    vocabulary = {token: i for i, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>",
        model_max_length=length,
    )  # fmt: skip


def t5() -> Any:
    from transformers import T5Config, T5EncoderModel

    return T5EncoderModel(T5Config(**T5)).eval()


def wan_transformer(layers: int = 3, heads: int = 2, dim: int = 32, **extra: Any) -> Any:
    from diffusers import WanTransformer3DModel

    torch.manual_seed(0)
    return WanTransformer3DModel(
        **{
            "patch_size": (1, 2, 2), "num_attention_heads": heads, "attention_head_dim": dim,
            "in_channels": 16, "out_channels": 16, "text_dim": 32, "freq_dim": 32, "ffn_dim": 32,
            "num_layers": layers, "cross_attn_norm": True, "rope_max_seq_len": 64, **extra,
        }
    ).eval()  # fmt: skip


def wan_vae() -> Any:
    from diffusers import AutoencoderKLWan

    return AutoencoderKLWan(
        base_dim=3, z_dim=16, dim_mult=[1, 1, 1, 1], num_res_blocks=1,
        temperal_downsample=[False, True, True],
    ).eval()  # fmt: skip


def flow(shift: float = 7.0) -> Any:
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(shift=shift)


def wan(layers: int = 3, experts: int = 1, **extra: Any) -> Any:
    from diffusers import WanPipeline
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    more = {}
    if experts == 2:
        more = {"transformer_2": wan_transformer(layers), "boundary_ratio": 0.875}
    pipe = WanPipeline(
        tokenizer=ByT5Tokenizer(), text_encoder=t5(), vae=wan_vae(), scheduler=flow(),
        transformer=wan_transformer(layers, **extra), **more,
    )  # fmt: skip
    return quiet(pipe)


WAN_CALL = {
    "prompt": "a cat", "negative_prompt": "bad", "height": 256, "width": 256, "num_frames": 17,
    "max_sequence_length": 16, "guidance_scale": 5.0,
}  # fmt: skip


def wan_ti2v() -> Any:
    from diffusers import AutoencoderKLWan, WanImageToVideoPipeline
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    vae = AutoencoderKLWan(
        base_dim=3, z_dim=48, in_channels=12, out_channels=12, is_residual=True, patch_size=2,
        latents_mean=[0.0] * 48, latents_std=[1.0] * 48, dim_mult=[1, 1, 1, 1],
        num_res_blocks=1, scale_factor_spatial=16, scale_factor_temporal=4,
        temperal_downsample=[False, True, True],
    ).eval()  # fmt: skip
    pipe = WanImageToVideoPipeline(
        tokenizer=ByT5Tokenizer(), text_encoder=t5(), vae=vae, scheduler=flow(),
        transformer=wan_transformer(2, in_channels=48, out_channels=48), image_encoder=None,
        image_processor=None, transformer_2=None, expand_timesteps=True,
    )  # fmt: skip
    return quiet(pipe)


def wan_i2v() -> Any:
    """Wan 2.2 I2V: the image is in the latent channels, without a CLIP branch."""
    from diffusers import WanImageToVideoPipeline
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    pipe = WanImageToVideoPipeline(
        tokenizer=ByT5Tokenizer(), text_encoder=t5(), vae=wan_vae(), scheduler=flow(),
        transformer=wan_transformer(2, in_channels=36),
        transformer_2=wan_transformer(2, in_channels=36), image_encoder=None,
        image_processor=None, boundary_ratio=0.9,
    )  # fmt: skip
    return quiet(pipe)


def wan21_i2v() -> Any:
    """Wan 2.1 I2V: CLIP image tokens in the cross-attention."""
    from diffusers import WanImageToVideoPipeline
    from transformers import ByT5Tokenizer, CLIPImageProcessor, CLIPVisionConfig, CLIPVisionModel

    torch.manual_seed(0)
    vision = CLIPVisionConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        image_size=224, patch_size=14,
    )  # fmt: skip
    pipe = WanImageToVideoPipeline(
        tokenizer=ByT5Tokenizer(), text_encoder=t5(), vae=wan_vae(), scheduler=flow(),
        transformer=wan_transformer(2, in_channels=36, image_dim=16, added_kv_proj_dim=64),
        image_encoder=CLIPVisionModel(vision).eval(),
        image_processor=CLIPImageProcessor(crop_size=224, size=224),
    )  # fmt: skip
    return quiet(pipe)


def wan_vace() -> Any:
    from diffusers import WanVACEPipeline, WanVACETransformer3DModel
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    transformer = WanVACETransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=32, in_channels=16,
        out_channels=16, text_dim=32, freq_dim=32, ffn_dim=32, num_layers=3, cross_attn_norm=True,
        rope_max_seq_len=64, vace_layers=[0, 2], vace_in_channels=96,
    ).eval()  # fmt: skip
    pipe = WanVACEPipeline(
        tokenizer=ByT5Tokenizer(), text_encoder=t5(), vae=wan_vae(), scheduler=flow(),
        transformer=transformer, transformer_2=None,
    )  # fmt: skip
    return quiet(pipe)


def cogvideox(version: str = "1.0", layers: int = 3) -> Any:
    from diffusers import (
        AutoencoderKLCogVideoX,
        CogVideoXDDIMScheduler,
        CogVideoXPipeline,
        CogVideoXTransformer3DModel,
    )
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    more = {"patch_size_t": 2, "patch_bias": False} if version == "1.5" else {}
    transformer = CogVideoXTransformer3DModel(
        num_attention_heads=2, attention_head_dim=16, in_channels=4, out_channels=4,
        time_embed_dim=2, text_embed_dim=32, num_layers=layers, sample_width=32, sample_height=32,
        sample_frames=17, patch_size=2, temporal_compression_ratio=4, max_text_seq_length=16,
        use_rotary_positional_embeddings=True, **more,
    ).eval()  # fmt: skip
    vae = AutoencoderKLCogVideoX(
        in_channels=3, out_channels=3, down_block_types=("CogVideoXDownBlock3D",) * 4,
        up_block_types=("CogVideoXUpBlock3D",) * 4, block_out_channels=(8,) * 4,
        latent_channels=4, layers_per_block=1, norm_num_groups=2, temporal_compression_ratio=4,
    ).eval()  # fmt: skip
    pipe = CogVideoXPipeline(
        tokenizer=ByT5Tokenizer(),
        text_encoder=t5(),
        vae=vae,
        transformer=transformer,
        scheduler=CogVideoXDDIMScheduler(),
    )
    return quiet(pipe)


COG_CALL = {
    "prompt": "a cat", "negative_prompt": "bad", "height": 256, "width": 256, "num_frames": 17,
    "max_sequence_length": 16, "guidance_scale": 6.0,
}  # fmt: skip


def hunyuan(layers: int = 1, single: int = 2) -> Any:
    from diffusers import (
        AutoencoderKLHunyuanVideo,
        HunyuanVideoPipeline,
        HunyuanVideoTransformer3DModel,
    )
    from transformers import CLIPTextConfig, CLIPTextModel, LlamaConfig, LlamaModel

    torch.manual_seed(0)
    transformer = HunyuanVideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=2, attention_head_dim=16,
        num_layers=layers, num_single_layers=single, num_refiner_layers=1, patch_size=1,
        patch_size_t=1, guidance_embeds=True, text_embed_dim=16, pooled_projection_dim=8,
        rope_axes_dim=(4, 6, 6),
    ).eval()  # fmt: skip
    vae = AutoencoderKLHunyuanVideo(
        in_channels=3, out_channels=3, latent_channels=4,
        down_block_types=("HunyuanVideoDownBlock3D",) * 4,
        up_block_types=("HunyuanVideoUpBlock3D",) * 4, block_out_channels=(8,) * 4,
        layers_per_block=1, act_fn="silu", norm_num_groups=4, scaling_factor=0.476986,
        spatial_compression_ratio=8, temporal_compression_ratio=4, mid_block_add_attention=True,
    ).eval()  # fmt: skip
    llama = LlamaModel(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=512,
            pad_token_id=0,
        )
    ).eval()
    clip = CLIPTextModel(
        CLIPTextConfig(
            hidden_size=8,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=512,
            projection_dim=32,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()
    pipe = HunyuanVideoPipeline(
        transformer=transformer, vae=vae, scheduler=flow(), text_encoder=llama,
        text_encoder_2=clip, tokenizer=byte_tokenizer(), tokenizer_2=byte_tokenizer(77),
    )  # fmt: skip
    return quiet(pipe)


HUNYUAN_CALL = {
    "prompt": "a cat", "height": 128, "width": 128, "num_frames": 17, "max_sequence_length": 24,
    "prompt_template": {"template": "{}", "crop_start": 0}, "guidance_scale": 4.5,
}  # fmt: skip


def ltx(layers: int = 3, heads: int = 2) -> Any:
    from diffusers import AutoencoderKLLTXVideo, LTXPipeline, LTXVideoTransformer3DModel
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    transformer = LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, patch_size=1, patch_size_t=1, num_attention_heads=heads,
        attention_head_dim=32, cross_attention_dim=32 * heads, num_layers=layers,
        caption_channels=32,
    ).eval()  # fmt: skip
    vae = AutoencoderKLLTXVideo(
        in_channels=3, out_channels=3, latent_channels=8, block_out_channels=(8,) * 4,
        decoder_block_out_channels=(8,) * 4, layers_per_block=(1,) * 5,
        decoder_layers_per_block=(1,) * 5, spatio_temporal_scaling=(True, True, False, False),
        decoder_spatio_temporal_scaling=(True, True, False, False),
        decoder_inject_noise=(False,) * 5, upsample_residual=(False,) * 4, upsample_factor=(1,) * 4,
        timestep_conditioning=False, patch_size=1, patch_size_t=1, encoder_causal=True,
        decoder_causal=False,
    ).eval()  # fmt: skip
    vae.use_framewise_encoding = vae.use_framewise_decoding = False
    pipe = LTXPipeline(
        transformer=transformer, vae=vae, scheduler=flow(), text_encoder=t5(),
        tokenizer=ByT5Tokenizer(),
    )  # fmt: skip
    return quiet(pipe)


LTX_CALL = {
    "prompt": "a cat", "negative_prompt": "bad", "height": 64, "width": 64, "num_frames": 17,
    "max_sequence_length": 16, "guidance_scale": 3.0,
}  # fmt: skip


def clip_text(hidden: int = 32) -> Any:
    from transformers import CLIPTextConfig, CLIPTextModel

    return CLIPTextModel(
        CLIPTextConfig(
            hidden_size=hidden,
            intermediate_size=37,
            num_attention_heads=4,
            num_hidden_layers=2,
            vocab_size=512,
            projection_dim=32,
            bos_token_id=1,
            eos_token_id=2,
        )
    ).eval()


def flux(kontext: bool = False) -> Any:
    from diffusers import (
        AutoencoderKL,
        FluxKontextPipeline,
        FluxPipeline,
        FluxTransformer2DModel,
    )
    from transformers import ByT5Tokenizer

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=2, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=32, pooled_projection_dim=32,
        axes_dims_rope=(4, 4, 8), guidance_embeds=kontext,
    ).eval()  # fmt: skip
    vae = AutoencoderKL(
        sample_size=32, in_channels=3, out_channels=3, block_out_channels=(4,),
        layers_per_block=1, latent_channels=1, norm_num_groups=1, use_quant_conv=False,
        use_post_quant_conv=False, shift_factor=0.0609, scaling_factor=1.5035,
    ).eval()  # fmt: skip
    kind = FluxKontextPipeline if kontext else FluxPipeline
    pipe = kind(
        scheduler=flow(1.0), text_encoder=clip_text(), text_encoder_2=t5(),
        tokenizer=byte_tokenizer(77), tokenizer_2=ByT5Tokenizer(), transformer=transformer,
        vae=vae,
    )  # fmt: skip
    return quiet(pipe)


FLUX_CALL = {
    "prompt": "a cat", "height": 64, "width": 64, "max_sequence_length": 48, "guidance_scale": 3.5,
}  # fmt: skip


def qwen_transformer(layers: int = 3) -> Any:
    from diffusers import QwenImageTransformer2DModel

    torch.manual_seed(0)
    return QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=layers, attention_head_dim=16,
        num_attention_heads=2, joint_attention_dim=16, guidance_embeds=False,
        axes_dims_rope=(8, 4, 4),
    ).eval()  # fmt: skip


def quiet(pipe: Any) -> Any:
    pipe.set_progress_bar_config(disable=True)
    return pipe


def encode_once(pipe: Any) -> Any:
    """The same pipeline, whose VAE encodes an image or video once: it is the stock one whatever the
    attention, and most of the time of image to video."""
    encode, known = pipe.vae.encode, list[tuple[torch.Tensor, Any]]()

    def encode_new(x: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        for seen, latents in known:
            if torch.equal(seen, x):
                return latents
        known.append((x.clone(), encode(x, *args, **kwargs)))
        return known[-1][1]

    pipe.vae.encode = encode_new
    return pipe


def generate(pipe: Any, call: dict[str, Any], steps: int = 3, seed: int = 0, **more: Any) -> Any:
    """The latents of one generation."""
    out = pipe(
        **{
            **call,
            "num_inference_steps": steps,
            "output_type": "latent",
            "generator": torch.Generator().manual_seed(seed),
            **more,
        }
    )
    return out.frames if hasattr(out, "frames") else out.images


def qwen() -> Any:
    """Qwen-Image from prompt embeddings: its text encoder is left out."""
    from diffusers import AutoencoderKLQwenImage, QwenImagePipeline

    torch.manual_seed(0)
    vae = AutoencoderKLQwenImage(
        base_dim=24, z_dim=4, dim_mult=[1, 2, 4], num_res_blocks=1,
        temperal_downsample=[False, True], latents_mean=[0.0] * 4, latents_std=[1.0] * 4,
    ).eval()  # fmt: skip
    pipe = QwenImagePipeline(
        scheduler=flow(1.0), vae=vae, text_encoder=None, tokenizer=None,
        transformer=qwen_transformer(),
    )  # fmt: skip
    return quiet(pipe)


def qwen_call() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    scattered = torch.ones(1, 40, dtype=torch.bool)
    if not OLD:
        scattered[:, 30:35] = False
    return {
        "prompt_embeds": torch.randn(1, 40, 16, generator=g),
        "prompt_embeds_mask": scattered,
        "negative_prompt_embeds": torch.randn(1, 24, 16, generator=g),
        "negative_prompt_embeds_mask": torch.ones(1, 24, dtype=torch.bool),
        "height": 256, "width": 320, "true_cfg_scale": 4.0,
    }  # fmt: skip


def hunyuan15(layers: int = 2) -> Any:
    """HunyuanVideo 1.5 from prompt embeddings: its text encoders are left out."""
    from diffusers import (
        AutoencoderKLHunyuanVideo15,
        ClassifierFreeGuidance,
        HunyuanVideo15Pipeline,
        HunyuanVideo15Transformer3DModel,
    )

    torch.manual_seed(0)
    transformer = HunyuanVideo15Transformer3DModel(
        in_channels=65, out_channels=32, num_attention_heads=2, attention_head_dim=16,
        num_layers=layers, num_refiner_layers=1, text_embed_dim=16, text_embed_2_dim=8,
        image_embed_dim=8, rope_axes_dim=(4, 6, 6), target_size=640, task_type="t2v",
    ).eval()  # fmt: skip
    pipe = HunyuanVideo15Pipeline(
        text_encoder=None, tokenizer=None, transformer=transformer, scheduler=flow(),
        vae=AutoencoderKLHunyuanVideo15(block_out_channels=(32,) * 5, layers_per_block=1).eval(),
        text_encoder_2=None, tokenizer_2=None, guider=ClassifierFreeGuidance(guidance_scale=6.0),
    )  # fmt: skip
    return quiet(pipe)


def hunyuan15_call() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    call: dict[str, Any] = {"height": 256, "width": 256, "num_frames": 29}
    for prefix, n in (("", 20), ("negative_", 9)):
        real = torch.zeros(1, 40)
        real[:, :n] = 1
        call[f"{prefix}prompt_embeds"] = torch.randn(1, 40, 16, generator=g)
        call[f"{prefix}prompt_embeds_mask"] = real
        call[f"{prefix}prompt_embeds_2"] = torch.randn(1, 16, 8, generator=g)
        call[f"{prefix}prompt_embeds_mask_2"] = torch.ones(1, 16)
    return call


def ltx2_transformer(layers: int = 2, heads: int = 2) -> Any:
    from diffusers import LTX2VideoTransformer3DModel

    torch.manual_seed(0)
    return LTX2VideoTransformer3DModel(
        in_channels=4, out_channels=4, num_attention_heads=heads, attention_head_dim=16,
        cross_attention_dim=16 * heads, audio_in_channels=4, audio_out_channels=4,
        audio_num_attention_heads=heads, audio_attention_head_dim=8,
        audio_cross_attention_dim=8 * heads, num_layers=layers, caption_channels=16,
        rope_double_precision=False,
    ).eval()  # fmt: skip


def ltx2_inputs(t: float) -> dict[str, Any]:
    """A guided call of LTX-2, as its pipeline makes it: both branches in one batch."""
    g = torch.Generator().manual_seed(1)
    return {
        "hidden_states": torch.randn(2, 5 * 16 * 16, 4, generator=g),
        "audio_hidden_states": torch.randn(2, 8, 4, generator=g),
        "encoder_hidden_states": torch.randn(2, 12, 16, generator=g),
        "audio_encoder_hidden_states": torch.randn(2, 12, 16, generator=g),
        "encoder_attention_mask": torch.ones(2, 12),
        "audio_encoder_attention_mask": torch.ones(2, 12),
        "timestep": torch.full((2,), t), "num_frames": 5, "height": 16, "width": 16,
        "audio_num_frames": 8, "return_dict": False,
    }  # fmt: skip


def ltx2() -> Any:
    """LTX-2 from prompt embeddings: its text encoder is left out."""
    from diffusers import AutoencoderKLLTX2Audio, AutoencoderKLLTX2Video, LTX2Pipeline
    from diffusers.pipelines.ltx2 import LTX2TextConnectors, LTX2Vocoder

    torch.manual_seed(0)
    transformer = ltx2_transformer()
    connectors = LTX2TextConnectors(
        caption_channels=16, text_proj_in_factor=2, rope_double_precision=False,
        **{f"{kind}_connector_{name}": value for kind in ("video", "audio") for name, value in {
            "num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1,
            "num_learnable_registers": None,
        }.items()},
    ).eval()  # fmt: skip
    vae = AutoencoderKLLTX2Video(
        in_channels=3, out_channels=3, latent_channels=4, block_out_channels=(8,),
        decoder_block_out_channels=(8,), layers_per_block=(1, 1), decoder_layers_per_block=(1, 1),
        spatio_temporal_scaling=(True,), decoder_spatio_temporal_scaling=(True,),
        decoder_inject_noise=(False, False), downsample_type=("spatial",),
        upsample_residual=(False,), upsample_factor=(1,), timestep_conditioning=False,
        patch_size=1, patch_size_t=1, encoder_causal=True, decoder_causal=False,
    ).eval()  # fmt: skip
    audio = AutoencoderKLLTX2Audio(
        base_channels=4, output_channels=2, ch_mult=(1,), num_res_blocks=1, attn_resolutions=None,
        in_channels=2, resolution=32, latent_channels=2, mel_bins=8, mid_block_add_attention=False,
    ).eval()  # fmt: skip
    vocoder = LTX2Vocoder(
        in_channels=16, hidden_channels=32, out_channels=2, upsample_kernel_sizes=[4, 4],
        upsample_factors=[2, 2], resnet_kernel_sizes=[3], resnet_dilations=[[1, 3, 5]],
    ).eval()  # fmt: skip
    pipe = LTX2Pipeline(
        scheduler=flow(), vae=vae, audio_vae=audio, text_encoder=None, tokenizer=None,
        connectors=connectors, transformer=transformer, vocoder=vocoder,
    )  # fmt: skip
    return quiet(pipe)


def ltx2_call() -> dict[str, Any]:
    g = torch.Generator().manual_seed(1)
    call: dict[str, Any] = {
        "height": 32, "width": 32, "num_frames": 9, "guidance_scale": 3.0, "stg_scale": 0.0,
        "audio_stg_scale": 0.0, "modality_scale": 1.0, "audio_modality_scale": 1.0,
    }  # fmt: skip
    for prefix, n in (("", 7), ("negative_", 4)):
        real = torch.zeros(1, 10)
        real[:, -n:] = 1  # its text is padded in front
        call[f"{prefix}prompt_embeds"] = torch.randn(1, 10, 32, generator=g)
        call[f"{prefix}prompt_attention_mask"] = real
    return call
