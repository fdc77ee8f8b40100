"""Every Python example of README and docs runs, in the order of its page, on small models."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from page import PAGES, Block, python

# Pages whose examples another test runs, since they need more than a folder and a small model.
ELSEWHERE = {
    "presets.md": "tests/integration/test_coming_from.py",
    "coming-from-psa.md": "tests/integration/test_coming_from.py",
    "quality.md": "tests/quality/test_quality_page.py",
    "notebook.md": "tests/docs/test_notebook.py",
}
# Single examples on other people's pages: a piece of their text, and why they are not run here.
NOT_HERE = {
    "enable_parallelism": "needs several processes: tests/integration/test_parallel.py",
    "run_experiment(": "takes minutes: tests/experiments/test_stages.py makes the same call",
}


def needs(block: Block) -> str | None:
    return block.needs or next((why for part, why in NOT_HERE.items() if part in block.text), None)


HERE = [page for page in PAGES if page not in ELSEWHERE and python(page)]


@pytest.mark.parametrize("page", HERE)
def test_the_python_of_a_page_runs(page: str, small: Path) -> None:
    prepare(page, small)
    names: dict[str, Any] = {"__name__": "page"}
    ran = 0
    for block in python(page):
        if needs(block) is None:
            # The page's own line numbers, so that a traceback points into it.
            code = "\n" * (block.line - 1) + block.text
            exec(compile(code, str(PAGES[page]), "exec"), names)
            ran += 1
    if "video" in names:
        assert names["video"].shape == (5, 32, 48, 3)
    if "chunk" in names:
        assert names["state"].cost() < 0.6
    if ran == 0:
        pytest.skip("; ".join(str(needs(block)) for block in python(page)))


def prepare(page: str, folder: Path) -> None:
    """What a page takes for granted."""
    if page == "reports.md":
        import example

        example.make_three(folder / "runs", clips=1)


@pytest.mark.parametrize(
    "block",
    [b for p in HERE for b in python(p) if needs(b)],
    ids=str,
)
def test_what_does_not_run_is_python_all_the_same(block: Block) -> None:
    compile(block.text, str(block), "exec")
    pytest.skip(str(needs(block)))


@pytest.mark.parametrize(("page", "test"), ELSEWHERE.items())
def test_who_runs_the_others(page: str, test: str) -> None:
    assert python(page)
    assert page in (PAGES["README.md"].parent / test).read_text(encoding="utf-8")


def test_the_method_of_the_page_keeps_to_its_budget(small: Path) -> None:  # noqa: ARG001
    names = definitions("extending.md", "class Longest")
    import torch

    from jali import Budget, TokenGrid, attend

    grid = TokenGrid.video(3, 13, 17, text=50)
    q, k, v = (torch.randn(2, heads, grid.tokens, 32) for heads in (4, 2, 2))
    kind: Callable[..., Any] = names["Longest"]
    found = attend(q, k, v, method=kind(Budget(0.25)), grid=grid)
    again = attend(q, k, v, method=kind(Budget(0.25)), grid=grid)
    assert torch.equal(found.out, again.out)
    assert found.plan is not None
    assert found.plan.cost < 1


def definitions(page: str, part: str) -> dict[str, Any]:
    """What the block with this text defines."""
    names: dict[str, Any] = {"__name__": "page"}
    block = next(b for b in python(page) if part in b.text)
    exec(compile(block.text, str(block), "exec"), names)
    return names
