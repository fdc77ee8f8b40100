"""AutoencoderKLWan on a whole clip at once.

The stock class encodes one frame, then four at a time, and carries what each convolution saw. The
convolutions are causal, so one pass over all frames gives the same numbers in far fewer
launches. Inference stays stock.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def encode_whole(vae: Any, clips: Tensor) -> Tensor:
    """[n, 3, 1 + 4k, h, w] -> mean and log-variance [n, 2z, 1 + k, h/4, w/4]."""
    encoder = vae.encoder
    x = encoder.conv_in(clips)
    for block in encoder.down_blocks:
        x = _down_block(block, x)
    x = encoder.mid_block(x)
    x = encoder.conv_out(encoder.nonlinearity(encoder.norm_out(x)))
    return vae.quant_conv(x)


def decode_whole(vae: Any, latents: Tensor) -> Tensor:
    """[n, z, 1 + k, h/4, w/4] -> clips [n, 3, 1 + 4k, h, w], not clamped."""
    decoder = vae.decoder
    x = decoder.mid_block(decoder.conv_in(vae.post_quant_conv(latents)))
    for block in decoder.up_blocks:
        x = _up_block(block, x)
    return decoder.conv_out(decoder.nonlinearity(decoder.norm_out(x)))


def _down_block(block: Any, x: Tensor) -> Tensor:
    past = x
    for resnet in block.resnets:
        x = resnet(x)
    if block.downsampler is not None:
        x = _down(block.downsampler, x)
    return x + _first_apart(block.avg_shortcut, block.avg_shortcut, past)


def _up_block(block: Any, x: Tensor) -> Tensor:
    past = x
    for resnet in block.resnets:
        x = resnet(x)
    if block.upsampler is None:
        return x
    shortcut = block.avg_shortcut
    return _up(block.upsampler, x) + _first_apart(
        lambda first: shortcut(first, first_chunk=True), shortcut, past
    )


def _first_apart(of_first: Any, of_rest: Any, x: Tensor) -> Tensor:
    """The first frame has no partners in time; the stock class gives it a chunk of its own."""
    if x.shape[2] == 1:
        return of_first(x)
    return torch.cat((of_first(x[:, :, :1]), of_rest(x[:, :, 1:])), 2)


def _down(layer: Any, x: Tensor) -> Tensor:
    x = _each_frame(layer.resample, x)
    if layer.mode == "downsample3d" and x.shape[2] > 1:
        # The first frame stands alone; every later output sees three frames, two apart.
        x = torch.cat((x[:, :, :1], layer.time_conv(x)), 2)
    return x


def _up(layer: Any, x: Tensor) -> Tensor:
    if layer.mode == "upsample3d" and x.shape[2] > 1:
        first, rest = x[:, :, :1], x[:, :, 1:]
        n, c, t, h, w = rest.shape
        twice = layer.time_conv(rest).view(n, 2, c, t, h, w)
        rest = torch.stack((twice[:, 0], twice[:, 1]), 3).reshape(n, c, 2 * t, h, w)
        x = torch.cat((first, rest), 2)
    return _each_frame(layer.resample, x)


def _each_frame(layer: Any, x: Tensor) -> Tensor:
    n, c, t, h, w = x.shape
    flat = layer(x.transpose(1, 2).reshape(n * t, c, h, w))
    return flat.view(n, t, *flat.shape[1:]).transpose(1, 2)
