"""ESA's mask files become books, and nothing in them is run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import typer
from typer.testing import CliRunner, Result

import jali
from jali.cli import book as book_command
from jali.maskbook import BookError, MaskBook
from jali.maskbook.calibration import calibrate
from jali.maskbook.esa import import_masks, read_importance
from jali.tokens.layout import Blocks

BLOCKS = Blocks(32, 16)
SIZE: dict[str, Any] = {"height": 64, "width": 64, "num_frames": 9}
SHAPE = (3, 2, 2, 2, 3)  # layers, steps, heads and blocks of 3×4×4 tokens

app = typer.Typer(pretty_exceptions_enable=False)
app.add_typer(book_command.app, name="book")


def run(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def rows(shape: tuple[int, ...] = SHAPE) -> torch.Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return (2 * x).softmax(-1).half()


def save(path: Path, **more: Any) -> Path:
    """A file as ESA's README describes it."""
    masks = {"full_block_cnt": torch.ones(2), "full_block_idx": torch.ones(2)}
    torch.save({"importance": rows(), "masks": {0.5: masks}, "num_steps": 2} | more, path)
    return path


@pytest.fixture(scope="module")
def pipe() -> Any:
    return tiny.wan()


def test_an_imported_book_is_the_calibrated_one(pipe: Any, tmp_path: Path) -> None:
    """Importance that was recorded here, written as ESA writes it, comes back as it was."""
    book = calibrate(
        pipe, ["a cat"], tmp_path / "a.safetensors", blocks=BLOCKS, budgets=(0.5,),
        generate=lambda _prompt, seed: tiny.generate(pipe, tiny.WAN_CALL, steps=2, seed=seed),
    )  # fmt: skip
    stacked = [[book.importance(s, la) for s in range(2)] for la in range(book.layers)]
    importance = torch.stack([torch.stack(steps) for steps in stacked]).half()
    torch.save({"importance": importance}, tmp_path / "old.pt")
    frames, height, width = book.grid.segments[0].shape  # type: ignore[union-attr]
    made = import_masks(
        pipe, read_importance(tmp_path / "old.pt"), tmp_path / "b.safetensors",
        model="wan-t2v-1.3b", num_frames=4 * frames - 3, height=16 * height, width=16 * width,
        blocks=BLOCKS, budgets=(0.5,),
    )  # fmt: skip
    one, other = book.header, made.header
    assert other.fingerprints == one.fingerprints
    assert (other.grid, other.blocks, other.layers) == (one.grid, one.blocks, one.layers)
    assert other.noise_kind == one.noise_kind
    np.testing.assert_allclose(other.noise, one.noise, rtol=1e-4)
    for step in range(2):
        for layer in range(3):
            was, now = (b.importance(step, layer) for b in (book, made))
            torch.testing.assert_close(now, was, rtol=0.08, atol=1e-3)
    with jali.cached_processor_mode(pipe, made, budget=0.5, warmup_frac=0) as run_:
        tiny.generate(pipe, tiny.WAN_CALL, steps=2)
    assert any(row.reason is None for row in run_.stats().rows)


class TestCommand:
    @pytest.fixture
    def words(self, pipe: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
        from jali.integration.models import pipeline as models

        monkeypatch.setattr(models, "load_pipeline", lambda *_, **__: pipe)
        return [
            "book", "import", save(tmp_path / "old.pt"), "--model", "wan-t2v-1.3b", "--height", 64,
            "--width", 64, "--num-frames", 9, "--q-block", 32, "--k-block", 16, "--output",
            tmp_path / "new.safetensors",
        ]  # fmt: skip

    def test_a_book(self, words: list[Any], tmp_path: Path) -> None:
        done = run(*words, "--budgets", "0.6,0.4", "--json")
        assert done.exit_code == 0, done.stderr
        facts = json.loads(done.stdout)
        assert facts["history"] == ["imported from old.pt"]
        assert (facts["steps"], facts["layers"], facts["heads"]) == (2, 3, 2)
        assert facts["budgets"] == [0.4, 0.6]
        found = MaskBook.open(tmp_path / "new.safetensors")
        found.verify()
        torch.testing.assert_close(
            found.importance(1, 2), rows()[2, 1].float(), rtol=0.03, atol=1e-6
        )

    @pytest.mark.parametrize(
        ("more", "match"),
        [
            (("--height", 128), "the importance is of 3 layers × 2 heads × 2 × 3 blocks, and wan"),
            (("--q-block", 64), "in blocks of 64×16"),
            (("--budgets", "2"), "budgets"),
            (("--output", "x.pt"), "never a pickle"),
        ],
    )
    def test_refused(self, words: list[Any], more: Any, match: str, tmp_path: Path) -> None:
        done = run(*words, *more)
        assert done.exit_code == 2
        assert match in done.stderr
        assert not (tmp_path / "new.safetensors").exists()

    def test_nan(self, words: list[Any], tmp_path: Path) -> None:
        bad = rows()
        bad[1, 0, 0, 0, 0] = float("nan")
        save(tmp_path / "old.pt", importance=bad)
        done = run(*words)
        assert done.exit_code == 2
        assert "the importance of step 0, layer 1 is not finite" in done.stderr
        assert not (tmp_path / "new.safetensors").exists()

    def test_the_refusal_of_a_pickle_names_this_command(self, tmp_path: Path) -> None:
        path = save(tmp_path / "old.pt")
        with pytest.raises(BookError, match=r"jali book import .*old\.pt --model NAME --output"):
            MaskBook.open(path)


class Hostile:
    def __init__(self, call: Callable[..., Any], *args: Any) -> None:
        self.call, self.args = call, args

    def __reduce__(self) -> Any:
        return self.call, self.args


class TestRead:
    def test_nothing_of_the_file_is_run(self, tmp_path: Path) -> None:
        path = save(tmp_path / "bad.pt", extra=Hostile(os.mkdir, str(tmp_path / "run")))
        with pytest.raises(BookError, match="no file of tensors, or holds other things"):
            read_importance(path)
        assert not (tmp_path / "run").exists()

    def test_the_only_tensor_of_five_axes_serves_whatever_its_name(self, tmp_path: Path) -> None:
        torch.save({"avg": rows(), "nq": 2}, tmp_path / "a.pt")
        assert torch.equal(read_importance(tmp_path / "a.pt"), rows())
        torch.save(rows(), tmp_path / "b.pt", _use_new_zipfile_serialization=False)
        assert torch.equal(read_importance(tmp_path / "b.pt"), rows())

    @pytest.mark.parametrize(
        ("data", "match"),
        [
            (
                {"masks": {"full_block_cnt": torch.ones(3)}, "x": torch.ones(4)},
                r"masks \(dict\), x",
            ),
            ({"a": rows(), "b": rows()}, r"holds no tensor .* but a \[3, 2, 2, 2, 3\], b"),
            ({"importance": torch.ones(2, 3, 4)}, r"importance \[2, 3, 4\].*jali calibrate"),
            ({"importance": torch.ones(1, 1, 1, 1, 1, dtype=torch.int32)}, "holds no tensor"),
            ({}, "but nothing"),
            ([1, 2], r"importance \(list\)"),
        ],
    )
    def test_other_files(self, data: Any, match: str, tmp_path: Path) -> None:
        torch.save(data, tmp_path / "a.pt")
        with pytest.raises(BookError, match=match):
            read_importance(tmp_path / "a.pt")

    def test_no_file_of_torch(self, tmp_path: Path) -> None:
        for raw in (b"", b"PK\x03\x04", b"\x80\x02}q\x00.", os.urandom(64)):
            (tmp_path / "a.pt").write_bytes(raw)
            with pytest.raises(BookError, match=r"a\.pt (is no file|holds no tensor)"):
                read_importance(tmp_path / "a.pt")
        with pytest.raises(FileNotFoundError, match="no file"):
            read_importance(tmp_path / "none.pt")


def test_other_models_are_refused(pipe: Any, tmp_path: Path) -> None:
    for wrong, match in (
        ({"model": "wan-t2v-1.3b", "num_frames": 81}, "give the model and size"),
        ({"model": "nope"}, "unknown model"),
    ):
        with pytest.raises(ValueError, match=match):
            import_masks(pipe, rows(), tmp_path / "a.safetensors", blocks=BLOCKS, **(SIZE | wrong))
    with pytest.raises(ValueError, match="two transformers"):
        import_masks(
            tiny.wan(2, experts=2), rows(), tmp_path / "a.safetensors", model="wan2.2-t2v-a14b"
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("build", [tiny.cogvideox, tiny.hunyuan])
def test_models_with_text(build: Callable[[], Any], tmp_path: Path) -> None:
    model = {"cogvideox": "cogvideox-5b", "hunyuan": "hunyuan-video"}[build.__name__]
    pipe = build()
    with pytest.raises(ValueError, match=r"frames, height, width: .*text") as caught:
        import_masks(pipe, rows(), tmp_path / "a.safetensors", model=model, blocks=BLOCKS, **SIZE)
    layers, heads, M, N = (int(n) for n in str(caught.value).split(" has ")[1].split()[:7:2])
    made = import_masks(
        pipe, rows((layers, 2, heads, M, N)), tmp_path / "a.safetensors", model=model,
        blocks=BLOCKS, **SIZE,
    )  # fmt: skip
    side = str(made.grid).split(" + ")
    assert side[0 if model == "cogvideox-5b" else -1].endswith("text")
