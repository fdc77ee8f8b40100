"""Section 8 of the PSA specification: each defect of the original, and that it is not here.

D8 (a step counted from calls), D12 to D15 (logging, packaging) have no place in the data path.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import jali
from jali import (
    BlockPlan,
    Blocks,
    Box,
    Psa,
    Raster,
    Schedule,
    Site,
    Text,
    Tiled,
    TokenGrid,
    attend,
    block_layout,
)
from jali.backends import BACKENDS
from jali.methods import sampling
from jali.methods.sampling import jittered_positions
from oracle import pooled_attention, relative, tensors


@pytest.mark.parametrize(("k_block", "ratio"), [(64, 8), (32, 4), (32, 8), (16, 8)])
@pytest.mark.parametrize("backend", ["torch", "reference"])
def test_defect_psa_d1_small_pooled_blocks_read_their_own_keys(
    k_block: int, ratio: int, backend: str
) -> None:
    """The original filled a tile of 32 keys with rows of the sequence's start."""
    q, k, v = tensors(64, 640, dtype=torch.float64)
    layout = block_layout(TokenGrid.flat(64), TokenGrid.flat(640), blocks=Blocks(64, k_block))
    levels = torch.zeros(1, 2, 1, layout.N, dtype=torch.int64)
    levels[..., 3::2] = ratio
    plan = BlockPlan.from_levels(levels, layout)
    out, _ = BACKENDS[backend].attend(q, k, v, plan, 0.25)
    assert relative(out, pooled_attention(q, k, v, levels, 64, k_block, 0.25)) < 1e-12
    # What is skipped does not matter, whatever it holds.
    k2, v2 = k.clone(), v.clone()
    k2[:, :, : 3 * k_block], v2[:, :, : 3 * k_block] = 7.0, -9.0
    again, _ = BACKENDS[backend].attend(q, k2, v2, plan, 0.25)
    assert torch.equal(out, again)


def test_defect_psa_d2_leaving_out_a_level_does_not_shift_the_others() -> None:
    """The README's own sample (levels 1, 2, 4, 0) ran skipped blocks as ratio 8."""
    q, k, v = tensors(1280)
    sample = {1: (0.0, 0.4), 2: (0.4, 0.6), 4: (0.6, 0.8), 0: (0.8, 1.0)}
    method = Psa(sample, q_block=128, k_block=64, order=Raster())
    plan = attend(q, k, v, method=method).plan
    assert plan is not None
    assert set(plan.levels.unique().tolist()) == {0, 1, 2, 4}
    assert 8 not in plan.ratios
    count = (plan.levels[..., None] == torch.tensor([1, 2, 4, 0])).sum(-2)
    assert (count == torch.tensor([8, 4, 4, 4])).all()
    shuffled = Psa(dict(reversed(sample.items())), q_block=128, k_block=64, order=Raster())
    again = attend(q, k, v, method=shuffled).plan
    assert again is not None
    assert torch.equal(plan.levels, again.levels)


@pytest.mark.parametrize(
    "order", [Raster(), None, Tiled((2, 4, 4))], ids=["raster", "gilbert", "tiled"]
)
@pytest.mark.parametrize("side", ["front", "back"])
@pytest.mark.parametrize("mode", ["topk", "thresholdbound"])
def test_defect_psa_d3_text_is_protected_wherever_it_lies(
    order: object, side: str, mode: str
) -> None:
    grid = TokenGrid.video(4, 9, 10, text=37, text_side=side)
    q, k, v = tensors(grid)
    options = {} if order is None else {"order": order}
    ranges = {1: (0, 0.05), 8: (0.05, 0.1), 0: (0.1, 1)}
    method = Psa(ranges, mode, q_block=32, k_block=16, **options)  # type: ignore[arg-type]
    plan = attend(q, k, v, method=method, grid=grid).plan
    assert plan is not None
    layout = plan.layout
    text = set(range(37)) if side == "front" else set(range(360, 397))
    index = range(397) if layout.q.index is None else layout.q.index.tolist()
    for slot, token in enumerate(index):
        if token in text:
            assert (plan.levels[..., slot // 16] == 1).all(), "a text key is not read in full"
            assert (plan.levels[:, :, slot // 32] == 1).all(), "a text query does not read all"
    assert plan.density < 1


@pytest.mark.parametrize("tokens", [900, 121, 65])
def test_defect_psa_d4_the_tail_counts_real_tokens(tokens: int) -> None:
    """The original repeated the last token up to a whole block and counted each copy."""
    q, k, v = tensors(64, tokens, dtype=torch.float64)
    k[:, :, -1] *= 4  # a tail counted too often would be seen
    layout = block_layout(TokenGrid.flat(64), TokenGrid.flat(tokens), blocks=Blocks(64, 128))
    levels = torch.full((1, 2, 1, layout.N), 8)
    plan = BlockPlan.from_levels(levels, layout)
    for backend in ("torch", "reference"):
        out, _ = BACKENDS[backend].attend(q, k, v, plan, 0.25)
        assert relative(out, pooled_attention(q, k, v, levels, 64, 128, 0.25)) < 1e-12


@pytest.mark.parametrize("bound", [0.0, 1e-9, 0.001])
@pytest.mark.parametrize("grids", ["own", "other"])
def test_defect_psa_d5_tiny_quotas_leave_no_empty_row(bound: float, grids: str) -> None:
    q, k, v = tensors(200, 200 if grids == "own" else 333)
    method = Psa({1: (0, bound), 0: (bound, 1)}, q_block=32, k_block=16)
    result = attend(q, k, v, method=method)
    assert result.plan is not None
    assert (result.plan.levels != 0).any(-1).all()
    assert result.out.isfinite().all()


def test_defect_psa_d6_defaults_and_every_combination_run() -> None:
    """There the default constructor raised, and so did two of the orders."""
    q, k, v = tensors(360)
    grid = TokenGrid.video(4, 9, 10)  # not divisible by the tile, on any axis
    for order in (None, Raster(), Tiled((2, 8, 8)), Tiled((4, 4, 8))):
        for mode in ("topk", "thresholdbound"):
            for similarity in (None, (0.7, 0.65, 0.6)):
                options = {} if order is None else {"order": order}
                method = Psa(mode=mode, similarity=similarity, **options)  # type: ignore[arg-type]
                assert attend(q, k, v, method=method, grid=grid).out.isfinite().all()
    assert attend(q, k, v, method="psa").out.isfinite().all()


def test_defect_psa_d7_no_deprecated_triton_block_pointers() -> None:
    source = Path(jali.__file__).parent
    for path in source.rglob("*.py"):
        assert "make_block_ptr" not in path.read_text(), path


def test_defect_psa_d9_warm_up_may_be_a_share_of_the_steps() -> None:
    """15 dense steps made every run of fewer steps fully dense, silently."""
    schedule = Schedule(Psa(), dense_steps=0.3)
    for steps in (4, 10, 50):
        active = [schedule.active(Site(s, steps), 10_000) for s in range(steps)]
        assert sum(not a for a in active) == math.ceil(0.3 * steps)
        assert active[-1]


def test_defect_psa_d10_sampling_is_seeded_and_differs_between_blocks() -> None:
    q, k, v = tensors(640)
    torch.manual_seed(1)
    sampling._of_all_layers.cache_clear()  # remembered positions would hide a global generator
    first = attend(q, k, v, method=Psa(), site=Site(2, 5)).out
    torch.manual_seed(2)
    torch.rand(100)
    sampling._of_all_layers.cache_clear()
    assert torch.equal(first, attend(q, k, v, method=Psa(), site=Site(2, 5)).out)
    cpu = torch.device("cpu")
    picks = {
        key: jittered_positions(640, 64, 16, *key, cpu)
        for key in ((0, Site(2, 5)), (1, Site(2, 5)), (0, Site(3, 5)), (0, Site(2, 5, 1, 2)))
    }
    values = list(picks.values())
    assert all(not torch.equal(values[0], other) for other in values[1:])
    offsets = values[0] - 64 * torch.arange(10)[:, None]
    assert len({tuple(row) for row in offsets.tolist()}) == 10


@pytest.mark.parametrize("shape", [(4, 9, 11), (4, 9, 9), (1, 9, 10)])
def test_defect_psa_d11_the_grid_must_be_that_of_the_tokens(shape: tuple[int, int, int]) -> None:
    q, k, v = tensors(360)
    with pytest.raises(ValueError, match="the tensor has 360"):
        attend(q, k, v, method=Psa(), grid=shape)
    with pytest.raises(ValueError, match="the tensor has 360"):
        attend(q, k, v, method=Psa(), grid=TokenGrid((Text(1), Box(4, 9, 10))))
