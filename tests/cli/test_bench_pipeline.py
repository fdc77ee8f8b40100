"""`jali bench pipeline`: every method beside dense, in one run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("diffusers")
pytest.importorskip("av")

from jali.evaluation.bench.pipeline import PipelineRow, _mark_best, candidates
from jali.generation import Settings

Jali = Callable[..., Any]


def test_time_and_quality_of_all_in_one_run(
    jali: Jali, small: tuple[str, ...], tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib")
    folder = tmp_path / "bench"
    # 3×8×8 tokens, so that there is more than one block of keys.
    words = ("--methods=psa,rf_v2_balanced", "--budgets=0.5,0.3", "--num-prompts=2",
             "--height=128", "--width=128")  # fmt: skip
    done = jali("bench", "pipeline", *small, *words, "--output-dir", folder)
    assert done.exit_code == 0, done.stderr
    result = json.loads((folder / "results.json").read_text())
    assert result["complete"]
    assert len(result["prompts"]) == 2
    assert "cpu_threads" in result["machine"]
    rows = {row["label"]: row for row in result["rows"]}
    assert list(rows) == ["dense", "psa-0.5", "psa-0.3", "rf_v2_balanced"]
    assert (rows["dense"]["speedup"], rows["dense"]["cost"], rows["dense"]["quality"]) == (1, 1, {})
    assert rows["psa-0.3"]["budget"] == 0.3
    for label in ("psa-0.5", "psa-0.3"):
        row = rows[label]
        assert row["cost"] < 1
        assert row["quality"]["psnr"] > 10
        assert row["speedup"] == pytest.approx(rows["dense"]["seconds"] / row["seconds"])
    assert any(row["best"] for row in rows.values())
    assert (folder / "pareto.svg").stat().st_size > 5000
    assert sorted(os.listdir(folder)) == sorted([*rows, "results.json", "pareto.svg"])
    for label in rows:
        assert label in done.stdout
    # Not a second time: times of two runs are not one run.
    done = jali("bench", "pipeline", *small, *words, "--output-dir", folder)
    assert done.exit_code == 2
    assert "is not empty: it holds a benchmark, in results.json" in done.stderr
    (folder / "results.json").write_text(json.dumps(result | {"complete": False}))
    done = jali("bench", "pipeline", *small, *words, "--output-dir", folder)
    assert done.exit_code == 2
    assert "a benchmark that did not finish, and times of two runs are not one" in done.stderr
    assert "remove this one, or name another with --output-dir" in done.stderr


def test_every_run_is_warmed_up(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two presets of one method may need other kernels; the budgets of one book do not."""
    from jali.evaluation.bench import pipeline

    warmed: list[Any] = []
    monkeypatch.setattr(pipeline, "warm_up", lambda _, runs, __: warmed.extend(runs))
    monkeypatch.setattr(pipeline, "produce", lambda *_, **__: 1 / 0)
    base = Settings("wan-t2v-1.3b", device="cpu")
    runs = candidates(base, ["psa_balanced", "psa_topk", "entropy"], [0.5, 0.3])
    books = {
        f"cached-{budget}": replace(base, masks="book", budget=budget) for budget in (0.5, 0.3)
    }
    with pytest.raises(ZeroDivisionError):
        pipeline.run(None, ["a"], runs | books, tmp_path / "b")
    assert warmed == [*runs.values(), books["cached-0.3"]]


def row(label: str, seconds: float, **quality: float) -> PipelineRow:
    return PipelineRow(label, label, 0.5, 0.5, 0.5, seconds, seconds, 1.0, 1.0, quality)


def test_which_rows_none_beats() -> None:
    rows = [
        row("dense", 10),
        row("slow and near", 8, psnr=40),
        row("slow and far", 8, psnr=20),
        row("quick and far", 4, psnr=25),
        row("slow and the same", 9, ssim=1.0),  # the same frames have no PSNR
    ]
    best = [row.label for row in _mark_best(rows) if row.best]
    assert best == ["slow and near", "quick and far", "slow and the same"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--methods=entropy,nothing"], "--methods: unknown method or preset 'nothing'"),
        (["--budgets=0.5,2"], "budgets are numbers in (0, 1], got '0.5,2'"),
        (["--masks=none.safetensors"], "none.safetensors"),
        (["--model=nothing"], "unknown model 'nothing'"),
    ],
)
def test_bad_input(
    words: list[str], sentence: str, jali: Jali, small: tuple[str, ...], tmp_path: Path
) -> None:
    done = jali("bench", "pipeline", *small, *words, "--output-dir", tmp_path / "b")
    assert done.exit_code == 2
    assert sentence in " ".join(done.stderr.replace("│", " ").split())
    assert not (tmp_path / "b").exists()
