"""The tensor-level demonstration: a made-up layer, and what every method makes of it."""

from jali.demo.compare import Comparison, Row, compare
from jali.demo.scene import KINDS, Scene, make_scene

__all__ = ["KINDS", "Comparison", "Row", "Scene", "compare", "make_scene"]
