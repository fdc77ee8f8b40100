"""LPIPS: the distance of two pictures in the features of a network that learned to see.

Zhang et al., "The Unreasonable Effectiveness of Deep Features as a Perceptual Metric", version 0.1.
Features of five layers, each scaled to length one at every place, subtracted, squared, weighted by
the learned heads and averaged over places; the sum over the layers is the distance.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

# The statistics of ImageNet, for values in -1..1.
_SHIFT = (-0.030, -0.088, -0.188)
_SCALE = (0.458, 0.448, 0.450)
# Places compared at once: the copies this takes would otherwise be the largest of all.
_PLACES = 1 << 16


@dataclass(frozen=True, slots=True)
class Convolution:
    """A convolution and its ReLU, `pool` before it; `tapped` if LPIPS looks at its output."""

    channels: int
    kernel: int
    stride: int = 1
    padding: int = 1
    pool: int = 0
    tapped: bool = False


@dataclass(frozen=True, slots=True)
class Net:
    """A backbone: its convolutions, the least side it takes, and its hunger for memory."""

    layers: tuple[Convolution, ...]
    smallest_side: int
    share: float  # of the pixels at once that other metrics take


def _vgg_block(channels: int, count: int, pool: int) -> tuple[Convolution, ...]:
    layers = [Convolution(channels, 3, pool=pool if i == 0 else 0) for i in range(count - 1)]
    return (*layers, Convolution(channels, 3, tapped=True))


NETS = {
    "alex": Net(
        (
            Convolution(64, 11, stride=4, padding=2, tapped=True),
            Convolution(192, 5, padding=2, pool=3, tapped=True),
            Convolution(384, 3, pool=3, tapped=True),
            Convolution(256, 3, tapped=True),
            Convolution(256, 3, tapped=True),
        ),
        smallest_side=31,
        share=1.0,
    ),
    "vgg": Net(
        (
            *_vgg_block(64, 2, pool=0),
            *_vgg_block(128, 2, pool=2),
            *_vgg_block(256, 3, pool=2),
            *_vgg_block(512, 3, pool=2),
            *_vgg_block(512, 3, pool=2),
        ),
        smallest_side=16,
        share=0.1,
    ),
}


@dataclass(frozen=True, slots=True, eq=False)
class Perceptual:
    """A network with its weights on a device. `network(a, b)` takes floats [f, H, W, 3] in 0..1."""

    net: Net
    tensors: dict[str, Tensor]

    @classmethod
    def load(
        cls, net: str, device: torch.device | str = "cpu", folder: Path | None = None
    ) -> Perceptual:
        """With the weights that are found, see `jali.evaluation.quality.weights`."""
        from jali.evaluation.quality.weights import find

        tensors = find(net, folder)
        return cls(NETS[net], {name: value.to(device) for name, value in tensors.items()})

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        # TF32 would show in the fourth digit.
        with torch.inference_mode(), torch.backends.cudnn.flags(allow_tf32=False):
            return self._distance(a, b)

    def _distance(self, a: Tensor, b: Tensor) -> Tensor:
        x = torch.cat([a, b]).movedim(3, 1) * 2 - 1
        shift = x.new_tensor(_SHIFT).view(3, 1, 1)
        x = (x - shift) / x.new_tensor(_SCALE).view(3, 1, 1)
        total = x.new_zeros(len(a))
        tap = 0
        for index, layer in enumerate(self.net.layers):
            if layer.pool:
                x = F.max_pool2d(x, layer.pool, stride=2)
            weight, bias = self.tensors[f"conv{index}.weight"], self.tensors[f"conv{index}.bias"]
            x = F.conv2d(x, weight, bias, layer.stride, layer.padding).relu_()
            if layer.tapped:
                head = self.tensors[f"head{tap}.weight"]
                total += _apart(x[: len(a)], x[len(a) :], head)
                tap += 1
        return total


def _apart(a: Tensor, b: Tensor, head: Tensor) -> Tensor:
    """Features [f, C, h, w] scaled to length one: weighted squared distance, mean over places."""
    total = a.new_zeros(len(a))
    rows = max(1, _PLACES // (len(a) * a.shape[3]))
    for x, y in zip(a.split(rows, dim=2), b.split(rows, dim=2), strict=True):
        apart = _direction(x).sub_(_direction(y)).square_()
        total += torch.einsum("fchw,c->f", apart, head)
    return total / (a.shape[2] * a.shape[3])


def _direction(features: Tensor) -> Tensor:
    return features / (features.norm(dim=1, keepdim=True) + 1e-10)
