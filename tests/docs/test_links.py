"""Links lead somewhere, pages are in the navigation, and DESIGN's direction is the tests' own."""

from __future__ import annotations

import itertools
import re
import sys
from pathlib import Path

import pytest
import yaml
from page import PAGES, ROOT

TEXTS = {**PAGES, "DESIGN.md": ROOT / "DESIGN.md", "CHANGELOG.md": ROOT / "CHANGELOG.md"}


def anchors(page: Path) -> set[str]:
    """The ids that headings get: words joined by dashes."""
    heads = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", head).strip().lower() for head in heads)
    return {re.sub(r"[\s-]+", "-", head) for head in plain}


@pytest.mark.parametrize("page", TEXTS)
def test_links_lead_somewhere(page: str) -> None:
    path = TEXTS[page]
    for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text(encoding="utf-8")):
        if target.startswith("http"):
            continue
        file, _, place = target.partition("#")
        there = (path.parent / file).resolve() if file else path
        assert there.exists(), target
        if place:
            assert place in anchors(there), target


def test_every_page_is_in_the_navigation() -> None:
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    nav = str(yaml.safe_load(text)["nav"])
    for page in PAGES:
        if PAGES[page].is_relative_to(ROOT / "docs"):
            assert f"'{page}'" in nav, page


def test_the_direction_of_imports_is_what_design_says() -> None:
    sys.path.insert(0, str(ROOT / "tests"))
    from test_structure import LAYERS

    text = (ROOT / "DESIGN.md").read_text(encoding="utf-8")
    line = text.split("## Direction")[1].split("```")[1].split("\n\n")[0]
    ranks = [re.findall(r"[a-z_]+", part) for part in line.split("└")[0].split("▶")]
    named = {name for rank in ranks for name in rank}
    for left, right in itertools.pairwise(ranks):
        assert min(LAYERS[name] for name in left) > max(LAYERS[name] for name in right), (
            left,
            right,
        )
    hidden = {"", "__main__", "kernels", "backends", "site", "families"}
    assert named == set(LAYERS) - hidden
