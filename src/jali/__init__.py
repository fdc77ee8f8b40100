"""jali: training-free sparse attention for video and image diffusion transformers."""

from jali.attend import Attended, attend
from jali.budget import Budget
from jali.functional import sparse_attention
from jali.grid import Box, Text, TokenGrid
from jali.layout import BlockLayout, Blocks, block_layout
from jali.methods import (
    AdaBsa,
    Dense,
    Entropy,
    Local,
    Method,
    Psa,
    Random,
    RfV2,
    Schedule,
    make_method,
)
from jali.order import FrameWindows, Gilbert, Raster, Tiled
from jali.plan import BlockPlan
from jali.site import Site

__version__ = "0.1.0"

__all__ = [
    "AdaBsa",
    "Attended",
    "BlockLayout",
    "BlockPlan",
    "Blocks",
    "Box",
    "Budget",
    "Dense",
    "Entropy",
    "FrameWindows",
    "Gilbert",
    "Local",
    "Method",
    "Psa",
    "Random",
    "Raster",
    "RfV2",
    "Schedule",
    "Site",
    "Text",
    "Tiled",
    "TokenGrid",
    "attend",
    "block_layout",
    "make_method",
    "sparse_attention",
]
