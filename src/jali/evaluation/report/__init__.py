"""One page, self-contained, that shows what two or more runs made of the same prompts."""

from __future__ import annotations

from jali.evaluation.report.comparison import Comparison, read_comparison
from jali.evaluation.report.output import check_output, write_page
from jali.evaluation.report.page import compare_page, render_page

__all__ = [
    "Comparison",
    "check_output",
    "compare_page",
    "read_comparison",
    "render_page",
    "write_page",
]
