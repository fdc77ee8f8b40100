"""What `jali.generation` writes is what the page reads: a small real pipeline, dense and sparse."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

from test_browser import opener
from test_page import data_of

from jali.evaluation.report import compare_page, read_comparison, render_page, write_page

MODEL = "wan-t2v-1.3b"
SHAPE = {"height": 64, "width": 64, "num_frames": 9, "steps": 3, "device": "cpu"}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import checkpoints

    from jali.generation import Settings, produce
    from jali.integration.models.pipeline import load_pipeline

    root = tmp_path_factory.mktemp("real")
    pipe = load_pipeline(MODEL, path=checkpoints.save(MODEL, root / "checkpoint"), device="cpu")
    pipe.set_progress_bar_config(disable=True)
    usual = {"model": MODEL, **SHAPE, "arguments": {"max_sequence_length": 16}}
    blocks = {"q_block": 16, "k_block": 16}
    produce(
        pipe, ["a red ball"], Settings(method="dense", **usual), root / "runs" / "dense", warm=True
    )
    sparse = Settings(method="entropy", budget=0.4, options=blocks, **usual)
    produce(pipe, ["a red ball"], sparse, root / "runs" / "entropy", warm=True)
    return root / "runs"


def test_every_part_of_the_page_is_filled(real: Path) -> None:
    report = read_comparison([real], metrics=["psnr"])
    assert [run.name for run in report.runs] == ["dense", "entropy 0.4"]
    assert not report.notes
    row = report.rows()[1]
    assert row.speed_up is not None
    assert row.cost is not None
    assert 0 < row.cost.mean < 1
    assert row.metrics["psnr"].mean > 0
    sites = data_of(render_page(report))["clips"][0]["runs"][1]["sites"]
    assert sites["branches"] == ["cond", "uncond"]
    assert sites["plans"]
    assert any(row[4] < 0 for row in sites["rows"])


def test_it_opens(real: Path, browser: Any, tmp_path: Path) -> None:
    file = tmp_path / "page.html"
    write_page(file, compare_page([real], ["psnr"]))
    with opener(browser) as open_page:
        page = open_page(file)
        page.locator("#plans").scroll_into_view_if_needed()
        page.wait_for_selector("#strip canvas")
        for part in ("#cost", "#heads", "#plans", "#numbers", "#settings"):
            assert page.locator(part).is_visible(), part
        page.screenshot(path=tmp_path / "real.png", full_page=True)
