"""Metrics as people meet them: title, which end is good, digits, and where values can lie."""

from __future__ import annotations

from dataclasses import dataclass

from jali.evaluation.quality.interval import ANY, POSITIVE, SHARE
from jali.evaluation.quality.metric import MS_SSIM_SIDE
from jali.evaluation.quality.perceptual import NETS
from jali.evaluation.quality.vmaf import SMALLEST_SIDE


@dataclass(frozen=True, slots=True)
class Measure:
    """One metric. `higher_is_better` is None where neither end is good."""

    title: str
    higher_is_better: bool | None
    digits: int
    smallest_side: int = 1
    bounds: tuple[float, float] = ANY

    @property
    def heading(self) -> str:
        """The title, with an arrow to the good end."""
        return self.title + {True: " ↑", False: " ↓", None: ""}[self.higher_is_better]


MEASURES = {
    "psnr": Measure("PSNR, dB", True, 2, bounds=POSITIVE),
    "ssim": Measure("SSIM", True, 4, 6, (-1.0, 1.0)),
    "ms_ssim": Measure("MS-SSIM", True, 4, MS_SSIM_SIDE, SHARE),
    "lpips": Measure("LPIPS (Alex)", False, 4, NETS["alex"].smallest_side, POSITIVE),
    "lpips_vgg": Measure("LPIPS (VGG)", False, 4, NETS["vgg"].smallest_side, POSITIVE),
    "vmaf": Measure("VMAF", True, 2, SMALLEST_SIDE, (0.0, 100.0)),
    "flicker": Measure("flicker", None, 5, bounds=SHARE),
    "flicker_ratio": Measure("flicker, ratio", None, 3, bounds=POSITIVE),
}


def describe(metric: str) -> Measure:
    """How a metric is written and where it can lie; of one that nobody knows, its name at least."""
    return MEASURES.get(metric) or Measure(metric.replace("_", " "), None, 3)
