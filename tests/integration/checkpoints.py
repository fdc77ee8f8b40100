"""Checkpoint folders with the real layout, keys and configuration fields, only smaller."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers import (
    AutoencoderKLCogVideoX,
    AutoencoderKLHunyuanVideo,
    AutoencoderKLWan,
    CogVideoXDDIMScheduler,
    CogVideoXPipeline,
    CogVideoXTransformer3DModel,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideoPipeline,
    HunyuanVideoTransformer3DModel,
    UniPCMultistepScheduler,
    WanPipeline,
    WanTransformer3DModel,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    ByT5Tokenizer,
    CLIPTextConfig,
    CLIPTextModel,
    LlamaConfig,
    LlamaModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5EncoderModel,
    UMT5Config,
    UMT5EncoderModel,
)

T5 = {
    "vocab_size": 384,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 37,
    "num_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 8,
    "dropout_rate": 0.0,
}


def wan_transformer(**changes: Any) -> WanTransformer3DModel:
    config = {
        "patch_size": (1, 2, 2),
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "in_channels": 16,
        "out_channels": 16,
        "text_dim": 32,
        "freq_dim": 256,
        "ffn_dim": 32,
        "num_layers": 2,
        "cross_attn_norm": True,
        "qk_norm": "rms_norm_across_heads",
        "rope_max_seq_len": 128,
    }
    return WanTransformer3DModel(**(config | changes))


def unipc(shift: float = 3.0) -> UniPCMultistepScheduler:
    return UniPCMultistepScheduler(
        prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
    )


def _wan(**parts: Any) -> WanPipeline:
    torch.manual_seed(0)
    usual = {
        "transformer": wan_transformer(),
        "vae": AutoencoderKLWan(
            base_dim=3,
            z_dim=16,
            dim_mult=[1, 1, 1, 1],
            num_res_blocks=1,
            temperal_downsample=[False, True, True],
        ),
        "scheduler": unipc(),
        "text_encoder": UMT5EncoderModel(UMT5Config(**T5)).eval(),
        "tokenizer": ByT5Tokenizer(),
    }
    return WanPipeline(**(usual | parts))


def wan() -> WanPipeline:
    return _wan()


def wan_two_experts() -> WanPipeline:
    torch.manual_seed(1)
    return _wan(transformer_2=wan_transformer(), boundary_ratio=0.875)


def wan_ti2v() -> WanPipeline:
    torch.manual_seed(2)
    vae = AutoencoderKLWan(
        base_dim=3,
        decoder_base_dim=3,
        z_dim=48,
        dim_mult=[1, 1, 1, 1],
        num_res_blocks=1,
        temperal_downsample=[False, True, True],
        latents_mean=[0.0] * 48,
        latents_std=[1.0] * 48,
        in_channels=12,
        out_channels=12,
        is_residual=True,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )
    transformer = wan_transformer(in_channels=48, out_channels=48)
    return _wan(transformer=transformer, vae=vae, scheduler=unipc(5.0), expand_timesteps=True)


def nano() -> WanPipeline:
    """The model of this package as it is, but for its weights."""
    torch.manual_seed(5)
    text = UMT5Config(
        vocab_size=384,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,
    )
    return _wan(
        transformer=wan_transformer(
            num_attention_heads=4,
            attention_head_dim=64,
            ffn_dim=1024,
            num_layers=8,
            text_dim=128,
            rope_max_seq_len=64,
        ),
        vae=AutoencoderKLWan(
            base_dim=24,
            z_dim=16,
            dim_mult=[1, 2, 4],
            num_res_blocks=2,
            temperal_downsample=[True, True],
            latents_mean=[0.0] * 16,
            latents_std=[1.0] * 16,
            scale_factor_spatial=4,
            scale_factor_temporal=4,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
        text_encoder=UMT5EncoderModel(text).eval(),
    )


def _cogvideox(**changes: Any) -> CogVideoXPipeline:
    torch.manual_seed(3)
    config = {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 2,
        "text_embed_dim": 32,
        "num_layers": 2,
        "sample_width": 2,
        "sample_height": 2,
        "sample_frames": 9,
        "patch_size": 2,
        "temporal_compression_ratio": 4,
        "max_text_seq_length": 16,
        "use_rotary_positional_embeddings": True,
    }
    return CogVideoXPipeline(
        transformer=CogVideoXTransformer3DModel(**(config | changes)),
        vae=AutoencoderKLCogVideoX(
            in_channels=3,
            out_channels=3,
            down_block_types=("CogVideoXDownBlock3D",) * 4,
            up_block_types=("CogVideoXUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            latent_channels=4,
            layers_per_block=1,
            norm_num_groups=2,
            temporal_compression_ratio=4,
        ),
        scheduler=CogVideoXDDIMScheduler(
            prediction_type="v_prediction", rescale_betas_zero_snr=True, timestep_spacing="trailing"
        ),
        text_encoder=T5EncoderModel(T5Config(**T5)).eval(),
        tokenizer=ByT5Tokenizer(),
    )


def cogvideox() -> CogVideoXPipeline:
    return _cogvideox()


def cogvideox15() -> CogVideoXPipeline:
    return _cogvideox(patch_size_t=2, patch_bias=False, sample_width=16, sample_height=16)


def byte_tokenizer(length: int = 64) -> PreTrainedTokenizerFast:
    """Byte-level BPE without merges: needs no files."""
    special = ["<pad>", "<s>", "</s>"]
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        model_max_length=length,
    )


def hunyuan() -> HunyuanVideoPipeline:
    torch.manual_seed(4)
    llama = LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=37,
        num_hidden_layers=2,
        num_attention_heads=4,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    clip = CLIPTextConfig(
        vocab_size=300,
        hidden_size=8,
        intermediate_size=37,
        projection_dim=8,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=77,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return HunyuanVideoPipeline(
        transformer=HunyuanVideoTransformer3DModel(
            in_channels=4,
            out_channels=4,
            num_attention_heads=2,
            attention_head_dim=10,
            num_layers=1,
            num_single_layers=2,
            num_refiner_layers=1,
            patch_size=2,
            patch_size_t=1,
            guidance_embeds=True,
            text_embed_dim=16,
            pooled_projection_dim=8,
            rope_axes_dim=(2, 4, 4),
        ),
        vae=AutoencoderKLHunyuanVideo(
            in_channels=3,
            out_channels=3,
            latent_channels=4,
            down_block_types=("HunyuanVideoDownBlock3D",) * 4,
            up_block_types=("HunyuanVideoUpBlock3D",) * 4,
            block_out_channels=(8, 8, 8, 8),
            layers_per_block=1,
            act_fn="silu",
            norm_num_groups=4,
            scaling_factor=0.476986,
            spatial_compression_ratio=8,
            temporal_compression_ratio=4,
            mid_block_add_attention=True,
        ),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=7.0),
        text_encoder=LlamaModel(llama).eval(),
        text_encoder_2=CLIPTextModel(clip).eval(),
        tokenizer=byte_tokenizer(),
        tokenizer_2=byte_tokenizer(77),
    )


# By the registry's names.
BUILDERS: dict[str, Callable[[], Any]] = {
    "wan-t2v-1.3b": wan,
    "wan2.2-ti2v-5b": wan_ti2v,
    "wan2.2-t2v-a14b": wan_two_experts,
    "cogvideox-5b": cogvideox,
    "cogvideox1.5-5b": cogvideox15,
    "hunyuan-video": hunyuan,
    "nano": nano,
}


def save(name: str, folder: Path) -> Path:
    BUILDERS[name]().save_pretrained(folder, max_shard_size="14MB")
    return folder
