"""Other grids, steps and blocks; two books in one."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import books
import numpy as np
import pytest
import torch

from jali.maskbook import Fingerprint, MaskBook, write_book
from jali.maskbook.quantization import ERROR, OCTAVES
from jali.maskbook.resample import schedule_like
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import Blocks
from jali.tokens.order import Gilbert, Tiled

BELOW = 2.0 ** (1 - OCTAVES)  # what is smaller than this share of a row is rounded away


def importance(book: MaskBook) -> torch.Tensor:
    h = book.header
    return torch.stack(
        [torch.stack([book.importance(s, la) for la in range(h.layers)]) for s in range(h.steps)]
    )


class TestGrid:
    def test_its_own_grid_changes_nothing(self) -> None:
        made = books.make(None)
        again = made.resample(made.grid)
        x, y = importance(made), importance(again)
        assert torch.allclose(x, y, rtol=2 * ERROR, atol=BELOW)
        for budget in made.budgets:
            assert again.cost(budget) == pytest.approx(made.cost(budget), abs=1e-6)

    @pytest.mark.parametrize("order", [None, Tiled((1, 2, 4)), Gilbert()], ids=str)
    @pytest.mark.parametrize("grid", [(3, 8, 18), (6, 4, 9), (2, 3, 5), (1, 1, 1), (5, 7, 11)])
    def test_rows_still_sum_to_one(self, grid: tuple[int, int, int], order: Any) -> None:
        changes = {} if order is None else {"order": order}
        made = books.make(None, **changes).resample(grid)
        x = importance(made)
        assert x.shape[-2:] == (made.header.M, made.header.N)
        assert torch.allclose(x.sum(-1), torch.ones(()), atol=3 * ERROR)
        made.verify()

    def test_twice_the_size_doubles_every_block(self) -> None:
        """Blocks that are whole frames: a second frame for each sees what the first one saw."""
        made = books.make(None, grid=TokenGrid.video(4, 4, 4), blocks=Blocks(16, 16))
        more = made.resample((8, 4, 4))
        x, y = importance(made), importance(more)
        want = x.repeat_interleave(2, -2).repeat_interleave(2, -1) / 2
        assert torch.allclose(y, want, rtol=3 * ERROR, atol=BELOW)
        back = more.resample((4, 4, 4))
        assert torch.allclose(importance(back), x, rtol=5 * ERROR, atol=BELOW)

    def test_finer_pictures_of_the_same_scene(self) -> None:
        """A head that looks at its own column does so at twice the resolution too."""
        header = replace(
            books.SMALL, grid=TokenGrid.video(1, 1, 8), blocks=Blocks(1, 1), heads=1, layers=1
        )
        x = torch.eye(8).expand(4, 1, 1, 1, 8, 8)
        made = write_book(None, header, lambda s, la: x[s, la]).resample((1, 1, 16))
        want = torch.block_diag(*[torch.full((2, 2), 0.5)] * 8)
        assert torch.allclose(made.importance(0, 0)[0], want, atol=1e-6)

    def test_text_keeps_its_share(self) -> None:
        grid = TokenGrid.video(2, 4, 8, text=16)
        made = books.make(None, grid=grid, blocks=Blocks(16, 16))
        more = made.resample((2, 8, 8))
        assert str(more.grid) == "16 text + 2×8×8"
        x, y = importance(made), importance(more)
        assert torch.allclose(x[..., 0, 0], y[..., 0, 0], rtol=3 * ERROR)
        longer = made.resample(TokenGrid.video(2, 4, 8, text=32))
        got = importance(longer)[..., 0, :2].sum(-1)
        assert torch.allclose(got, x[..., 0, 0], rtol=3 * ERROR)

    def test_other_blocks(self) -> None:
        made = books.make(None, grid=TokenGrid.video(4, 4, 4), blocks=Blocks(16, 16))
        fine = made.resample(blocks=Blocks(8, 8))
        assert fine.header.blocks == Blocks(8, 8)
        want = importance(made).repeat_interleave(2, -2).repeat_interleave(2, -1) / 2
        assert torch.allclose(importance(fine), want, rtol=3 * ERROR, atol=BELOW)

    @pytest.mark.parametrize(
        ("grid", "match"),
        [
            ((0, 4, 4), "at least 1"),
            ((4, 4), "triple"),
            (TokenGrid.video(3, 4, 9, text=4), "other segments"),
        ],
    )
    def test_refused(self, grid: Any, match: str) -> None:
        with pytest.raises((ValueError, TypeError), match=match):
            books.make(None).resample(grid)

    def test_nothing_asked(self) -> None:
        with pytest.raises(ValueError, match="needs a grid, steps or blocks"):
            books.make(None).resample()


class TestSteps:
    def test_by_noise_level(self) -> None:
        made = books.make(None)  # 1.0, 0.8, 0.5, 0.1
        at = made.resample(steps=[0.9, 0.5, 0.3, 0.05])
        x, y = importance(made), importance(at)
        for got, want in (
            (y[0], (x[0] + x[1]) / 2),
            (y[1], x[2]),
            (y[2], (x[2] + x[3]) / 2),
            (y[3], x[3]),
        ):
            assert torch.allclose(got, want, rtol=3 * ERROR, atol=BELOW)
        assert at.header.noise == (0.9, 0.5, 0.3, 0.05)
        assert not at.header.noise_assumed

    def test_the_same_levels_change_nothing(self) -> None:
        made = books.make(None)
        again = made.resample(steps=made.header.noise)
        assert torch.allclose(importance(again), importance(made), rtol=2 * ERROR, atol=BELOW)

    def test_by_count(self) -> None:
        made = books.make(None).resample(steps=7)
        assert made.steps == 7
        assert list(made.header.noise) == sorted(made.header.noise, reverse=True)
        assert made.header.noise_assumed
        assert "steps 4 to 7" in made.header.history[0]

    def test_experts_are_not_mixed(self) -> None:
        marks = {n: Fingerprint("Wan", "0" * 64) for n in ("transformer", "transformer_2")}
        names = ("transformer", "transformer", "transformer_2", "transformer_2")
        made = books.make(None, fingerprints=marks, transformers=names)
        x = importance(made)
        at = made.resample(steps=[0.7, 0.6])
        assert at.header.transformers == ("transformer", "transformer_2")
        y = importance(at)
        assert torch.allclose(y[0], x[1], rtol=2 * ERROR, atol=BELOW)
        assert torch.allclose(y[1], x[2], rtol=2 * ERROR, atol=BELOW)

    @pytest.mark.parametrize("steps", [0, -1, True, [], [float("nan")], 10**6])
    def test_refused(self, steps: Any) -> None:
        with pytest.raises((ValueError, TypeError), match=r"steps|levels"):
            books.make(None).resample(steps=steps)

    @pytest.mark.parametrize("shift", [1.0, 3.0, 7.0])
    @pytest.mark.parametrize(("old", "new"), [(10, 20), (50, 20), (10, 5), (4, 9)])
    def test_levels_of_flow_schedulers(self, shift: float, old: int, new: int) -> None:
        from diffusers import FlowMatchEulerDiscreteScheduler, UniPCMultistepScheduler

        from jali.maskbook.noise import noise_levels

        for make in (
            lambda: FlowMatchEulerDiscreteScheduler(shift=shift),
            lambda: UniPCMultistepScheduler(
                prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=shift
            ),
        ):
            levels = []
            for steps in (old, new):
                scheduler = make()
                scheduler.set_timesteps(steps)
                found = noise_levels(scheduler, steps)
                assert found is not None
                assert found[0] == "sigma"
                levels.append(found[1])
            assert np.allclose(schedule_like(levels[0], new), levels[1], atol=2e-3)

    def test_a_crooked_schedule_stays_inside_its_levels(self) -> None:
        levels = schedule_like((14.6, 9.0, 8.9, 1.0, 0.03), 9)
        assert len(levels) == 9
        assert max(levels) <= 14.6
        assert min(levels) >= 0.03


class TestMerge:
    def test_a_mean_over_all_prompts(self) -> None:
        a = books.make(None, seed=1, prompts=("a" * 32, "b" * 32, "c" * 32))
        b = books.make(None, seed=2, prompts=("d" * 32,), budgets=(0.7,))
        both = a.merge(b)
        want = (3 * importance(a) + importance(b)) / 4
        assert torch.allclose(importance(both), want, rtol=2 * ERROR, atol=BELOW)
        assert both.budgets == (0.3, 0.5, 0.7)
        assert len(both.header.prompts) == 4
        other = importance(b.merge(a))
        assert torch.allclose(importance(both), other, rtol=2 * ERROR, atol=BELOW)

    @pytest.mark.parametrize(
        ("changes", "match"),
        [
            ({"grid": TokenGrid.video(3, 4, 8)}, r"grid is 3×4×9 in one book and 3×4×8"),
            ({"blocks": Blocks(8, 8)}, "blocks is 16×8 in one book and 8×8.*resample"),
            ({"noise": (1.0, 0.5), "transformers": ("transformer",) * 2}, "steps is 4"),
            ({"noise": (1.0, 0.9, 0.5, 0.1)}, "noise levels"),
            ({"heads": 4}, "heads is 3"),
            ({"branches": ("cond", "uncond")}, "branches"),
            ({"scorer": "other"}, "scorer"),
            ({"prompts": ("a" * 32,)}, "count twice"),
            ({"fingerprints": {"transformer": Fingerprint("Other", "0" * 64)}}, "models.*Other"),
            ({"fingerprints": {"transformer": Fingerprint("WanTransformer3DModel", "1" * 64)}},
             "configuration"),
            ({"fingerprints": {"transformer": Fingerprint("WanTransformer3DModel", "0" * 64,
                                                          {"w": (0.1, -1)})}}, "w holds 0.5"),
        ],
        ids=str,
    )  # fmt: skip
    def test_refused(self, changes: dict[str, Any], match: str) -> None:
        a = books.make(None)
        with pytest.raises(ValueError, match=match):
            a.merge(books.make(None, **{"prompts": ("z" * 32,), **changes}))

    def test_to_a_file(self, tmp_path: Path) -> None:
        a, b = books.make(None), books.make(None, prompts=("z" * 32,))
        made = a.merge(b, output=tmp_path / "ab.safetensors")
        assert MaskBook.open(tmp_path / "ab.safetensors").digest == made.digest
        assert os.listdir(tmp_path) == ["ab.safetensors"]
