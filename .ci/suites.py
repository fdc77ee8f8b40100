"""Lint, types and every test suite; prints the time of each and fails at the end if any failed.

    python .ci/suites.py [--workers 2] [--full] [--coverage] [SUITE ...]

Importing torch and diffusers takes longer than most suites. So they are imported once, and every
part of the tests runs in a fork of this process: as much on its own as in a process of its own,
without the wait. A part is a suite (a folder), or a file where a suite is long; the longest are
begun first, so that no worker is left idle at the end.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent
LINT = {
    "mypy": (str(BIN / "mypy"),),
    "ruff check": (str(BIN / "ruff"), "check"),
    "ruff format": (str(BIN / "ruff"), "format", "--check"),
}
# The longest suites, begun first; those whose files share nothing costly are cut into files.
LONG = ("nano", "report", "docs", "demo", "experiments", "integration", "quality", "kernels")
BY_FILE = ("nano", "experiments", "integration", "contract", "maskbook")
FRESH = ("kernels",)  # Triton's interpreter is chosen before triton is imported
COVERAGE = ROOT / "outputs/coverage/data"
ALONE = ("sweep",)  # takes both cores itself


@dataclass
class Part:
    """What one worker does at a time."""

    suite: str
    run: Callable[[], int]
    output: IO[bytes] = field(default_factory=tempfile.TemporaryFile)
    started: float = 0.0
    seconds: float = 0.0
    cpu: float = 0.0  # of its own children too
    status: int | None = None

    def start(self) -> int:
        """Fork; the child does the work and ends as any Python program does."""
        self.started = time.monotonic()
        sys.stdout.flush()
        child = os.fork()
        if child == 0:
            for descriptor in (1, 2):
                os.dup2(self.output.fileno(), descriptor)
            os.environ["COVERAGE_FILE"] = f"{COVERAGE}.{os.getpid()}"  # read with --cov alone
            sys.exit(self.run())
        return child

    def finish(self, status: int, cpu: float) -> None:
        self.status = os.waitstatus_to_exitcode(status)
        self.seconds, self.cpu = time.monotonic() - self.started, cpu

    @property
    def failed(self) -> bool:
        return self.status not in (0, 5)  # pytest's 5: the marks leave nothing to run


def command(*words: str) -> Callable[[], int]:
    return lambda: subprocess.call(words)


def tests(paths: list[str], options: list[str], fresh: bool) -> Callable[[], int]:
    words = ["-q", *options, *paths]
    if fresh:
        return command(sys.executable, "-m", "pytest", *words)

    def run() -> int:
        import pytest

        # anyio's plugin was imported with httpx, before pytest could look into it; so what.
        quiet = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
        return int(pytest.main(["-W", quiet, *words]))

    return run


def parts(wanted: list[str], options: list[str]) -> Iterator[Part]:
    """Every suite that is wanted, the long ones first."""
    files = sorted(ROOT.glob("tests/test_*.py")) + sorted(ROOT.glob("tests/*/test_*.py"))
    suites: dict[str, list[str]] = {}
    for file in (file.relative_to(ROOT) for file in files):
        suites.setdefault(str(file.parent), []).append(str(file))
    unknown = sorted(set(wanted) - set(suites))
    if unknown:
        raise SystemExit(f"no suite {', '.join(unknown)}; there are {', '.join(suites)}")
    if not wanted:
        for name, words in LINT.items():
            yield Part(name, command(*words))
    names = [f"tests/{name}" for name in LONG]
    for suite in sorted(suites, key=lambda s: names.index(s) if s in names else len(names)):
        if wanted and suite not in wanted:
            continue
        name = Path(suite).name
        for paths in [[file] for file in suites[suite]] if name in BY_FILE else [suites[suite]]:
            yield Part(suite, tests(paths, options, name in FRESH))


def preload() -> None:
    """What most parts import."""
    with contextlib.suppress(ImportError):
        import torch

        torch.set_num_threads(1)
        from diffusers import WanPipeline  # noqa: F401
        from transformers import UMT5EncoderModel  # noqa: F401


def show(part: Part) -> None:
    print(f"── {part.suite}", flush=True)
    part.output.seek(0)
    sys.stdout.buffer.write(part.output.read())
    sys.stdout.flush()
    if part.status is not None and part.status < 0:
        print(f"ended by {signal.Signals(-part.status).name}", flush=True)


def work(todo: list[Part], workers: int) -> None:
    """All parts, so many at a time; those that must be alone when the others are over."""
    together = deque(part for part in todo if Path(part.suite).name not in ALONE)
    for queue, limit in ((together, workers), (deque(p for p in todo if p not in together), 1)):
        running: dict[int, Part] = {}
        while queue or running:
            while queue and len(running) < limit:
                part = queue.popleft()
                running[part.start()] = part
            child, status, used = os.wait4(-1, 0)
            if child in running:
                part = running.pop(child)
                part.finish(status, used.ru_utime + used.ru_stime)
                show(part)


def table(done: list[Part]) -> Iterator[str]:
    yield f"{'suite':<28} {'time':>8} {'CPU':>8}  verdict"
    for suite in dict.fromkeys(part.suite for part in done):
        mine = [part for part in done if part.suite == suite]
        seconds, cpu = sum(p.seconds for p in mine), sum(p.cpu for p in mine)
        verdict = "FAILED" if any(p.failed for p in mine) else "passed"
        yield f"{suite:<28} {seconds:6.0f} s {cpu:6.0f} s  {verdict}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", metavar="SUITE", help="tests/cli, …; default: all")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="the slow cases too")
    parser.add_argument("--coverage", action="store_true", help="which lines of jali ran")
    given = parser.parse_args()
    os.chdir(ROOT)
    # One thread for each worker: two workers with two threads each fight over two cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    began = time.monotonic()
    marks = ["-m", "not gpu"] if given.full else ["-m", "not gpu and not slow"]
    options = [*marks, *["--full"] * given.full, *["--cov", "--cov-report="] * given.coverage]
    todo = list(parts(given.suites, options))
    preload()
    work(todo, max(1, given.workers))
    if given.coverage:
        for words in (("combine", "--quiet"), ("html", "--quiet"), ("report",)):
            subprocess.call((sys.executable, "-m", "coverage", *words))
    print("", *table(todo), sep="\n")
    print(f"total {time.monotonic() - began:.0f} s, {sum(p.cpu for p in todo):.0f} s of CPU")
    failed = sorted({part.suite for part in todo if part.failed})
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
