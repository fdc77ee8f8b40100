"""jali: training-free sparse attention for video and image diffusion transformers."""

from typing import TYPE_CHECKING, Any

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
from jali.presets import Preset, load_preset, presets
from jali.site import Site

if TYPE_CHECKING:
    from jali.integration.autoregressive import autoregressive_mode as autoregressive_mode
    from jali.integration.config import SparseAttentionConfig as SparseAttentionConfig
    from jali.integration.families import register_family as register_family
    from jali.integration.models import generate_video as generate_video
    from jali.integration.models import load_pipeline as load_pipeline
    from jali.integration.modes import apply_sparse_attention as apply_sparse_attention
    from jali.integration.modes import make_step_callback as make_step_callback
    from jali.integration.modes import sparse_processor_mode as sparse_processor_mode
    from jali.integration.named import register_backend as register_backend

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
    "Preset",
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
    "load_preset",
    "make_method",
    "presets",
    "sparse_attention",
]

# What needs diffusers is found when it is asked for, so that `import jali` stays light.
_LAZY = {
    "SparseAttentionConfig": "jali.integration.config",
    "apply_sparse_attention": "jali.integration.modes",
    "autoregressive_mode": "jali.integration.autoregressive",
    "generate_video": "jali.integration.models",
    "load_pipeline": "jali.integration.models",
    "make_step_callback": "jali.integration.modes",
    "register_backend": "jali.integration.named",
    "register_family": "jali.integration.families",
    "sparse_processor_mode": "jali.integration.modes",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jali' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
