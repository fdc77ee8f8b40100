"""Results that were damaged, or made to do harm: every command survives them, and says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import fake
import pytest

from hostile import attack
from jali.experiments.experiment import Experiment
from jali.experiments.job import run_experiment
from jali.experiments.lock import me
from jali.experiments.results import Results
from jali.experiments.submission import Submission, add_submission
from jali.files import write_json

FILES = (
    "a/config.json", "a/state.json", "a/speed.json", "a/quality.json", "a/stages/quality.json",
    "a/submissions.jsonl", "a/cancelled.json", "a/lock.json", "_sweeps/s/sweep.json",
)  # fmt: skip


@pytest.fixture
def done(results: Results) -> Results:
    run_experiment(
        Experiment(tag="a", model="nano", budget=0.5).completed(), results, fake.stages()
    )
    add_submission(results, "a", Submission("local", "1", me(), str(results.root)))
    add_submission(results, "a", Submission("local", "2", me(), str(results.root)))
    owner = {"user": "me", "host": "elsewhere", "pid": 1, "born": 1, "job": None}
    since = "2026-01-01T00:00:00+00:00"
    write_json(results.cancelled("a"), {"kind": "jali-cancelled", "version": 1, "owner": owner})
    lock = {"kind": "jali-lock", "version": 1, "what": "a", "since": since, "owner": owner}
    write_json(results.lock("a"), lock)
    write_json(
        results.sweep("s") / "sweep.json",
        {"kind": "jali-sweep", "version": 1, "name": "s", "tags": ["a"], "resources": {}},
    )
    return results


@pytest.mark.parametrize("file", FILES)
def test_no_result_breaks_a_command(
    jali: Any, done: Results, tmp_path: Path, file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if file in ("a/speed.json", "a/quality.json"):  # as if their digests had been forged too
        monkeypatch.setattr("jali.experiments.collect.why_not_whole", lambda *_: "")
    ends = ("--results", done.root, "--logs-dir", done.logs)
    out = tmp_path / "out"
    commands = [
        ("experiment", *words, *ends)
        for words in (
            ("status",), ("collect", "--output", out), ("status", "s", "--json"),
            ("collect", "--json"), ("logs", "a", "--scheduler"),
        )
    ]  # fmt: skip
    # A table of the others is written where one experiment is left out.
    attack(jali, done.root, file, commands, out, whole=False)
