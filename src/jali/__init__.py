"""jali: training-free sparse attention for video and image diffusion transformers."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jali.version import __version__ as __version__

if TYPE_CHECKING:
    from jali.attend import Attended as Attended
    from jali.attend import attend as attend
    from jali.budget import Budget as Budget
    from jali.calibrate import calibrate as calibrate
    from jali.functional import sparse_attention as sparse_attention
    from jali.grid import Box as Box
    from jali.grid import Text as Text
    from jali.grid import TokenGrid as TokenGrid
    from jali.integration.autoregressive import autoregressive_mode as autoregressive_mode
    from jali.integration.cached import cached_processor_mode as cached_processor_mode
    from jali.integration.config import SparseAttentionConfig as SparseAttentionConfig
    from jali.integration.families import register_family as register_family
    from jali.integration.models import generate_video as generate_video
    from jali.integration.models import load_pipeline as load_pipeline
    from jali.integration.modes import apply_sparse_attention as apply_sparse_attention
    from jali.integration.modes import make_step_callback as make_step_callback
    from jali.integration.modes import sparse_processor_mode as sparse_processor_mode
    from jali.integration.named import register_backend as register_backend
    from jali.layout import BlockLayout as BlockLayout
    from jali.layout import Blocks as Blocks
    from jali.layout import block_layout as block_layout
    from jali.maskbook import MaskBook as MaskBook
    from jali.methods import AdaBsa as AdaBsa
    from jali.methods import Dense as Dense
    from jali.methods import Entropy as Entropy
    from jali.methods import Local as Local
    from jali.methods import Method as Method
    from jali.methods import Psa as Psa
    from jali.methods import Random as Random
    from jali.methods import RfV2 as RfV2
    from jali.methods import Schedule as Schedule
    from jali.methods import make_method as make_method
    from jali.order import FrameWindows as FrameWindows
    from jali.order import Gilbert as Gilbert
    from jali.order import Raster as Raster
    from jali.order import Tiled as Tiled
    from jali.plan import BlockPlan as BlockPlan
    from jali.presets import Preset as Preset
    from jali.presets import load_preset as load_preset
    from jali.presets import presets as presets
    from jali.site import Site as Site


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
    "MaskBook",
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

# Names are found when they are asked for: torch alone takes seconds, diffusers more, and a command
# line that only prints its help needs neither.
_LAZY = {
    "AdaBsa": "jali.methods",
    "Attended": "jali.attend",
    "BlockLayout": "jali.layout",
    "BlockPlan": "jali.plan",
    "Blocks": "jali.layout",
    "Box": "jali.grid",
    "Budget": "jali.budget",
    "Dense": "jali.methods",
    "Entropy": "jali.methods",
    "FrameWindows": "jali.order",
    "Gilbert": "jali.order",
    "Local": "jali.methods",
    "MaskBook": "jali.maskbook",
    "Method": "jali.methods",
    "Preset": "jali.presets",
    "Psa": "jali.methods",
    "Random": "jali.methods",
    "Raster": "jali.order",
    "RfV2": "jali.methods",
    "Schedule": "jali.methods",
    "Site": "jali.site",
    "SparseAttentionConfig": "jali.integration.config",
    "Text": "jali.grid",
    "Tiled": "jali.order",
    "TokenGrid": "jali.grid",
    "apply_sparse_attention": "jali.integration.modes",
    "attend": "jali.attend",
    "autoregressive_mode": "jali.integration.autoregressive",
    "block_layout": "jali.layout",
    "cached_processor_mode": "jali.integration.cached",
    "calibrate": "jali.calibrate",
    "generate_video": "jali.integration.models",
    "load_pipeline": "jali.integration.models",
    "load_preset": "jali.presets",
    "make_method": "jali.methods",
    "make_step_callback": "jali.integration.modes",
    "presets": "jali.presets",
    "register_backend": "jali.integration.named",
    "register_family": "jali.integration.families",
    "sparse_attention": "jali.functional",
    "sparse_processor_mode": "jali.integration.modes",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'jali' has no attribute {name!r}")
    return getattr(import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})


class _Package(ModuleType):
    """`attend` and `presets` are functions, each in a module of the same name: importing the
    module, which sets it as an attribute here, must not hide the function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _LAZY and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
