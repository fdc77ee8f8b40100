"""The other pages in a browser: the demo on tensors, and the table of experiments."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from test_browser import COLLISIONS, INSIDE, PHONE

from jali.evaluation.demo import compare_methods, make_heads, tensors
from jali.experiments.collect import ResultTable

WIDTHS = (390, 800, 1400)


@contextmanager
def opened(browser: Any, file: Path, **options: Any) -> Iterator[Any]:
    context = browser.new_context(**options)
    page = context.new_page()
    wrong: list[str] = []
    page.on("pageerror", lambda error: wrong.append(str(error)))
    page.on("request", lambda request: wrong.append(request.url))
    page.goto(file.as_uri())
    yield page
    context.close()
    assert [url for url in wrong if not url.startswith(("data:", file.as_uri()))] == []


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("demo")
    found = compare_methods(make_heads((2, 8, 16)), budget=0.25, repeats=1)
    tensors.draw(folder, found)
    return folder / tensors.PAGE, found


@pytest.fixture(scope="module")
def experiments(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [
        {
            "tag": f"paper-{variant}-{budget}", "model": "nano", "height": 192, "width": 320,
            "num_frames": 37, "steps": 12, "variant": variant, "budget": budget, "cost": budget,
            "bench_steps": 12, "bench_cost": budget, "seconds": 9.0, "dense_seconds": 10.0,
            "speedup": 3 - 2 * budget - place / 10, "quality.psnr.mean": 20 + 12.25 * budget,
            "quality.ssim.mean": 0.9, "quality.vmaf.mean": 80.0, "quality.lpips.mean": 0.1,
        }
        for place, variant in enumerate(("entropy", "psa", "cached", "rf_v2", "ada_bsa"))
        for budget in (0.1, 0.3, 0.5, 0.7)
    ]  # fmt: skip
    file = tmp_path_factory.mktemp("experiments") / "table.html"
    file.write_text(ResultTable(tuple(rows[0]), tuple(rows), {}).to_html(), encoding="utf-8")
    return file


@pytest.mark.parametrize("kind", ["demo", "experiments"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_wider_than_the_window(
    browser: Any, kind: str, width: int, request: pytest.FixtureRequest
) -> None:
    file = request.getfixturevalue(kind)
    file = file if isinstance(file, Path) else file[0]
    with opened(browser, file, viewport={"width": width, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == width
        assert page.evaluate(INSIDE, ".scroll, svg, h1, h2, p")
        assert all(t.evaluate("e => !!e.closest('.scroll')") for t in page.locator("table").all())


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_maps_of_the_demo_tell_what_is_read(
    browser: Any, demo: tuple[Path, Any], scheme: str
) -> None:
    file, found = demo
    levels = found.plans["psa"].levels[0]
    words = {0: "not read", 1: "read", 2: "read as means of 2 keys", 4: "read as means of 4 keys",
             8: "read as means of 8 keys"}  # fmt: skip
    with opened(
        browser, file, viewport={"width": 1000, "height": 800}, color_scheme=scheme
    ) as page:
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert paper == {"light": "rgb(251, 251, 249)", "dark": "rgb(17, 20, 26)"}[scheme]
        assert page.locator("canvas").count() == len(found.plans) * len(found.heads.kinds)
        canvas = page.locator('canvas[data-name^="psa, "]').nth(1)
        canvas.scroll_into_view_if_needed()
        box, (rows, columns) = canvas.bounding_box(), levels[1].shape
        for row, column in ((0, 0), (rows - 1, columns - 1), (0, columns - 1)):
            at = (column + 0.5) / columns * box["width"], (row + 0.5) / rows * box["height"]
            page.mouse.move(box["x"] + at[0], box["y"] + at[1])
            told = page.inner_text("#tip").split("\n")
            assert told[1] == f"query block {row}, key block {column}"
            assert told[2] == words[int(levels[1, row, column])]


def test_a_finger_asks_as_a_pointer_does(
    browser: Any, demo: tuple[Path, Any], experiments: Path
) -> None:
    phone = {"viewport": PHONE, "is_mobile": True, "has_touch": True}
    with opened(browser, demo[0], **phone) as page:
        page.locator("canvas").first.tap()
        assert page.inner_text("#tip").startswith("entropy, local\nquery block ")
        page.tap("h1")
        assert page.locator("#tip").is_hidden()
    with opened(browser, experiments, **phone) as page:
        page.locator(".point").nth(1).tap()
        assert shown(page) == ["entropy, asked 0.5: 2.00×, 26.12"]


def shown(page: Any) -> list[str]:
    return page.evaluate(
        """[...document.querySelectorAll('.point text')]
          .filter(e => getComputedStyle(e).display !== 'none').map(e => e.textContent)"""
    )


def test_the_plot_of_experiments_keeps_its_words_apart(browser: Any, experiments: Path) -> None:
    for width in WIDTHS:
        with opened(browser, experiments, viewport={"width": width, "height": 800}) as page:
            assert shown(page) == []
            page.locator(".point").first.hover()
            assert len(shown(page)) == 1
            assert not page.evaluate(COLLISIONS, "svg text, .legend li"), width
            over = """(() => {
              const box = document.querySelector('.legend').getBoundingClientRect();
              return box.top < document.querySelector('svg').getBoundingClientRect().bottom - 1;
            })()"""
            assert not page.evaluate(over), "the legend lies on no point"
            assert page.locator(".legend li").count() == 5
