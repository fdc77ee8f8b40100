"""The table of single layers has every method, and says who errs less than a control."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import arena_tables, layers
from jali import Blocks, Curve, Local, Site, Tables, TokenGrid
from jali.evaluation.arena.match import CLOSE
from jali.evaluation.inspection import Capture
from jali.methods import METHODS

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "benchmarks/results"
PAGE = (ROOT / "docs/arena.md").read_text("utf-8")


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / "layers-nano-cpu.json").read_text("utf-8"))
    return found


def made_up(**errors: list[float]) -> dict[str, Any]:
    rows = [
        {
            "method": name, "blocks": "128×128", "planning": 0.0, "cost": 0.4,
            "achieved": 0.45 if name == "costly" else 0.4, "error": sum(own) / len(own),
            "errors": own,
        }
        for name, own in errors.items()
    ]  # fmt: skip
    machine = {"date": "today", "versions": {"jali": "1"}}
    return {
        "machine": machine, "tokens": 9600, "heads": 4, "head_dim": 64, "layers": [1], "steps": [2],
        "of_steps": 12, "prompts": ["a"], "calls": 3, "rows": rows,
    }  # fmt: skip


def test_every_registered_method_is_in_the_table_at_every_cost(told: dict[str, Any]) -> None:
    methods = set(METHODS) - {"dense"}
    shown = PAGE.split("<!-- table:layers -->")[1].split("<!-- /table:layers -->")[0]
    for cost in layers.COSTS:
        own = [row for row in told["rows"] if row["cost"] == cost]
        assert {row["method"] for row in own} == methods
        assert {row["method"] for row in own if row["blocks"] == "128×128"} == methods
        assert all(len(row["errors"]) == told["calls"] for row in own)
        for row in own:
            assert f"| {arena_tables.layer_name(row)} |" in shown
            said = f" at {row['achieved']:.3f} |"
            assert abs(row["achieved"] - cost) <= CLOSE or said in shown


def test_the_page_says_what_was_measured(told: dict[str, Any]) -> None:
    """The order of layers, that of clips, and where they differ."""
    most, middle, least = (arena_tables.LayerCost(told["rows"], cost) for cost in layers.COSTS)
    for one in (most, middle, least):
        assert one.rows[0]["method"] == "rd"
        assert one.control["method"] == "local"
        error = {name: row["error"] for name, row in one.own.items()}
        assert 1.8 < error["random"] / error["local"] < 2.4
        svg2 = [row for row in one.rows if row["method"] == "svg2"]
        assert all(arena_tables.more(row, one.control).high > 0 for row in svg2)
    lost = {row["method"] for row in least.rows if least.loses(row)}
    assert lost == {"sparge", "svg2", "rf_v2"}
    for name, control in (("radial", "local"), ("sta", "local"), ("rf_v2", "random")):
        assert arena_tables.is_tied(least.own[name], least.own[control])
    for row in least.rows:
        tied = arena_tables.is_tied(row, least.own["random"])
        assert tied == (row["method"] in ("svg2", "rf_v2", "random"))
    error = {name: row["error"] for name, row in middle.own.items()}
    assert error["rf_v2"] < error["local"] < error["random"]
    assert error["svg2"] / error["random"] == pytest.approx(0.5, abs=0.06)
    assert error["mass"] / error["ada_bsa"] == pytest.approx(0.5, abs=0.06)
    (board,) = (
        board
        for arena in arena_tables.read_all(RESULTS)
        for board in arena.boards
        if arena.results.settings["steps"] == told["of_steps"] and board.total == 0.3
    )
    clips = [standing.row.label for standing in board.standings]
    assert clips.index("random") < clips.index("svg2") < clips.index("rf_v2")
    assert clips.index("local") < clips.index("rf_v2")
    assert clips.index("ada_bsa") < clips.index("mass")
    first, *_, last = Curve(0.3, "exponential").budgets(12, 8, lambda *_: False)
    assert (first[0], round(last[0], 2)) == (1, 0.03)
    assert "fall from 1 to 0.03 along a run" in PAGE


def test_rows_are_told_from_the_first_and_from_the_better_control() -> None:
    told = made_up(
        rd=[0.01, 0.02, 0.03], psa=[0.02, 0.01, 0.035], costly=[0.5, 0.5, 0.51],
        local=[0.2, 0.21, 0.22], random=[0.4, 0.4, 0.41], sta=[0.18, 0.2, 0.26],
    )  # fmt: skip
    text = arena_tables.layers_page(told)
    assert "| `rd` 128×128 | 0.000 | **2.0 ± 2.5** | −19.0 ± 0.0 |" in text
    assert "| `psa` 128×128 | 0.000 | **2.2" in text
    assert "| `costly` 128×128 | 0.000 | *50.3 ± 1.4* at 0.450 | +29.3 ± 1.4 |" in text
    assert "| `random` 128×128 | 0.000 | 40.3 ± 1.4 |  |" in text
    assert "errs least, by 2.0% of dense; not told apart from it: `psa` 128×128." in text
    assert "these err more than the control local: `costly` 128×128 (+29.3 ± 1.4)." in text
    assert "these are not told apart from the control local: `sta` 128×128 (" in text


def test_all_methods_have_the_same_blocks_and_some_their_own_too() -> None:
    same, seen = Blocks(layers.BLOCK, layers.BLOCK), set()
    for method in layers.chosen():
        is_first = method.name not in seen
        assert (method.blocks(Blocks(64, 256)) == same) is is_first
        seen.add(method.name)
    assert seen == set(METHODS) - {"dense"}


def test_a_score_is_of_the_achieved_cost() -> None:
    grid, make = TokenGrid.video(4, 16, 16), torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, grid.tokens, 32, generator=make) for _ in range(3))
    call = Capture(Site(1, 4, 0, 2), grid, q, k, v, None, 32**-0.5)
    dense = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    method = Local(q_block=128, k_block=128)
    half, whole = (layers.score(method, call, cost, dense, Tables()) for cost in (0.5, 1.0))
    assert half["achieved"] == 0.5
    assert 0.1 < half["error"] < 2
    assert whole["error"] == pytest.approx(0, abs=1e-5)
