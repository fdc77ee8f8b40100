"""Run folders, a page of them, and Debian's Chromium to open it in."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import example

from jali.evaluation.report import compare_page, write_page

CHROMIUM = "/usr/bin/chromium"


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the runs dense, entropy and psa."""
    root = tmp_path_factory.mktemp("runs")
    example.make_three(root)
    return root


@pytest.fixture
def runs(root: Path, tmp_path: Path) -> Path:
    """A copy of the runs that a test may spoil."""
    return Path(shutil.copytree(root, tmp_path / "runs"))


@pytest.fixture(scope="session")
def page_file(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "compare.html"
    write_page(path, compare_page([root]))
    return path


@pytest.fixture(scope="session")
def browser() -> Iterator[Any]:
    """Chromium without a window. Where it must be there (in CI), its absence is a failure."""
    why_not = _why_no_browser()
    if why_not and os.environ.get("JALI_REQUIRE_CHROMIUM") == "1":
        pytest.fail(f"JALI_REQUIRE_CHROMIUM=1, but {why_not}")
    if why_not:
        pytest.skip(why_not)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        launched = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield launched
        launched.close()


def _why_no_browser() -> str:
    if not Path(CHROMIUM).exists():
        return f"there is no {CHROMIUM} (apt-get install chromium)"
    try:
        import playwright  # noqa: F401
    except ImportError:
        return "playwright is not installed (pip install playwright)"
    return ""
