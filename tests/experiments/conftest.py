"""Jobs are other processes; they must find what these tests give them."""

from __future__ import annotations

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest

os.environ["HF_HUB_OFFLINE"] = "1"
HERE = str(Path(__file__).parent)
paths = [HERE, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(filter(None, paths)))
if HERE not in sys.path:
    sys.path.insert(0, HERE)

from real_slurm import cluster, results, slurm  # noqa: E402


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,
    call: pytest.CallInfo[None],  # noqa: ARG001
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """What the jobs of a test that failed have said, beside what the test says."""
    report = yield
    results = getattr(item, "funcargs", {}).get("results")
    if report.failed and results is not None:
        said = [*results.logs.glob("*.log"), *results.root.rglob("*_log.out")]
        said += [*results.root.glob("*/state.json"), *results.root.glob("*/submissions.jsonl")]
        for path in sorted(said):
            report.sections.append((str(path), path.read_text(errors="replace")[-4000:]))
    return report


__all__ = ["cluster", "results", "slurm"]
