"""Nodes for ComfyUI: `from jali.comfyui import *` in a file of its `custom_nodes` is all it takes.

Importing this loads neither ComfyUI nor torch.
"""

from jali.comfyui.node import NanoModel, SparseAttention, Statistics

NODE_CLASS_MAPPINGS = {
    "JaliSparseAttention": SparseAttention,
    "JaliStatistics": Statistics,
    "JaliNano": NanoModel,
}
NODE_DISPLAY_NAME_MAPPINGS = {
    "JaliSparseAttention": "jali Sparse Attention",
    "JaliStatistics": "jali Statistics",
    "JaliNano": "jali nano",
}

__all__ = ["NODE_CLASS_MAPPINGS", "NODE_DISPLAY_NAME_MAPPINGS"]
