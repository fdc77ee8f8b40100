"""Launches: everything but the tensors is worked out once for every shape."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from jali.kernels import gather, score_sampled
from jali.kernels.gather import gather_rows
from jali.kernels.launch import Launch, spec_of
from jali.kernels.scores import sampled_scores
from jali.kernels.selection import select_lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Kernel:
    """As a compiler would show itself: `run` compiles, launches, and gives back what it made."""

    arg_names = ("q", "mask", "length", "scale", "WIDTH", "BLOCK")

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def run(self, *args: Any, **options: Any) -> Kernel:
        self.seen.append(("run", args, options))
        return self

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args: self.seen.append(("again", grid, args))


def test_tensors_come_first_then_numbers_and_constants_in_order() -> None:
    kernel, q = Kernel(), torch.zeros(4)
    constants = {"BLOCK": 16, "num_warps": 4, "WIDTH": 8}
    launch = Launch(kernel, (3, 2), (7, 0.5), constants)
    launch(q, None)
    launch(q, None)
    assert kernel.seen == [
        ("run", (q, None, 7, 0.5), {"grid": (3, 2, 1), "warmup": False, **constants}),
        ("again", (3, 2, 1), (q, None, 7, 0.5, 8, 16)),
    ]


def test_another_kind_of_tensor_is_compiled_for_itself() -> None:
    kernel = Kernel()
    launch = Launch(kernel, (1,), (7, 0.5), {"BLOCK": 16, "WIDTH": 8})
    x = torch.zeros(8)
    for tensors in ((x, None), (x.half(), None), (x[1:], None), (x, x), (x, None)):
        launch(*tensors)
    assert [how for how, *_ in kernel.seen] == ["run"] * 4 + ["again"]


def test_a_launch_goes_where_its_tensors_are(monkeypatch: pytest.MonkeyPatch) -> None:
    here = [0]

    class Elsewhere:
        dtype = torch.float32

        def get_device(self) -> int:
            return 1

        def data_ptr(self) -> int:
            return 256

    @contextlib.contextmanager
    def device(number: int) -> Iterator[None]:
        before, here[0] = here[0], number
        yield
        here[0] = before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: here[0])
    monkeypatch.setattr(torch.cuda, "device", device)
    kernel = Kernel()
    monkeypatch.setattr(kernel, "run", lambda *_, **__: kernel.seen.append(here[0]))
    Launch(kernel, (1,), (7, 0.5), {"BLOCK": 16, "WIDTH": 8})(Elsewhere(), None)
    assert kernel.seen == [1]
    assert here == [0]


def test_a_kind_is_what_a_launch_depends_on() -> None:
    x, y = (torch.zeros(2, 64, 3, 16, device=DEVICE).transpose(1, 2) for _ in range(2))
    assert spec_of(x) == spec_of(y)
    assert hash(spec_of(x)) == hash(spec_of(y))
    others = (x.contiguous(), x.half(), x[:, :, 1:], x[..., 1:])
    assert all(spec_of(other) != spec_of(x) for other in others)
    assert spec_of(x).aligned
    assert not spec_of(x[..., 1:]).aligned


def test_the_same_shape_is_worked_out_once() -> None:
    def run() -> None:
        q, k = (torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(2))
        positions = torch.tensor([[0, 9], [16, 20], [33, 39]], device=DEVICE)
        sampled_scores(q, k, 16, 16, 0.25, positions)
        gather_rows(q, torch.arange(40, device=DEVICE).flip(0))

    run()
    cached = score_sampled._prepare, gather._launch
    before = [prepared.cache_info().misses for prepared in cached]
    run()
    assert [prepared.cache_info().misses for prepared in cached] == before


def test_one_count_for_all_rows() -> None:
    scores = torch.rand(2, 3, 5, 9, device=DEVICE)
    one = torch.tensor(4, dtype=torch.int32, device=DEVICE)
    each = torch.full((2, 3), 4, dtype=torch.int32, device=DEVICE)
    for a, b in zip(select_lists(scores, one), select_lists(scores, each), strict=True):
        assert torch.equal(a, b)
