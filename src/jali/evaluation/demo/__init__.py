"""Two demonstrations: a clip generated dense and sparse by the model of this package, and a
made-up layer of attention with what every method makes of it."""

from jali.evaluation.demo.compare import Comparison, Row, compare
from jali.evaluation.demo.scene import KINDS, Scene, make_scene

__all__ = ["KINDS", "Comparison", "Row", "Scene", "compare", "make_scene"]
