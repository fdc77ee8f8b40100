"""Which method suits a model: what each makes of the q and k of a running pipeline."""

from __future__ import annotations

from jali.evaluation.inspection.capture import Capture, capture
from jali.evaluation.inspection.judge import JudgedCall, MethodScore, Reachable, judge, ranking
from jali.evaluation.inspection.verdict import Verdict, sentences, verdict, what_is_left

__all__ = [
    "Capture",
    "JudgedCall",
    "MethodScore",
    "Reachable",
    "Verdict",
    "capture",
    "judge",
    "ranking",
    "sentences",
    "verdict",
    "what_is_left",
]
