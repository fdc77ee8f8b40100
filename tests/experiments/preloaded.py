"""What every process of an experiment imports; those forked after it need not do it again."""

from __future__ import annotations

import av
import rank
import torch
from diffusers import WanPipeline

import jali.evaluation.quality.evaluation
import jali.evaluation.report
import jali.generation
import jali.maskbook.calibration

__all__ = ["WanPipeline", "av", "jali", "rank"]
torch.set_num_threads(1)
