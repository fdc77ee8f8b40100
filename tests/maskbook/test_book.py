"""A book: what goes in comes out, small, checked, and opened at once."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import books
import numpy as np
import pytest
import safetensors
import torch

from jali import Budget, MaskBook
from jali.maskbook import BookError, write_book
from jali.maskbook.bits import keep_bits, pack, unpack
from jali.maskbook.book import KIND
from jali.maskbook.container import DTYPES, book_digest
from jali.maskbook.header import Header, read_header
from jali.maskbook.quantization import ERROR, OCTAVES, dequantize, quantize
from jali.planning.budget import blocks_by_entropy
from jali.planning.selection import keep_top
from jali.tokens.grid import Text, TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Gilbert, Tiled


@pytest.mark.parametrize("blocks", [1, 7, 8, 9, 64, 591])
def test_bits_round_trip(blocks: int) -> None:
    kept = torch.rand(2, 3, blocks, generator=torch.Generator().manual_seed(blocks)) < 0.4
    packed = pack(kept)
    assert packed.shape == (2, 3, -(-blocks // 8))
    assert torch.equal(unpack(packed, blocks).bool(), kept)
    assert np.array_equal(packed.numpy(), np.packbits(kept.numpy(), axis=-1, bitorder="little"))


class TestCode:
    def test_the_stated_error_holds(self) -> None:
        g = torch.Generator().manual_seed(0)
        x = torch.exp2(-25 * torch.rand(50, 400, generator=g))
        codes, peaks = quantize(x)
        back = dequantize(codes, peaks)
        held = x > peaks[:, None] * 2.0**-OCTAVES
        assert codes.dtype == torch.uint8
        assert float(((back - x).abs() / x)[held].max()) <= ERROR * (1 + 1e-4)
        assert float(back[~held].max()) <= float(peaks.max()) * 2.0**-OCTAVES * 1.03

    def test_a_peak_and_nothing_are_exact(self) -> None:
        x = torch.tensor([[0.0, 0.25, 1e-30], [0.0, 0.0, 0.0]])
        codes, peaks = quantize(x)
        assert torch.equal(dequantize(codes, peaks), torch.tensor([[0, 0.25, 0], [0, 0, 0]]))

    def test_order_is_kept(self) -> None:
        x = torch.rand(20, 300, generator=torch.Generator().manual_seed(3)).sort(-1).values
        back = dequantize(*quantize(x))
        assert bool((back.diff(dim=-1) >= 0).all())


class TestRoundTrip:
    def test_short_blocks_that_were_counted_whole_are_counted_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In books of versions that did so: 3 × 4 × 9 tokens are no whole blocks."""
        from jali.maskbook import write

        def as_before(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
            bits, _ = keep_bits(*args)
            return bits, unpack(bits, books.SMALL.N).double().mean((-2, -1)).float()

        monkeypatch.setattr(write, "keep_bits", as_before)
        x = books.slabs(books.SMALL)
        old = write_book(tmp_path / "a.safetensors", books.SMALL, lambda s, la: x[s, la])
        budget = old.budgets[0]
        assert old.cost(budget) != pytest.approx(old.header.costs[0], abs=1e-4)
        for step, layer in np.ndindex(old.steps, old.layers):
            plan = old.plan(budget, step, layer, old.header.branches[0])
            assert np.allclose(old.costs(budget)[step, layer, 0], plan.costs[0].numpy())

    @pytest.mark.parametrize(
        "changes",
        [
            {},
            {"importance": False},
            {"budgets": ()},
            {"branches": ("cond", "uncond")},
            {"grid": TokenGrid.video(3, 4, 9, text=5), "order": Tiled((1, 4, 4))},
            {"grid": TokenGrid.video(2, 5, 6, text=7, text_side="back"), "order": Gilbert()},
            {"blocks": Blocks(7, 5), "heads": 1, "layers": 1},
            {"model": "wan-t2v-1.3b", "settings": {"height": 64, "guidance": 5.0, "x": None}},
        ],
        ids=str,
    )
    def test_exact(self, tmp_path: Path, changes: dict[str, Any]) -> None:
        header = replace(books.SMALL, **changes)
        x = books.slabs(header)
        made = write_book(tmp_path / "a.safetensors", header, lambda s, la: x[s, la])
        made.verify()
        h = made.header
        assert replace(h, costs=(), importance_error=None) == header
        for i, budget in enumerate(h.budgets):
            for step in range(h.steps):
                for layer in range(h.layers):
                    for at, branch in enumerate(h.branches):
                        plan = made.plan(budget, step, layer, branch)
                        want = _online(x[step, layer, at], made, budget)
                        assert torch.equal(plan.levels[0] != 0, want)
                        cost = made.costs(budget)[step, layer, at]
                        assert np.allclose(cost, plan.costs[0].numpy())
            assert h.costs[i] == pytest.approx(made.cost(budget), abs=1e-9)
        if h.importance:
            assert h.importance_error is not None
            assert 0 < h.importance_error <= ERROR * (1 + 1e-4)
            got = made.importance(1, 0, h.branches[0])
            assert torch.equal(got, dequantize(*quantize(x[1, 0, 0])))
        made.save(tmp_path / "b.safetensors")
        assert (tmp_path / "a.safetensors").read_bytes() == (
            tmp_path / "b.safetensors"
        ).read_bytes()
        assert sorted(os.listdir(tmp_path)) == ["a.safetensors", "b.safetensors"]

    def test_made_twice_it_is_the_same_file(self, tmp_path: Path) -> None:
        for name in ("a", "b"):
            books.make(tmp_path / name)
        assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()

    def test_others_can_read_it(self, tmp_path: Path) -> None:
        made = books.make(tmp_path / "a.safetensors")
        with safetensors.safe_open(tmp_path / "a.safetensors", "np") as file:
            assert set(file.keys()) == set(made.header.tensors())
            assert np.array_equal(file.get_tensor("bits.1")[2], made.bits(0.5, 2))
            assert json.loads(file.metadata()["book"])["scorer"] == "sampled"

    def test_a_book_of_an_earlier_version(self, tmp_path: Path) -> None:
        """Written by hand-made code, with more room for its header, before safetensors read it."""
        made = MaskBook.open(Path(__file__).parent / "resampled-0.1.0.safetensors")
        made.verify()
        assert made.digest.startswith("11bac6780cc007f5")
        assert made.header.history == ("resampled: grid 3×4×9 to 2×4×6, steps 2 to 3",)
        assert made.header.settings == {}
        again = write_book(tmp_path / "a", made.header, made.importance_slab)
        assert np.array_equal(again.bits(0.5, 2), made.bits(0.5, 2))
        assert torch.equal(again.importance(1, 0), made.importance(1, 0))

    def test_one_line_says_what_it_is(self) -> None:
        assert repr(books.make(None, model="nano")) == (
            "<MaskBook nano 3×4×9, 4 steps × 2 layers × 3 heads, blocks 16×8, budgets 0.3, 0.5>"
        )

    def test_what_is_read_cannot_be_written_to(self) -> None:
        made = books.make(None)
        for array in (made.bits(0.5, 0), made.costs(0.5)):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1

    def test_a_book_without_a_name_can_be_saved(self, tmp_path: Path) -> None:
        made = books.make(None)
        assert MaskBook.open(made.save(tmp_path / "new" / "a")).digest == made.digest

    def test_a_book_without_a_name(self) -> None:
        made = books.make(None)
        made.verify()
        assert made.path is None

    def test_header_text(self) -> None:
        assert read_header(books.SMALL.text(), "x") == books.SMALL


def _online(scores: torch.Tensor, book: MaskBook, budget: float) -> torch.Tensor:
    """What entropy keeps of these scores."""
    layout = book.layout()
    rows = layout.text_rows if layout.has_text_rows else None
    counted = None if rows is None else ~rows
    keep = blocks_by_entropy(scores[None], Budget(budget), 1.0, counted)
    plan = keep_top(scores[None], keep[..., None, None], layout, layout.forced, rows)
    return plan.levels[0] != 0


class TestBudgets:
    def test_another_one_is_derived_from_importance(self) -> None:
        made = books.make(None)
        x = made.importance(2, 1)
        plan = made.plan(0.4, 2, 1)
        assert torch.equal(plan.levels[0] != 0, _online(x, made, 0.4))
        assert made.cost(0.4) == pytest.approx(0.4, abs=0.02)
        assert made.bits(0.4, 2) is not None

    def test_derived_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from jali.maskbook import book as module

        calls = []
        real = module.keep_bits
        monkeypatch.setattr(module, "keep_bits", lambda *a: calls.append(1) or real(*a))
        made = books.make(None)
        for _ in range(3):
            made.derive(0.4)
        assert len(calls) == made.steps * made.layers
        made.derive(0.3)
        assert len(calls) == made.steps * made.layers

    def test_refused_where_importance_was_left_out(self) -> None:
        made = books.make(None, importance=False)
        with pytest.raises(ValueError, match=r"without importance.*0\.4 cannot be derived.*0\.3"):
            made.derive(0.4)
        with pytest.raises(ValueError, match="cannot be resampled"):
            made.resample(steps=2)
        with pytest.raises(ValueError, match="cannot be merged"):
            made.merge(made)
        made.plan(0.3, 0, 0)

    @pytest.mark.parametrize("budget", [-0.1, 1.5, float("nan"), "0.5", True])
    def test_nonsense(self, budget: Any) -> None:
        with pytest.raises((ValueError, TypeError), match="budget"):
            books.make(None).derive(budget)


class TestSize:
    def test_of_wan_720p(self) -> None:
        """30 layers × 50 steps × 12 heads × 296 × 591 blocks."""
        header = replace(
            books.SMALL, grid=TokenGrid.video(21, 45, 80), blocks=Blocks(256, 128), layers=30,
            heads=12, noise=tuple(1 - i / 50 for i in range(50)),
            transformers=("transformer",) * 50, budgets=(0.5,),
        )  # fmt: skip
        assert (header.M, header.N) == (296, 591)
        size = header.sizes()
        assert size["bits.0"] == 394_272_000 <= 400e6
        assert size["importance"] + size["peaks"] <= 3.2e9
        assert sum(size.values()) <= 3.6e9

    def test_a_large_one_opens_at_once(self, tmp_path: Path) -> None:
        """The size of 720p, as a sparse file: only the tables are written."""
        header = replace(
            books.SMALL, grid=TokenGrid.video(21, 45, 80), blocks=Blocks(256, 128), layers=30,
            heads=12, noise=tuple(1 - i / 50 for i in range(50)),
            transformers=("transformer",) * 50, budgets=(0.5,), costs=(0.5,),
            importance_error=0.02,
        )  # fmt: skip
        path = tmp_path / "large.safetensors"
        _sparse(path, header)
        assert path.stat().st_size > 3.5e9
        begin = time.perf_counter()
        made = MaskBook.open(path)
        took = time.perf_counter() - begin
        assert made.layout().N == 591
        assert took < 1.0


def _sparse(path: Path, header: Header) -> None:
    """A file of the right length whose large tensors are holes."""
    tensors = header.tensors()
    tables = [
        np.zeros(tensors[name]["shape"], DTYPES[tensors[name]["dtype"]]) for name in header.tables
    ]
    digest = book_digest(header.text(), tensors, tables)
    metadata = {"format": KIND, "book": header.text(), "digest": digest}
    text = json.dumps({"__metadata__": metadata, **tensors}).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + sum(header.sizes().values()))


class TestFaults:
    def test_a_full_disk_leaves_the_old_book(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "a.safetensors"
        books.make(path)
        before = path.read_bytes()

        def full(*_: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(OSError, match="No space left"):
            books.make(path, seed=1)
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["a.safetensors"]

    def test_a_real_limit_in_the_middle_of_writing(self, tmp_path: Path) -> None:
        """The kernel itself refuses bytes behind a limit, as a full disk does."""
        import resource

        path = tmp_path / "a.safetensors"
        books.make(path)
        before = path.read_bytes()
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) // 2, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                books.make(path, seed=1)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert path.read_bytes() == before
        assert os.listdir(tmp_path) == ["a.safetensors"]

    def test_an_error_half_way_leaves_nothing(self, tmp_path: Path) -> None:
        def slab(step: int, layer: int) -> torch.Tensor:
            if step == 2:
                raise KeyboardInterrupt
            return books.slabs(books.SMALL)[step, layer]

        with pytest.raises(KeyboardInterrupt):
            write_book(tmp_path / "a.safetensors", books.SMALL, slab)
        assert os.listdir(tmp_path) == []

    def test_importance_that_is_none(self, tmp_path: Path) -> None:
        for wrong in (torch.nan, -1.0, torch.inf):
            x = books.slabs(books.SMALL)
            x[1, 1, 0, 0, 0, 0] = wrong
            with pytest.raises(ValueError, match="step 1, layer 1 is not finite"):
                write_book(tmp_path / "a", books.SMALL, lambda s, la, x=x: x[s, la])
        assert os.listdir(tmp_path) == []

    def test_it_has_ordinary_permissions(self, tmp_path: Path) -> None:
        books.make(tmp_path / "a")
        (tmp_path / "b").write_bytes(b"x")
        assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


class TestHeader:
    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"layers": 0}, "layers"),
            ({"heads": True}, "heads"),
            ({"noise": ()}, "steps"),
            ({"noise_kind": "snr"}, "noise_kind"),
            ({"noise": (1.0, float("nan"), 0.5, 0.1)}, "finite"),
            ({"transformers": ("transformer",)}, "every step"),
            ({"transformers": ("other",) * 4}, "fingerprint"),
            ({"branches": ("mean", "cond")}, "not both"),
            ({"branches": ()}, "branches"),
            ({"budgets": (0.5, 0.3)}, "ascending"),
            ({"budgets": (1.5,)}, "0..1"),
            ({"budgets": (), "importance": False}, "needs budgets"),
            ({"sharpness": -1.0}, "sharpness"),
            ({"scorer": "a\x1b[31m"}, "printable"),
            ({"settings": {"x": float("inf")}}, "settings.x must be"),
            ({"grid": TokenGrid((Text(2**25),))}, "tokens"),
            ({"blocks": Blocks(2**17, 8)}, "blocks"),
        ],
        ids=str,
    )
    def test_a_wrong_one_cannot_be_built(self, changes: dict[str, Any], match: str) -> None:
        with pytest.raises(ValueError, match=match):
            replace(books.SMALL, **changes)

    def test_a_newer_format_says_so(self) -> None:
        plain = json.loads(books.SMALL.text())
        plain["format"] = 3
        with pytest.raises(BookError, match=r"format 3.*reads formats 1 and 2"):
            read_header(json.dumps(plain), "x.safetensors")
