"""What belongs to a release agrees: version, changelog, citation, workflows."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import jali

ROOT = Path(__file__).parents[1]
FILES = [
    *ROOT.glob(".github/**/*.yml"), ROOT / ".pre-commit-config.yaml", ROOT / "CITATION.cff",
]  # fmt: skip


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def test_the_version_is_in_changelog_and_citation() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    sections = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text, re.MULTILINE)
    assert sections[0] == ("Unreleased", "")
    date = dict(sections)[jali.__version__]
    cited = read("CITATION.cff")
    assert (cited["version"], str(cited["date-released"])) == (jali.__version__, date)
    assert all({"type", "title", "authors"} <= set(other) for other in cited["references"])


@pytest.mark.parametrize("file", FILES, ids=lambda p: p.name)
def test_the_files_are_yaml(file: Path) -> None:
    assert yaml.safe_load(file.read_text(encoding="utf-8"))


def test_pull_requests_run_what_contributors_run() -> None:
    jobs = read(".github/workflows/ci.yml")["jobs"]
    ran = [step.get("run", "") for job in jobs.values() for step in job["steps"]]
    for target in ("test", "docs"):
        assert any(line.startswith(f"make {target}") for line in ran)


def test_publishing_needs_a_tried_wheel_and_someone_who_switched_it_on() -> None:
    jobs = read(".github/workflows/release.yml")["jobs"]
    publish = jobs["publish"]
    assert (publish["needs"], jobs["try"]["needs"]) == ("try", "build")
    assert publish["environment"]
    assert publish["if"]
    assert publish["permissions"] == {"id-token": "write"}
