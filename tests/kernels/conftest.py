"""Without a CUDA device the kernels run in Triton's interpreter, which must be chosen first."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import triton.language as tl
from triton.runtime import interpreter

_patch_lang_tensor = interpreter._patch_lang_tensor
_create_dot = interpreter.InterpreterBuilder.create_dot


def _patch_with_item(tensor: Any, scope: Any) -> None:
    """Triton 3.6 takes int() of a one-element array for a loop bound, which NumPy 2.4 refuses."""
    _patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _dot_in_float(self: Any, a: Any, b: Any, *rest: Any) -> Any:
    """The interpreter holds bfloat16 as uint16 and multiplies those; give it float32 instead."""
    if a.dtype.scalar == tl.bfloat16:
        a, b = (self.cast_impl(x, tl.float32) for x in (a, b))
    return _create_dot(self, a, b, *rest)


interpreter._patch_lang_tensor = _patch_with_item
interpreter.InterpreterBuilder.create_dot = _dot_in_float


@pytest.fixture
def compiles() -> Callable[[str], None]:
    """Runs a script that compiles kernels for GPUs, where nothing is interpreted."""

    def run(script: str) -> None:
        environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment
        )
        assert done.stdout.strip() == "compiled", done.stderr[-2000:]

    return run
