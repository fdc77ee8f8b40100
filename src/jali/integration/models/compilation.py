"""Compiling the blocks of a pipeline's transformers."""

from __future__ import annotations

import os
import shutil
import sys
from typing import Any

from jali.error import ArgumentError

PARTS = ("transformer", "transformer_2")


def check_compile(
    compile: bool, offload: bool | str, device: str, tensor_parallel: int = 1
) -> None:
    """What can be told without torch. `device` is its kind."""
    if not isinstance(compile, bool):
        raise ArgumentError("compile", f"is True or False, got {compile!r}")
    if not compile:
        return
    if offload:
        raise ArgumentError(
            "compile",
            "needs the weights in one place, and `cpu_offload` moves them; leave one of both out",
        )
    if tensor_parallel > 1:
        raise ArgumentError(
            "compile",
            "is not for `tensor_parallel`: nobody tried compiled blocks with shared weights; "
            "leave one of the two out, or share the sequence with `context_parallel`",
        )
    compiler = _compiler(device)
    if shutil.which(compiler) is None:
        variable = "CC" if device == "cuda" else "CXX"
        raise ArgumentError(
            "compile",
            f"needs a compiler, and {compiler} is not found: install it, name another in the "
            f"environment variable {variable}, or leave `compile` out",
        )


def _compiler(device: str) -> str:
    """The one that PyTorch would call: Triton's launchers are C, kernels for a CPU are C++."""
    if device == "cuda":
        known = (os.environ.get("CC"), "gcc", "clang")
        return next((name for name in known if name and shutil.which(name)), known[0] or "gcc")
    usual = {"darwin": "clang++", "win32": "cl"}.get(sys.platform, "g++")
    return os.environ.get("CXX") or usual


def compile_blocks(pipe: Any, backend: str = "inductor") -> None:
    """Compile the repeated blocks of its transformers, each kind once for a size.

    What comes in other lengths (the text of another prompt, a smaller last group of clips) is
    compiled once more, for any length. Dense and sparse runs have one graph in common.
    """
    from jali.integration.processor import add_run_backend

    # Graphs look at how many attention backends there are; one that came later would end them.
    add_run_backend()
    for part in PARTS:
        module = getattr(pipe, part, None)
        if module is None:
            continue
        if getattr(module, "_repeated_blocks", None):
            module.compile_repeated_blocks(backend=backend)
        else:  # diffusers does not say which of its blocks are alike
            for block in module.transformer_blocks:
                block.compile(backend=backend)
