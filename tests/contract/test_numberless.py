"""No plan asks for a number of its tensors, which on a GPU would mean waiting for it. Tensors that
have none show it anywhere; `tests/gpu/test_waiting.py` shows it on a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from cases import METHODS
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from jali import Entropy, Method, Site, Tables, TokenGrid
from jali.methods.method import Query
from jali.planning.plan import BlockPlan
from jali.tokens.layout import Blocks
from jali.tokens.padding import KeyPadding
from oracle import tensors

GRID = TokenGrid.video(4, 9, 10, text=7)
# The originals know no padding; orders of heads are made before the plan.
PLANNED = [
    name for name, method in METHODS.items() if "compat" not in name and not method.orders_heads
]


def plan_twice(method: Method) -> BlockPlan:
    """What the layers of a call share is made by the first of them, from numbers; a later one must
    do without."""
    site = Site(3, 10, 1, 2)
    method = method.at(site)
    layout = method.layout(GRID, None, None, method.blocks(Blocks(256, 128)), torch.device("cpu"))
    q, k, v = tensors(GRID, B=2, H=4, kv=4)
    padding = KeyPadding(length=torch.tensor([300, 367], dtype=torch.int32))
    query = Query(q, k, layout, site, 0.25, padding, v=v)
    method.plan(query)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        q, k, v = (mode.from_tensor(x) for x in (q, k, v))
        return method.plan(query._replace(q=q, k=k, v=v, tables=Tables()))


@pytest.mark.parametrize("name", PLANNED)
def test_plans_are_made_without_a_number(name: str) -> None:
    plan = plan_twice(METHODS[name])
    assert plan.shape[2:] == (plan.layout.M, plan.layout.N)


@dataclass(frozen=True)
class Asking(Entropy):
    """Asks how large a score is."""

    name: ClassVar[str] = "asking"

    def score(self, query: Query) -> torch.Tensor:
        scores = super().score(query)
        return scores if float(scores.max()) > 0.5 else scores * 2


def test_the_check_can_fail() -> None:
    with pytest.raises(DataDependentOutputException):
        plan_twice(Asking())
