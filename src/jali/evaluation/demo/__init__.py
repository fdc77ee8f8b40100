"""Two demonstrations: a clip generated dense and sparse by the model of this package, and a
made-up layer of attention with what every method makes of it."""

from jali.evaluation.demo.heads import HEAD_KINDS, MadeUpHeads, make_heads
from jali.evaluation.demo.tensors import MethodComparison, MethodResult, compare_methods

make_scene = make_heads  # the name that docs showed before

__all__ = [
    "HEAD_KINDS",
    "MadeUpHeads",
    "MethodComparison",
    "MethodResult",
    "compare_methods",
    "make_heads",
    "make_scene",
]
