"""Section 6 of the rf_v2 and ada_bsa specification: each defect, and that it is not here.

(14 is about another part of the original.)
"""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch

import jali.functional
from jali import (
    AdaBsa,
    BlockPlan,
    Box,
    FrameWindows,
    RfV2,
    Tiled,
    TokenGrid,
    attend,
    sparse_attention,
)
from oracle import relative, sdpa, tensors


def plan_of(method: object, *given: torch.Tensor, **more: object) -> BlockPlan:
    plan = attend(*given, method=method, **more).plan  # type: ignore[arg-type]
    assert plan is not None
    return plan


@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
@pytest.mark.parametrize("layout", ["BNSD", "BSND"])
def test_defect_mindie_1_every_sample_has_its_own_mask(sparse_type: str, layout: str) -> None:
    q, k, v = tensors(2048, B=3, H=2)
    move = (lambda x: x) if layout == "BNSD" else (lambda x: x.transpose(1, 2))
    options = {"sparse_type": sparse_type, "sparsity": 0.7, "head_num": 2, "input_layout": layout}
    together = move(sparse_attention(*map(move, (q, k, v)), **options))
    for b in range(3):
        alone = sparse_attention(*(move(x[b : b + 1]) for x in (q, k, v)), **options)
        torch.testing.assert_close(together[b : b + 1], move(alone))
    method = RfV2(0.7) if sparse_type == "rf_v2" else AdaBsa(0.7)
    levels = plan_of(method, q, k, v).levels
    assert not torch.equal(levels[0], levels[1])


@pytest.mark.parametrize(("shape", "text"), [((5, 9, 10), 77), ((13, 10, 15), 226), ((3, 7, 7), 1)])
def test_defect_mindie_2_text_beside_an_unaligned_video(
    shape: tuple[int, int, int], text: int
) -> None:
    """Every text token is protected, and no list points past the keys."""
    grid = TokenGrid.video(*shape, text=text)
    q, k, v = tensors(grid)
    plan = plan_of(RfV2(0.9), q, k, v, grid=grid)
    layout = plan.layout
    assert layout.q.index is not None
    for slot, token in enumerate(layout.q.index.tolist()):
        if token < text:
            assert (plan.levels[..., slot // 128] == 1).all()
            assert (plan.levels[:, :, slot // 128] == 1).all()
    blocks = -(-grid.tokens // 128)
    assert plan.levels.shape[2:] == (blocks, blocks)
    assert (plan.lists[1].indices < blocks).all()
    out = sparse_attention(
        q, k, v, sparse_type="rf_v2", sparsity=0.0, txt_len=text, latent_shape_q=list(shape)
    )
    assert relative(out, sdpa(q, k, v)) < 5e-6


@pytest.mark.parametrize("shape", [(1, 64, 64), (1, 63, 65)])
def test_defect_mindie_3_images_stay_sparse(shape: tuple[int, int, int]) -> None:
    grid = TokenGrid.of(shape)
    q, k, v = tensors(grid, H=1)
    assert plan_of(RfV2(0.6), q, k, v, grid=grid).density == pytest.approx(0.4, abs=0.02)
    assert plan_of(RfV2(0.6, first_frame=True), q, k, v, grid=grid).density == 1
    two = TokenGrid.video(2, 32, 32)
    q, k, v = tensors(two, H=1)
    free = plan_of(RfV2(0.6, first_frame=False), q, k, v, grid=two).density
    assert free == pytest.approx(0.4, abs=0.04)


def boxes(positions: np.ndarray, shape: tuple[int, int, int]) -> np.ndarray:
    place = np.stack(np.unravel_index(positions, shape))
    whole = len(positions) // 128 * 128
    parts = place[:, :whole].reshape(3, -1, 128)
    return np.prod(parts.max(-1) - parts.min(-1) + 1, axis=0)


@pytest.mark.parametrize("shape", [(21, 45, 80), (21, 30, 52), (13, 30, 45)])
def test_defect_mindie_4_windows_stay_on_the_block_grid(shape: tuple[int, int, int]) -> None:
    """There hardly a block was whole windows at 45 × 80; here all are, but for the strips."""
    grid = TokenGrid.of(shape)
    original = boxes(FrameWindows().positions(grid), shape)
    ours = boxes(Tiled((2, 8, 8), first_frame_last=True).positions(grid), shape)
    whole = (shape[0] - 1) // 2 * (shape[1] // 8) * (shape[2] // 8)
    assert (ours[:whole] == 128).all()
    assert (ours == 128).mean() > 0.6
    assert ours.mean() < 0.8 * original.mean()


@pytest.mark.parametrize(
    ("shape", "sparsity"),
    [((1, 9, 13), 0.5), ((2, 5, 30), 0.5), ((2, 30, 5), 0.5), ((3, 16, 16), 1.0), ((1, 1, 1), 1.0)],
)
def test_defect_mindie_5_odd_shapes_run(shape: tuple[int, int, int], sparsity: float) -> None:
    q, k, v = tensors(math.prod(shape))
    options = {"sparse_type": "rf_v2", "sparsity": sparsity}
    for given in (list(shape), None):
        out = sparse_attention(q, k, v, latent_shape_q=given, latent_shape_k=given, **options)
        assert out.isfinite().all()


def test_defect_mindie_5_other_keys_and_grouped_heads_run() -> None:
    q, k, v = tensors(2 * 8 * 8, 3 * 8 * 9, H=6, kv=2)
    out = sparse_attention(
        q, k, v, sparse_type="rf_v2", latent_shape_q=[2, 8, 8], latent_shape_k=[3, 8, 9]
    )
    assert relative(out, sdpa(q, k, v)) < 5e-6
    with pytest.raises(ValueError, match="latent_shape_k"):
        sparse_attention(q, k, v, sparse_type="rf_v2", latent_shape_k=[3, 8, 8])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_defect_mindie_6_no_tie_inflation(dtype: torch.dtype) -> None:
    """Scores in half precision tie; the original kept every tie. Ours keeps what was asked."""
    grid = TokenGrid.video(1, 64, 64)
    q, k, v = tensors(grid, H=4, D=64, dtype=dtype, spread=1.0)
    asked = math.ceil(128 * 0.2)
    method = RfV2(0.8, block_size=32, first_frame=False)
    assert (plan_of(method, q, k, v, grid=grid).levels.sum(-1) == asked).all()
    video = TokenGrid.video(64, 8, 8)  # compat always protects the first frame: 2 of 128 blocks
    compat = plan_of(RfV2(0.8, block_size=32, compat=True), q, k, v, grid=video).levels
    inflated = compat[:, :, 2:, 2:].float().mean()
    exact = plan_of(
        RfV2(0.8, block_size=32, compat=True), q.float(), k.float(), v.float(), grid=video
    )
    factor = 1.1 if dtype == torch.bfloat16 else 1.005
    assert inflated > factor * exact.levels[:, :, 2:, 2:].float().mean()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_defect_mindie_6_ties_go_to_the_lower_block(dtype: torch.dtype) -> None:
    q, k, v = (torch.ones(1, 1, 320, 16, dtype=dtype) for _ in "qkv")
    plan = plan_of(RfV2(0.7, block_size=32, first_frame=False), q, k, v)
    for m in range(10):
        wanted = {0, 1, 2} if m < 3 else {0, 1, m}
        assert set(plan.levels[0, 0, m].nonzero().flatten().tolist()) == wanted


@pytest.mark.parametrize(("blocks", "kept"), [(10, 3), (1000, 300)])
def test_defect_mindie_7_counts_are_exact(blocks: int, kept: int) -> None:
    q, k, v = tensors(blocks * 8, H=1, D=8)
    plan = plan_of(RfV2(0.7, block_size=8, first_frame=False), q, k, v)
    assert (plan.levels.sum(-1) == kept).all()
    assert math.ceil(blocks * (1 - 0.7)) == kept + 1, "floats alone would keep one more"
    assert plan.density == pytest.approx(0.3)


def test_defect_mindie_7_forced_blocks_are_inside_the_budget_and_reported() -> None:
    grid = TokenGrid.video(16, 16, 16, text=64)
    q, k, v = tensors(grid)
    plan = plan_of(RfV2(0.7), q, k, v, grid=grid)
    layout = plan.layout
    plain = ~(layout.text_rows | layout.first_rows)
    kept = plan.levels[:, :, plain].sum(-1)
    assert (kept == math.ceil(0.3 * layout.N - 1e-9)).all()
    assert plan.density == pytest.approx(float((plan.levels > 0).float().mean()))


@pytest.mark.parametrize("method", [RfV2(0.95, 32), RfV2(1.0, 32), AdaBsa(0.95, block_size=32)])
def test_defect_mindie_8_a_block_always_reads_itself(method: object) -> None:
    q, _, v = tensors(640)
    plan = plan_of(method, q, -q, v)
    assert (plan.levels[..., range(20), range(20)] == 1).all()


def test_defect_mindie_9_flags_do_what_they_say() -> None:
    q, k, v = tensors(20 * 16, H=2)

    def kept(**options: object) -> torch.Tensor:
        return plan_of(AdaBsa(**{"sparsity": 0.8, "block_size": 16, **options}), q, k, v).levels  # type: ignore[arg-type]

    assert (kept()[..., 0] == 1).all()
    assert (kept()[..., -1] == 1).all()
    assert not (kept(keep_sink=False)[..., 0] == 1).all(), "keep_sink=False must let block 0 go"
    assert not (kept(keep_recent=False)[..., -1] == 1).all(), "keep_recent must have an effect"
    assert (kept(sparsity=1.0, keep_sink=False, keep_recent=False).sum(-1) == 1).all()
    q, k, v = tensors(9 * 16, H=2)
    assert kept(keep_sink=False, keep_recent=False).float().mean() == pytest.approx(2 / 9)


def test_defect_mindie_9_the_last_keys_count() -> None:
    """A tail of fewer than 8 keys was ignored by the estimate."""
    q, k, v = tensors(16 * 6, 16 * 12 + 3, H=1)
    q[:] = 0
    q[..., 0] = 8.0
    k[:] = 0
    k[:, :, -3:, 0] = 8.0
    plan = plan_of(AdaBsa(0.9, keep_sink=False, keep_recent=False, block_size=16), q, k, v)
    assert (plan.levels[..., -1] == 1).all()
    assert plan.levels.shape[-1] == 13, "the mask is sized by the keys"


def test_defect_mindie_10_mass_in_the_sink_does_not_make_a_row_dense() -> None:
    """Forced blocks count inside the threshold: a row whose mass lies there reads little."""
    q, k, v = tensors(20 * 16, H=1)
    k = k * 0.001
    k[:, :, :16, 0] = 30.0
    q[..., 0] = 10.0
    rows = plan_of(AdaBsa(0.0, 0.9, block_size=16), q, k, v).levels[0, 0].sum(-1)
    assert rows.max() <= 3  # sink, recent, own
    original = plan_of(AdaBsa(0.0, 0.9, block_size=16, compat=True), q, k, v).levels[0, 0].sum(-1)
    assert original.max() > 15


@pytest.mark.parametrize("threshold", [0.999, 0.99999, 1 - 1e-7])
def test_defect_mindie_10_thresholds_near_one_keep_nearly_all(threshold: float) -> None:
    q, k, v = tensors(64 * 16, H=2, spread=0.05)
    plan = plan_of(AdaBsa(0.0, threshold, block_size=16), q, k, v)
    assert plan.density > 0.95


@pytest.mark.parametrize("sparse_type", ["rf_v2", "ada_bsa"])
def test_defect_mindie_11_bsnd_is_bnsd_and_no_call_depends_on_another(sparse_type: str) -> None:
    q, k, v = tensors(900, H=3, B=2)
    options = {"sparse_type": sparse_type, "sparsity": 0.5, "head_num": 3}
    first = sparse_attention(q, k, v, **options)
    sparse_attention(*tensors(100, H=3), **options)
    sparse_attention(*tensors(2000, H=3), **options)
    moved = (x.transpose(1, 2).contiguous() for x in (q, k, v))
    again = sparse_attention(*moved, input_layout="BSND", **options).transpose(1, 2)
    assert torch.equal(first, again)


@pytest.mark.parametrize(
    "option",
    [{"is_causal": True}, {"attn_mask": torch.ones(1, 3)}, {"sparsty": 0.5}, {"head_num": 7}],
)
def test_defect_mindie_12_nothing_is_silently_ignored(option: dict[str, object]) -> None:
    q, k, v = tensors(300, H=2)
    with pytest.raises((ValueError, TypeError)):
        sparse_attention(q, k, v, sparse_type="rf_v2", **option)


def test_defect_mindie_13_no_copies_of_q_k_v_beyond_the_gathers() -> None:
    """q, k, v are neither concatenated nor pooled together; indices are int32."""
    q, k, v = tensors(4 * 16 * 16)
    plan = plan_of(RfV2(0.5), q, k, v, grid=(4, 16, 16))
    assert plan.lists[1].indices.dtype == torch.int32
    raster = plan_of(RfV2(0.5), q, k, v)
    assert raster.layout.q.index is None, "one row needs no gather at all"


def test_defect_mindie_15_runs_where_there_is_no_npu() -> None:
    code = (
        "import sys, torch\nfrom jali import sparse_attention\n"
        "assert not [m for m in sys.modules if 'npu' in m and 'torch_npu' in m]\n"
        "x = torch.randn(1, 2, 300, 16)\n"
        "print(tuple(sparse_attention(x, x, x, sparse_type='rf_v2', sparsity=0.5).shape))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "(1, 2, 300, 16)", done.stderr


def test_defects_are_about_the_same_names() -> None:
    assert jali.functional.SPARSE_TYPES[:3] == (None, "rf_v2", "ada_bsa")
    assert TokenGrid.of((1, 2, 3)).segments == (Box(1, 2, 3),)
