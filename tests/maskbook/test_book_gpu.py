"""Replay and recording on a GPU: the same numbers as on the host, and little memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import books
import pytest
import tiny
import torch

import jali
from jali.maskbook.bits import plan_of
from jali.maskbook.calibration import calibrate
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks

pytestmark = pytest.mark.gpu


def test_lists_on_the_device_are_those_of_the_host() -> None:
    book = books.make(None, grid=TokenGrid.video(5, 30, 52), blocks=Blocks(128, 64))
    device = torch.device("cuda", 0)
    replay, layout = book.replay(device), book.layout(device)
    for _ in range(2):
        for step in (0, 1, 2, 3):
            for layer in (0, 1):
                plan = plan_of(replay.bits(0.5, step, layer, 0), layout)
                want = book.plan(0.5, step, layer).lists[1]
                assert torch.equal(plan.lists[1].counts.cpu(), want.counts)
                assert torch.equal(plan.lists[1].indices.cpu(), want.indices)
    assert replay.bytes == 2 * book.bits(0.5, 0).nbytes
    book.close()


def test_bits_do_not_depend_on_where_they_are_derived() -> None:
    book, other = books.make(None), books.make(None)
    book.derive(0.4)
    other.derive(0.4, "cuda")
    for step in range(4):
        assert (book.bits(0.4, step) == other.bits(0.4, step)).all()


def test_calibrated_and_replayed(tmp_path: Path) -> None:
    pipe: Any = tiny.wan().to("cuda")
    call = {k: v for k, v in tiny.WAN_CALL.items() if k != "prompt"}
    given = {"steps": 3, "blocks": Blocks(64, 64), **call}
    book = calibrate(pipe, ["a cat", "a dog"], tmp_path / "gpu", **given)
    host = calibrate(tiny.wan(), ["a cat", "a dog"], tmp_path / "cpu", **given)
    for step in range(3):
        for layer in range(3):
            assert torch.allclose(
                book.importance(step, layer), host.importance(step, layer), rtol=0.1, atol=1e-3
            )
    with jali.cached_processor_mode(pipe, book, 0.5, warmup_frac=0) as handle:
        tiny.generate(pipe, tiny.WAN_CALL)
    assert handle.stats().sparse_cost == pytest.approx(0.5, abs=0.05)


def test_a_book_of_rd(tmp_path: Path) -> None:
    """Tables reach the device whole and stay while their part of the run goes on."""
    book = books.make_errors(None, grid=TokenGrid.video(5, 30, 52), blocks=Blocks(128, 64))
    site = jali.Site(1, 4, 1, 2)
    there, here = book.table(site, "cuda"), book.table(site)
    assert torch.equal(there.codes.cpu(), here.codes)
    assert torch.equal(there.top.cpu(), here.top)
    pipe: Any = tiny.wan().to("cuda")
    call = {k: v for k, v in tiny.WAN_CALL.items() if k != "prompt"}
    method = jali.RateDistortion(q_block=64, k_block=64, keep=0.5)
    made = calibrate(pipe, ["a cat"], tmp_path / "gpu", steps=4, method=method, **call)
    with jali.cached_processor_mode(pipe, made, 0.5, warmup_frac=0) as handle:
        tiny.generate(pipe, tiny.WAN_CALL, steps=4)
    assert handle.stats().sparse_cost == pytest.approx(0.5, abs=0.05)
    assert handle.run.tables.made == 2 * 2  # layer 0 is dense
