"""How near clips are to those of the dense run, in memory, where they lie."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from jali.error import InputError
from jali.evaluation.quality.metric import perceptual_distance, psnr, ssim
from jali.evaluation.quality.perceptual import NETS, Perceptual

METRICS = ("psnr", "ssim", "lpips")
MOST = 100.0  # dB, of frames that are the same: a mean cannot be infinite
_DIGITS = 5


@dataclass(frozen=True)
class Scorer:
    """The metrics that can be had, and why the others cannot."""

    network: Perceptual | None = None
    unavailable: dict[str, str] = field(default_factory=dict)

    @classmethod
    def load(cls, device: torch.device | str, height: int, width: int) -> Scorer:
        side = min(height, width)
        try:
            if side < NETS["alex"].smallest_side:
                raise InputError(f"it needs sides of at least {NETS['alex'].smallest_side} pixels")
            return cls(Perceptual.load("alex", device))
        except InputError as error:
            return cls(None, {"lpips": str(error)})

    def compare(self, clips: Tensor, dense: Tensor) -> dict[str, list[float]]:
        """Every metric of every clip, mean over its frames. uint8 [n, F, H, W, 3]."""
        a, b = clips.flatten(0, 1), dense.flatten(0, 1)
        found = {"psnr": psnr(a, b).clamp(max=MOST), "ssim": ssim(a, b)}
        if self.network is not None:
            found["lpips"] = perceptual_distance(self.network, a, b)
        return {
            name: [round(x, _DIGITS) for x in values.view(len(clips), -1).mean(1).tolist()]
            for name, values in found.items()
        }
