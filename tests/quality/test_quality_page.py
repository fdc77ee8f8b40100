"""The Python of docs/quality.md runs as it is printed, and its command line is the real one."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "quality.md"


def test_the_python_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), names)


def test_every_metric_is_explained() -> None:
    from jali.evaluation.quality.evaluation import METRICS

    text = PAGE.read_text()
    assert all(f"| `{name}` |" in text for name in METRICS)
