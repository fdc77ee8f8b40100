"""A method from outside: written on a third of a page, registered, and then found everywhere."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from jali import Budget, Entropy, Query, Scored, TokenGrid, attend

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
SHOWN = re.search(r"```python\n(from dataclasses.*?)```", PAGE, re.DOTALL)

# What someone's own package would do, and then the question where the method is known.
SCRIPT = """
{method}
import sys
from jali.methods import METHODS
METHODS["longest"] = Longest
{question}
"""


def ask(question: str) -> str:
    """What a process says in which the method of the docs page is registered."""
    assert SHOWN is not None
    code = SCRIPT.format(method=SHOWN[1], question=question)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_it_takes_no_more_than_35_lines() -> None:
    assert SHOWN is not None
    assert len(SHOWN[1].strip().splitlines()) <= 35


def test_it_is_in_the_contract_matrix() -> None:
    question = """
sys.path.insert(0, "tests/contract")
import cases
print(cases.METHODS["longest"])
print("longest" in cases.CAUSAL)
import torch
from jali import attend
geometry = cases.GEOMETRIES["text_front"]
q, k, v = (torch.randn(1, 2, geometry.q.tokens, 16) for _ in range(3))
print(attend(q, k, v, method=cases.METHODS["longest"], grid=geometry.q).plan.cost < 1)
"""
    said = ask(question).splitlines()
    assert said[0].startswith("Longest(budget=Budget(mean=0.4")
    assert "q_block=32, k_block=16" in said[0]
    assert said[1:] == ["True", "True"]


def test_it_is_in_the_help_of_commands_and_can_be_asked_for() -> None:
    question = """
from typer.testing import CliRunner
from jali.cli.main import app
print(CliRunner().invoke(app, ["generate", "--help"]).output)
print("=====")
print(CliRunner().invoke(app, ["inspect", "--methods", "nothing"]).stderr)
"""
    shown, refused = ask(question).split("=====")
    assert "longest" in shown
    assert "longest" in refused  # among the known ones


def test_it_is_in_the_table_of_the_docs() -> None:
    question = """
sys.path.insert(0, "benchmarks")
import tables
print(tables.methods_table())
"""
    row = next(line for line in ask(question).splitlines() if "longest" in line)
    assert "Read the key blocks whose longest key is longest." in row
    assert "`power`" in row
    assert "`budget`" in row


def test_it_is_read_and_written_by_presets_and_configurations() -> None:
    question = """
from jali import Schedule, Budget
from jali.presets.method import read_method, write_method
method = Schedule(Longest(Budget(0.3), power=2.5), dense_steps=0.2)
plain = write_method(method)
print(plain)
assert read_method(plain, "here") == method
from jali.generation import Settings
print(Settings("nano", method="longest", options={"power": 3}).resolve().make_method())
"""
    said = ask(question)
    assert "'longest'" in said
    assert "power=3" in said.replace("power=3.0", "power=3")


@dataclass(frozen=True)
class ByValue(Scored):
    """Reads the key blocks with the largest values: a method that needs v."""

    name: ClassVar[str] = "by_value"
    needs_values: ClassVar[bool] = True

    def score(self, query: Query) -> Tensor:
        assert query.v is not None
        assert query.v.shape == query.k.shape
        layout = query.layout
        size = query.v.norm(dim=-1)
        size = torch.nn.functional.pad(size, (0, layout.N * layout.blocks.k - size.shape[-1]))
        score = size.unflatten(-1, (layout.N, -1)).mean(-1)
        return score[:, :, None].expand(-1, -1, layout.M, -1)


def test_a_method_that_needs_values_gets_them_in_its_order() -> None:
    grid = TokenGrid.video(3, 8, 8)
    q, k, v = (torch.randn(1, 2, grid.tokens, 8) for _ in range(3))
    v[:, :, 64:96] *= 100
    found = attend(q, k, v, method=ByValue(Budget(0.2), q_block=32, k_block=32), grid=grid)
    assert found.plan is not None
    assert bool((found.plan.levels[..., 2] == 1).all())


def test_a_method_written_for_the_old_name_of_its_budget_still_says_it() -> None:
    class Old(Entropy):
        mean_budget = Entropy.__mro__[2].mean_budget  # type: ignore[attr-defined]
        asked = 0.25

    with pytest.warns(DeprecationWarning, match="mean_budget"):
        assert Old().mean_budget == 0.25
