"""jali's nodes for ComfyUI: this folder, copied into `custom_nodes`, is all there is to it."""

import sys

try:
    from jali.comfyui import *  # noqa: F403
except ModuleNotFoundError as error:
    if error.name not in ("jali", "jali.comfyui"):
        raise
    raise ImportError(
        f"jali is not installed in ComfyUI's Python: {sys.executable} -m pip install -U jali"
    ) from None
