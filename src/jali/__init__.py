"""jali: training-free sparse attention for video and image diffusion transformers."""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from jali import moved
from jali.version import __version__ as __version__

if TYPE_CHECKING:
    from jali.attend import Attended as Attended
    from jali.attend import attend as attend
    from jali.functional import sparse_attention as sparse_attention
    from jali.integration.autoregressive import autoregressive_mode as autoregressive_mode
    from jali.integration.backend_name import register_backend as register_backend
    from jali.integration.config import SparseAttentionConfig as SparseAttentionConfig
    from jali.integration.families import register_family as register_family
    from jali.integration.models.pipeline import generate_video as generate_video
    from jali.integration.models.pipeline import load_pipeline as load_pipeline
    from jali.integration.modes import apply_sparse_attention as apply_sparse_attention
    from jali.integration.modes import make_step_callback as make_step_callback
    from jali.integration.modes import sparse_processor_mode as sparse_processor_mode
    from jali.maskbook import MaskBook as MaskBook
    from jali.maskbook.calibration import calibrate as calibrate
    from jali.maskbook.mode import cached_processor_mode as cached_processor_mode
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
    from jali.planning.budget import Budget as Budget
    from jali.planning.plan import BlockPlan as BlockPlan
    from jali.planning.site import Site as Site
    from jali.presets import Preset as Preset
    from jali.presets import load_preset as load_preset
    from jali.presets import presets as presets
    from jali.tokens.grid import Box as Box
    from jali.tokens.grid import Text as Text
    from jali.tokens.grid import TokenGrid as TokenGrid
    from jali.tokens.layout import BlockLayout as BlockLayout
    from jali.tokens.layout import Blocks as Blocks
    from jali.tokens.layout import block_layout as block_layout
    from jali.tokens.order import FrameWindows as FrameWindows
    from jali.tokens.order import Gilbert as Gilbert
    from jali.tokens.order import Raster as Raster
    from jali.tokens.order import Tiled as Tiled


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
    "BlockLayout": "jali.tokens.layout",
    "BlockPlan": "jali.planning.plan",
    "Blocks": "jali.tokens.layout",
    "Box": "jali.tokens.grid",
    "Budget": "jali.planning.budget",
    "Dense": "jali.methods",
    "Entropy": "jali.methods",
    "FrameWindows": "jali.tokens.order",
    "Gilbert": "jali.tokens.order",
    "Local": "jali.methods",
    "MaskBook": "jali.maskbook",
    "Method": "jali.methods",
    "Preset": "jali.presets",
    "Psa": "jali.methods",
    "Random": "jali.methods",
    "Raster": "jali.tokens.order",
    "RfV2": "jali.methods",
    "Schedule": "jali.methods",
    "Site": "jali.planning.site",
    "SparseAttentionConfig": "jali.integration.config",
    "Text": "jali.tokens.grid",
    "Tiled": "jali.tokens.order",
    "TokenGrid": "jali.tokens.grid",
    "apply_sparse_attention": "jali.integration.modes",
    "attend": "jali.attend",
    "autoregressive_mode": "jali.integration.autoregressive",
    "block_layout": "jali.tokens.layout",
    "cached_processor_mode": "jali.maskbook.mode",
    "calibrate": "jali.maskbook.calibration",
    "generate_video": "jali.integration.models.pipeline",
    "load_pipeline": "jali.integration.models.pipeline",
    "load_preset": "jali.presets",
    "make_method": "jali.methods",
    "make_step_callback": "jali.integration.modes",
    "presets": "jali.presets",
    "register_backend": "jali.integration.backend_name",
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
moved.install()
