"""Kernels of rd against the plain code: errors of sampled rows, and levels by price."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali import Blocks, RateDistortion, TokenGrid, attend, block_layout, kernels
from jali.kernels import load
from jali.kernels.lists import MEAN
from jali.kernels.sampled_errors import sampled_errors
from jali.kernels.score_tiles import Tile
from jali.planning import tradeoff
from jali.planning.distortion import _sampled_errors, encode
from jali.planning.plan import SKIP, BlockPlan
from jali.tokens.padding import KeyPadding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ALL = (2, 4, 8, MEAN, SKIP)


def tokens(b: int, s: int, h: int, d: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A [B,H,S,D] view of BSHD memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, s, h, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)


def rows_of(tokens: int, block: int, samples: int) -> Tensor:
    starts = torch.arange(0, tokens, block)
    return torch.stack(
        [torch.linspace(int(s), min(tokens, int(s) + block) - 1, samples).long() for s in starts]
    ).to(DEVICE)


@pytest.mark.parametrize(
    ("shape", "blocks", "samples", "levels", "tma"),
    [
        ((1, 2, 1, 100, 32), (64, 32), 4, ALL, False),
        ((2, 2, 2, 97, 40), (32, 48), 3, (2, 8, SKIP), True),  # nor head dim a power of two
        ((1, 1, 1, 130, 16), (128, 128), 8, (MEAN, SKIP), True),  # nothing pooled
        ((2, 2, 1, 300, 32), (128, 128), 1, ALL, True),
        ((1, 1, 1, 20, 16), (16, 16), 16, (SKIP,), False),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_errors_of_sampled_rows(
    shape: tuple[int, ...], blocks: tuple[int, int], samples: int, levels: tuple[int, ...],
    tma: bool, padded: bool,
) -> None:  # fmt: skip
    b, h, kv, s, d = shape
    q, k, v = tokens(b, s, h, d, 1), tokens(b, s, kv, d, 2), tokens(b, s, kv, d, 3)
    padding = None
    if padded:
        lengths = tuple([s // 2, s][:b])
        padding = KeyPadding.of_lengths(lengths, torch.device(DEVICE))
        k[0, :, s // 2 :], v[0, :, s // 2 :] = torch.nan, torch.inf  # what is there counts nowhere
    layout = block_layout(TokenGrid.video(1, 1, s), None, None, Blocks(*blocks), 0, k.device)
    at = rows_of(s, blocks[0], samples)
    want = _sampled_errors(q, k, v, layout, d**-0.5, at, levels, padding)
    got = sampled_errors(
        q, k, v, blocks[1], d**-0.5, at, levels, padding and padding.length, tma=tma
    )
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)


def test_a_query_that_is_no_number_is_left_out() -> None:
    q, k, v = (tokens(1, 64, 1, 16, seed) for seed in range(3))
    layout = block_layout(TokenGrid.video(1, 1, 64), None, None, Blocks(32, 16), 0, k.device)
    at = rows_of(64, 32, 2)
    q[0, 0, at[0, 0]] = torch.nan
    got = sampled_errors(q, k, v, 16, 0.25, at, ALL, tile=Tile(16, 16, 4, 1))
    assert got.isfinite().all()
    want = _sampled_errors(q, k, v, layout, 0.25, at[:, 1:], ALL, None)
    torch.testing.assert_close(got[:, :, 0], want[:, :, 0], atol=2e-6, rtol=1e-4)


def plan_by_kernels(*arguments: Any, **options: Any) -> BlockPlan:
    """`choose_plan` as on a GPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tradeoff.kernels, "available", lambda _: True)
        return tradeoff.choose_plan(*arguments, **options)


@functools.cache
def places() -> list[tuple[Any, ...]]:
    """Layouts (with text, with other keys than queries), levels, padding and costs."""
    device = torch.device(DEVICE)
    lengths = KeyPadding.of_lengths((128, 60), device)

    def layout(grid: TokenGrid, keys: TokenGrid | None = None, offset: int | None = 0) -> Any:
        return block_layout(grid, keys, None, Blocks(32, 16), offset, device)

    return [
        (layout(TokenGrid.video(2, 8, 8, text=20)), ALL, None, ()),
        (layout(TokenGrid.video(2, 8, 8)), (MEAN, SKIP), None, ()),
        (layout(TokenGrid.video(1, 1, 100), TokenGrid.video(1, 1, 170), None), (2, SKIP), None, ()),
        (layout(TokenGrid.video(2, 8, 8)), ALL, lengths, ((2, 0.6), (8, 0.2))),
    ]


@pytest.mark.parametrize("place", range(4))
@pytest.mark.parametrize("asked", [{"budget": 0.5}, {"budget": 0.05}, {"price": 0.05}])
def test_levels_by_price(place: int, asked: dict[str, float]) -> None:
    layout, levels, padding, costs = places()[place]
    generator = torch.Generator().manual_seed(place)
    shape = 2, 2, layout.M, layout.N, len(levels)
    errors = torch.rand(shape, generator=generator).pow(6).cumsum(-1)
    errors[torch.rand(shape, generator=generator) < 0.1] = 0  # also where a finer level errs
    table = encode(errors.to(DEVICE), levels)
    ratios = (1, *(level for level in levels if level != SKIP))
    same = {"padding": padding, "costs": costs} | asked
    want = tradeoff.choose_levels(table, layout, **same)
    got = plan_by_kernels(table, layout, ratios, **same)
    assert got.given is not None
    unlike = (got.levels != want).float().mean().item()
    # A logarithm whose last bit differs moves a price by one bin, 0.07 %.
    assert unlike == 0 if DEVICE == "cpu" else unlike < 0.01
    assert got.cost == pytest.approx(BlockPlan(layout, ratios, map=want).cost, abs=0.01)


def test_sums_over_ranks_are_those_of_all_heads() -> None:
    layout, levels, *_ = places()[1]
    errors = torch.rand(1, 4, layout.M, layout.N, len(levels)).pow(6).cumsum(-1).to(DEVICE)
    whole = plan_by_kernels(encode(errors, levels), layout, (1, MEAN), 0.4)
    sums: list[Tensor] = []
    for turn in range(2):  # first each rank's own sums, then with those of both
        parts = [
            plan_by_kernels(
                encode(errors[:, i : i + 2], levels), layout, (1, MEAN), 0.4,
                total_over_ranks=functools.partial(_total, sums, turn),
            )
            for i in (0, 2)
        ]  # fmt: skip
    assert torch.equal(torch.cat([part.levels for part in parts], 1), whole.levels)


def _total(sums: list[Tensor], turn: int, own: Tensor) -> Tensor:
    if turn == 0:
        sums.append(own)
        return own
    return sums[0] + sums[1]


def test_more_levels_than_fit_are_refused() -> None:
    codes = torch.zeros(1, 1, 1, 1, 8, dtype=torch.uint8, device=DEVICE)
    with pytest.raises(ValueError, match="8 levels"):
        load("selection").list_cheapest(
            codes, *(codes.float(),) * 6, tuple(range(8)), 4, has_own=True
        )


BY_KERNELS = {
    "rd": RateDistortion(0.3, samples=3, q_block=32, k_block=16),
    "rd, odd blocks": RateDistortion(price=0.01, q_block=32, k_block=24, levels=(8, "skip")),
    "rd, mixed": RateDistortion(0.3, samples=5, estimate="mixed", q_block=32, k_block=16),
}


@pytest.mark.parametrize("name", BY_KERNELS)
def test_calls_are_planned_as_without_kernels(name: str) -> None:
    """Whole calls, with other keys than queries, text, and values of any strides."""
    q, k = tokens(1, 70, 2, 16, 1), tokens(1, 94, 2, 16, 2)
    v = tokens(1, 94, 2, 16, 3).mT.contiguous().mT
    assert v.stride(-1) != 1
    grids = {"grid": (2, 5, 7), "key_grid": TokenGrid.video(3, 6, 5, text=4)}
    want = attend(q.cpu(), k.cpu(), v.cpu(), method=BY_KERNELS[name], **grids).plan  # type: ignore[arg-type]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "available", lambda _: True)
        got = attend(q, k, v, method=BY_KERNELS[name], **grids).plan  # type: ignore[arg-type]
    assert want is not None
    assert got is not None
    assert (got.levels.cpu() != want.levels).float().mean() < 0.02
