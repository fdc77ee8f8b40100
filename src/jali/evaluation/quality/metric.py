"""Metrics of frames in memory, one value per frame, on the device the frames are on.

Frames are [F, H, W, 3]: uint8, or floats in 0..1. The data range is 1 throughout, and PSNR, SSIM
and MS-SSIM are defined as torchmetrics defines them by default (Gaussian window of 11 with sigma
1.5, reflected borders), which the tests compare with. They are written out here because its
two-dimensional convolutions, called a frame at a time, take six times as long on a processor for
SSIM (330 instead of 54 ms for a frame of 832×480, one thread) and four times for MS-SSIM (400
instead of 100 ms), for values within 2e-6 of these; and because convolutions on a GPU round to
TF32 unless told otherwise, which SSIM's small differences do not survive. PSNR takes the same time
there as its one line here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from jali.error import InputError
from jali.evaluation.quality.perceptual import NETS, Perceptual

# Five scales with a window of 11: torchmetrics refuses sides below this.
MS_SSIM_SIDE = 176
_SCALES = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
# The window reaches 5 pixels to each side, with a sigma of 1.5.
_EDGE = 5
_WEIGHTS = [math.exp(-((tap / 1.5) ** 2) / 2) for tap in range(-_EDGE, _EDGE + 1)]
_TAPS = [weight / sum(_WEIGHTS) for weight in _WEIGHTS]
_C1, _C2 = 0.01**2, 0.03**2
# Pixels handled at once, so that a long clip needs no more memory than a short one.
_PIXELS = {"cpu": 1 << 20, "cuda": 1 << 23}


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Peak signal-to-noise ratio in dB, [F]. Infinite where two frames are the same."""
    _check(a, b)
    return _by_frames(lambda a, b: -10 * (a - b).double().pow(2).mean((1, 2, 3)).log10(), a, b)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity, [F]: 1 where two frames are the same."""
    _check(a, b)
    _check_side("SSIM", a, _EDGE + 1)
    return _by_frames(lambda a, b: _structure(_planes(a), _planes(b))[0], a, b)


def ms_ssim(a: Tensor, b: Tensor) -> Tensor | None:
    """SSIM over five scales, [F]; None where a side is below 176 pixels, its minimum."""
    _check(a, b)
    if min(a.shape[1:3]) < MS_SSIM_SIDE:
        return None

    def of(a: Tensor, b: Tensor) -> Tensor:
        a, b = _planes(a), _planes(b)
        product = torch.ones(len(a), device=a.device)
        for scale, weight in enumerate(_SCALES, start=1):
            similarity, contrast = _structure(a, b)
            last = scale == len(_SCALES)
            product = product * (similarity if last else contrast).relu() ** weight
            a, b = F.avg_pool2d(a, 2), F.avg_pool2d(b, 2)
        return product

    return _by_frames(of, a, b)


def lpips(a: Tensor, b: Tensor, net: str = "alex", weights: Path | None = None) -> Tensor:
    """Learned perceptual distance (version 0.1, AlexNet or VGG16), [F]: 0 for the same frames.

    The weights are read at every call; for many calls make one `Perceptual` and call that.
    """
    if net not in NETS:
        raise InputError(f"net must be one of {', '.join(NETS)}, got {net!r}")
    return perceptual_distance(Perceptual.load(net, a.device, weights), a, b)


def perceptual_distance(network: Perceptual, a: Tensor, b: Tensor) -> Tensor:
    """LPIPS by a network that is loaded already, [F]."""
    _check(a, b)
    _check_side("LPIPS", a, network.net.smallest_side)
    return _by_frames(network, a, b, share=network.net.share)


def flicker(a: Tensor) -> Tensor:
    """How much each frame departs from the mean of its neighbours, [F]; NaN at both ends.

    It is the mean over values of |x[t-1] - 2 x[t] + x[t+1]| / 2. Light that grows evenly gives 0, a
    picture that jumps back and forth between two states gives their whole distance.
    """
    _check(a, a)
    found = torch.full((len(a),), math.nan, device=a.device)
    batch = _frames_at_once(a)
    for start in range(1, len(a) - 1, batch):
        stop = min(start + batch, len(a) - 1)
        x = _floats(a[start - 1 : stop + 1])
        found[start:stop] = (x[:-2] - 2 * x[1:-1] + x[2:]).abs().mean((1, 2, 3)) / 2
    return found


def _by_frames(
    of: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor, share: float = 1.0
) -> Tensor:
    """`of` on a few frames at a time; `share` makes them fewer where a frame costs more."""
    batch = _frames_at_once(a, share)
    with torch.inference_mode():
        parts = [
            of(_floats(a[start : start + batch]), _floats(b[start : start + batch])).float()
            for start in range(0, len(a), batch)
        ]
    return torch.cat(parts).clone()


def _frames_at_once(frames: Tensor, share: float = 1.0) -> int:
    pixels = _PIXELS.get(frames.device.type, _PIXELS["cuda"]) * share
    return max(1, int(pixels) // (frames.shape[1] * frames.shape[2]))


def _check(a: Tensor, b: Tensor) -> None:
    for frames in (a, b):
        if frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
            raise InputError(f"frames are [F, H, W, 3], got {list(frames.shape)}")
        if frames.dtype != torch.uint8 and not frames.is_floating_point():
            raise InputError(f"frames are uint8, or floats in 0..1, got {frames.dtype}")
    if a.shape != b.shape:
        raise InputError(f"two clips differ in shape: {list(a.shape)} and {list(b.shape)}")
    if a.device != b.device:
        raise InputError(f"two clips are on different devices: {a.device} and {b.device}")


def _check_side(what: str, frames: Tensor, least: int) -> None:
    if min(frames.shape[1:3]) < least:
        raise InputError(
            f"{what} needs sides of at least {least} pixels, "
            f"got {frames.shape[2]}×{frames.shape[1]}"
        )


def _floats(frames: Tensor) -> Tensor:
    return frames.float() / 255 if frames.dtype == torch.uint8 else frames.float()


def _planes(frames: Tensor) -> Tensor:
    return frames.movedim(3, 1).contiguous()


def _structure(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Mean similarity and mean contrast term of planes [f, 3, H, W]: two of [f].

    As in torchmetrics, the similarity is a mean over all pixels and the contrast term is one over
    those whose window lies inside the picture.
    """
    mean_a, mean_b = _blur(a), _blur(b)
    square_a, square_b, product = mean_a * mean_a, mean_b * mean_b, mean_a * mean_b
    variance = (_blur(a * a) - square_a).clamp_(min=0) + (_blur(b * b) - square_b).clamp_(min=0)
    contrast = (2 * (_blur(a * b) - product) + _C2) / (variance + _C2)
    similarity = (2 * product + _C1) / (square_a + square_b + _C1) * contrast
    inside = contrast[..., _EDGE:-_EDGE, _EDGE:-_EDGE]
    return similarity.mean((1, 2, 3)), inside.mean((1, 2, 3))


def _blur(planes: Tensor) -> Tensor:
    """The Gaussian window over planes [f, 3, H, W], one axis after the other, borders reflected."""
    for axis in (2, 3):
        size = planes.shape[axis]
        around = (0, 0, _EDGE, _EDGE) if axis == 2 else (_EDGE, _EDGE, 0, 0)
        padded = F.pad(planes, around, mode="reflect")
        planes = torch.zeros_like(planes)
        for tap, weight in enumerate(_TAPS):
            planes.add_(padded.narrow(axis, tap, size), alpha=weight)
    return planes
