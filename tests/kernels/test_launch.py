"""Launches: everything but the tensors is worked out once for every shape."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from jali.kernels import gather, score_sampled
from jali.kernels.gather import gather_rows
from jali.kernels.launch import Launch, kind, on_device
from jali.kernels.scores import sampled_scores
from jali.kernels.selection import select_lists

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_tensors_come_first_then_numbers_and_the_grid_is_named() -> None:
    seen: list[Any] = []

    class Kernel:
        def run(self, *args: Any, **options: Any) -> None:
            seen.append((args, options))

    Launch(Kernel(), (3, 2), (7, 0.5), {"BLOCK": 16, "num_warps": 4})("q", None)
    assert seen == [
        (("q", None, 7, 0.5), {"grid": (3, 2), "warmup": False, "BLOCK": 16, "num_warps": 4})
    ]


def test_a_kind_is_what_a_launch_depends_on() -> None:
    x, y = (torch.zeros(2, 64, 3, 16, device=DEVICE).transpose(1, 2) for _ in range(2))
    assert kind(x) == kind(y)
    assert hash(kind(x)) == hash(kind(y))
    others = (x.contiguous(), x.half(), x[:, :, 1:], x[..., 1:])
    assert all(kind(other) != kind(x) for other in others)
    assert kind(x).aligned
    assert not kind(x[..., 1:]).aligned


def test_the_same_shape_is_worked_out_once() -> None:
    def run() -> None:
        q, k = (torch.randn(1, 2, 40, 16, device=DEVICE) for _ in range(2))
        positions = torch.tensor([[0, 9], [16, 20], [33, 39]], device=DEVICE)
        sampled_scores(q, k, 16, 16, 0.25, positions)
        gather_rows(q, torch.arange(40, device=DEVICE).flip(0))

    run()
    cached = score_sampled._prepared, gather._launch
    before = [prepared.cache_info().misses for prepared in cached]
    run()
    assert [prepared.cache_info().misses for prepared in cached] == before


def test_one_count_for_all_rows() -> None:
    scores = torch.rand(2, 3, 5, 9, device=DEVICE)
    one = torch.tensor(4, dtype=torch.int32, device=DEVICE)
    each = torch.full((2, 3), 4, dtype=torch.int32, device=DEVICE)
    for a, b in zip(select_lists(scores, one), select_lists(scores, each), strict=True):
        assert torch.equal(a, b)


def test_a_device_without_others_is_not_changed() -> None:
    with on_device(torch.device(DEVICE)) as nothing:
        assert nothing is None
