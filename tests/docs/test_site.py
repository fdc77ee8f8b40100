"""The site: built strictly, whole without a network, with every public name in its reference."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from page import ROOT

import jali

CHROMIUM = "/usr/bin/chromium"
# What makes a browser load something; a link that is followed by a click is none.
LOADS = re.compile(
    r"""<(?:script|img|iframe|source|video|audio|embed)\b[^>]*\bsrc=["']?(?:https?:)?//"""
    r"""|<link\b(?![^>]*rel=["']?(?:canonical|next|prev))[^>]*href=["']?(?:https?:)?//"""
    r"""|url\(["']?(?:https?:)?//|@import\s+["'](?:https?:)?//""",
    re.IGNORECASE,
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical")
    folder = tmp_path_factory.mktemp("site")
    shutil.copy(ROOT / "mkdocs.yml", folder)
    shutil.copytree(ROOT / "docs", folder / "docs")
    (folder / "src").symlink_to(ROOT / "src")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "site"


def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = [*site.rglob("*.html"), *site.rglob("*.css")]
    assert len(pages) > 20
    for page in pages:
        found = LOADS.search(page.read_text(encoding="utf-8"))
        assert found is None, f"{page.relative_to(site)}: {found}"


def test_no_page_may_load_from_another_host(site: Path) -> None:
    """The theme's script would, of a CDN, if a page had a diagram; the browser refuses it."""
    for page in site.rglob("*.html"):
        found = re.findall(r'Content-Security-Policy" content="([^"]*)"', page.read_text("utf-8"))
        assert found == ["default-src 'self' file: data: blob: 'unsafe-inline'"], page


@pytest.mark.parametrize(
    "text",
    ['<script src="https://a.b/c.js">', "<link href=//a.b/c.css rel=stylesheet>", "url(http://a)"],
)
def test_a_load_would_be_seen(text: str) -> None:
    assert LOADS.search(text)
    assert not LOADS.search('<a href="https://a.b">')


def test_the_reference_has_every_public_name(site: Path) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (site / "api").glob("*.html"))
    headings = set(re.findall(r'<h2 id="[\w.]*?(\w+)" class="doc doc-heading"', text))
    assert set(jali.__all__) <= headings
    assert "<blockquote" not in text  # an example that is not shown as code


def test_search_works_from_a_folder(site: Path) -> None:
    sync_api = pytest.importorskip("playwright.sync_api")
    if not Path(CHROMIUM).exists():
        if os.environ.get("JALI_REQUIRE_CHROMIUM") == "1":
            pytest.fail(f"JALI_REQUIRE_CHROMIUM is set, and there is no {CHROMIUM}")
        pytest.skip(f"needs {CHROMIUM}")
    asked: list[str] = []
    said: list[str] = []
    with sync_api.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_page()
        page.on("request", lambda request: asked.append(request.url))
        page.goto((site / "index.html").as_uri())
        page.keyboard.press("Control+k")
        page.keyboard.type("sparse_processor_mode", delay=10)
        page.get_by_text(re.compile(r"^\d+ results?$")).wait_for(timeout=60_000)
        page.on("console", lambda told: said.append(told.text))
        load = "fetch('https://example.org/').then(() => 'loaded', () => 'refused')"
        assert page.evaluate(load) == "refused"
        browser.close()
    assert any("Content Security Policy" in text for text in said), said
    assert asked
    assert all(url.startswith(("file:", "data:", "blob:")) for url in asked), asked
