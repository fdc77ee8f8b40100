"""Score kernels against plain fp32 torch, in Triton's interpreter where there is no GPU."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali.kernels.descriptor import matrix_view
from jali.kernels.launch import spec_of
from jali.kernels.score_tiles import Tile, even_splits, fit, head_ranges
from jali.kernels.scores import (
    antidiagonal_scores,
    block_mean_pair,
    block_means,
    mean_scores,
    sampled_peak_scores,
    sampled_scores,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def tokens(b: int, s: int, h: int, d: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """A [B,H,S,D] view of BSHD memory."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(b, s, h, d, generator=generator).to(DEVICE, dtype).transpose(1, 2)


def lengths(batch: int, keys: int, key_length: Tensor | None) -> Tensor:
    full = torch.full((batch,), keys, device=DEVICE)
    return full if key_length is None else torch.minimum(full, key_length.long())


def expand(k: Tensor, heads: int) -> Tensor:
    return k.float().repeat_interleave(heads // k.shape[1], 1)


def block_sum(p: Tensor, block: int) -> Tensor:
    n = -(-p.shape[-1] // block)
    p = torch.nn.functional.pad(p, (0, n * block - p.shape[-1]))
    return p.unflatten(-1, (n, block)).sum(-1)


def spread(length: int, block: int, per_block: int) -> Tensor:
    starts = torch.arange(0, length, block)
    real = torch.clamp(length - starts, max=block)
    offset = (torch.arange(per_block) + 0.5)[None] * real[:, None] / per_block
    return (starts[:, None] + offset.long()).to(DEVICE)


SHAPES = [
    # b, heads, kv heads, sq, sk, d, q_block, k_block
    (1, 2, 1, 200, 300, 32, 64, 32),
    (2, 2, 2, 70, 97, 40, 32, 48),
    (1, 1, 1, 1, 1, 16, 16, 16),
    (1, 1, 1, 96, 160, 16, 48, 64),
]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("padded", [False, True])
def test_sampled_scores(shape: tuple[int, ...], padded: bool) -> None:
    b, h, hk, sq, sk, d, qb, kb = shape
    q, k = tokens(b, sq, h, d, 1), tokens(b, sk, hk, d, 2)
    key_length = torch.tensor([max(1, sk // 2), sk][:b], dtype=torch.int32, device=DEVICE)
    key_length = key_length if padded else None
    positions = spread(sq, qb, 4)
    scale = d**-0.5 * 2
    got = sampled_scores(q, k, qb, kb, scale, positions, key_length)
    logits = q.float()[:, :, positions.flatten()] @ expand(k, h).transpose(2, 3) * scale
    real = torch.arange(sk, device=DEVICE) < lengths(b, sk, key_length)[:, None]
    p = logits.masked_fill(~real[:, None, None], -math.inf).softmax(-1)
    want = block_sum(p, kb).unflatten(2, (-1, 4)).mean(3)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tile", [Tile(32, 16, 4, 2), Tile(16, 64, 4, 2), Tile(64, 128, 4, 2)])
def test_sampled_scores_do_not_depend_on_the_tile(tile: Tile) -> None:
    q, k = tokens(1, 130, 1, 16, 3), tokens(1, 300, 1, 16, 4)
    positions = spread(130, 32, 3)
    want = sampled_scores(q, k, 32, 96, 0.3, positions)
    got = sampled_scores(q, k, 32, 96, 0.3, positions, tile=tile)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def test_large_logits_stay_finite() -> None:
    q, k = tokens(1, 40, 1, 16, 5) * 200, tokens(1, 90, 1, 16, 6) * 200
    got = sampled_scores(q, k, 16, 16, 1.0, spread(40, 16, 2))
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(dtype: torch.dtype) -> None:
    q, k = tokens(1, 64, 2, 32, 7, dtype), tokens(1, 80, 2, 32, 8, dtype)
    positions = spread(64, 32, 4)
    got = sampled_scores(q, k, 32, 16, 0.2, positions)
    want = sampled_scores(q.float(), k.float(), 32, 16, 0.2, positions)
    torch.testing.assert_close(got, want, atol=1e-3, rtol=2e-2)


@pytest.mark.parametrize("padded", [False, True])
def test_block_means_and_mean_scores(padded: bool) -> None:
    q, k = tokens(2, 150, 4, 40, 9), tokens(2, 117, 2, 40, 10)
    key_length = torch.tensor([33, 117], dtype=torch.int32, device=DEVICE) if padded else None
    q_means, k_means = block_means(q, 32), block_means(k, 48, key_length)
    limit = lengths(2, 117, key_length)
    real = (torch.arange(117, device=DEVICE) < limit[:, None]).float()[:, None, :, None]
    total = block_sum((k * real).transpose(2, 3), 48).transpose(2, 3)
    count = block_sum(real.transpose(2, 3), 48).transpose(2, 3)
    want = total / count.clamp(min=1)
    torch.testing.assert_close(k_means, want, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(q_means[:, :, -1], q[:, :, 128:].mean(2), atol=1e-5, rtol=1e-5)
    scores = mean_scores(q_means, k_means, 0.5, key_length, 48 if padded else None)
    dots = q_means @ expand(want, 4).transpose(2, 3) * 0.5
    empty = (count[:, :, :, 0] == 0)[:, :, None, :]
    torch.testing.assert_close(scores, dots.masked_fill(empty, -math.inf), atol=1e-4, rtol=1e-4)


def antidiagonal_reference(
    q: Tensor, k: Tensor, qb: int, kb: int, scale: float, limit: Tensor
) -> Tensor:
    h, sq = q.shape[1:3]
    sk = k.shape[2]
    k = expand(k, h)
    a, c = -(-sq // 8), -(-sk // 8)
    q_index = torch.arange(a * 8, device=DEVICE).clamp(max=sq - 1).view(a, 8).flip(1)
    k_index = torch.arange(c * 8, device=DEVICE).view(c, 8)
    real = (k_index[None] < limit[:, None, None]).float()  # b, c, 8
    groups = k[:, :, k_index.clamp(max=sk - 1)] * real[:, None, :, :, None]
    logits = torch.einsum("bhaid,bhcid->bhac", q.float()[:, :, q_index], groups)
    count = real.sum(-1)[:, None, None]
    logits = logits * scale / count.clamp(min=1) + torch.log(count / 8)
    mass = block_sum(logits.softmax(-1), kb // 8)
    rows = block_sum(mass.transpose(2, 3), qb // 8).transpose(2, 3)
    return rows / rows.sum(-1, keepdim=True)


@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, 200, 301, 16, 64, 32),
        (2, 1, 1, 77, 260, 24, 48, 128),
        (1, 1, 1, 3, 5, 16, 16, 16),
        (1, 1, 1, 129, 1030, 16, 128, 128),
    ],
)
@pytest.mark.parametrize("padded", [False, True])
def test_antidiagonal_scores(shape: tuple[int, ...], padded: bool) -> None:
    b, h, hk, sq, sk, d, qb, kb = shape
    q, k = tokens(b, sq, h, d, 11), tokens(b, sk, hk, d, 12)
    key_length = torch.tensor([sk // 2 + 1, sk][:b], dtype=torch.int32, device=DEVICE)
    key_length = key_length if padded else None
    got = antidiagonal_scores(q, k, qb, kb, 0.9, key_length=key_length)
    want = antidiagonal_reference(q, k, qb, kb, 0.9, lengths(b, sk, key_length))
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)
    torch.testing.assert_close(got.sum(-1), torch.ones_like(got[..., 0]), atol=1e-5, rtol=0)


@pytest.mark.parametrize("tile", [Tile(32, 128, 4, 2, 16), Tile(16, 32, 4, 2, 16)])
def test_antidiagonal_scores_do_not_depend_on_the_tile(tile: Tile) -> None:
    q, k = tokens(1, 300, 1, 32, 13), tokens(1, 600, 1, 32, 14)
    want = antidiagonal_scores(q, k, 64, 96, 0.5)
    got = antidiagonal_scores(q, k, 64, 96, 0.5, tile=tile, band=2)
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def peak_reference(
    q: Tensor,
    k: Tensor,
    scale: float,
    q_positions: Tensor,
    k_positions: Tensor,
    limit: Tensor,
    normalised: bool,
) -> Tensor:
    h = q.shape[1]
    m, n = q_positions.shape[0], k_positions.shape[0]
    rows = q.float()[:, :, q_positions.flatten()]
    columns = expand(k, h)[:, :, k_positions.flatten().clamp(min=0)]
    flat = k_positions.flatten()[None]
    real = (flat >= 0) & (flat < limit[:, None])
    logits = rows @ columns.transpose(2, 3) * scale
    logits = logits.masked_fill(~real[:, None, None], -math.inf)
    peak = logits.unflatten(3, (n, -1)).amax(4)
    top = logits.logsumexp(3) if normalised else logits.amax(3)
    score = (peak - top[..., None]).exp().unflatten(2, (m, -1)).amax(3)
    return score / score.sum(-1, keepdim=True)


@pytest.mark.parametrize("normalised", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(
    "shape",
    [
        (1, 2, 1, 150, 270, 16, 32, 32),
        (2, 1, 1, 96, 200, 24, 48, 64),
        (1, 1, 1, 128, 700, 16, 128, 128),
    ],
)
def test_sampled_peak_scores(shape: tuple[int, ...], padded: bool, normalised: bool) -> None:
    b, h, hk, sq, sk, d, qb, kb = shape
    q, k = tokens(b, sq, h, d, 15), tokens(b, sk, hk, d, 16)
    q_positions = spread(sq, qb, qb // 4)
    offsets = torch.randperm(kb, generator=torch.Generator().manual_seed(1))[: kb // 4]
    k_positions = torch.arange(0, sk, kb)[:, None] + offsets[None]
    k_positions = torch.where(k_positions < sk, k_positions, -1).to(DEVICE, torch.int32)
    key_length = torch.tensor([sk // 2, sk][:b], dtype=torch.int32, device=DEVICE)
    key_length = key_length if padded else None
    got = sampled_peak_scores(
        q, k, qb, kb, 0.7, q_positions, k_positions, key_length, normalised=normalised
    )
    limit = lengths(b, sk, key_length)
    want = peak_reference(q, k, 0.7, q_positions, k_positions, limit, normalised)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)


def test_peak_scores_do_not_depend_on_the_tile() -> None:
    q, k = tokens(1, 64, 1, 16, 17), tokens(1, 530, 1, 16, 18)
    q_positions, k_positions = spread(64, 32, 8), spread(530, 32, 8)
    want = sampled_peak_scores(q, k, 32, 32, 0.7, q_positions, k_positions, normalised=True)
    for tile in (Tile(16, 16, 4, 2), Tile(32, 128, 4, 2)):
        got = sampled_peak_scores(
            q, k, 32, 32, 0.7, q_positions, k_positions, normalised=True, tile=tile
        )
        torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-4)


def headed(b: int, s: int, h: int, d: int, seed: int) -> Tensor:
    """[B,H,S,D] in memory of that order."""
    return tokens(b, s, h, d, seed).contiguous()


@pytest.mark.parametrize("make", [tokens, headed])
@pytest.mark.parametrize("padded", [False, True])
def test_sampled_scores_through_descriptors(make: Callable[..., Tensor], padded: bool) -> None:
    q, k = make(2, 70, 4, 32, 21), make(2, 300, 2, 32, 22)
    key_length = torch.tensor([133, 300], dtype=torch.int32, device=DEVICE) if padded else None
    positions = spread(70, 32, 4)
    tile = Tile(16, 64, 4, 2)
    want, got = (
        sampled_scores(q, k, 32, 48, 0.4, positions, key_length, tile=tile, tma=tma)
        for tma in (False, True)
    )
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("make", [tokens, headed])
@pytest.mark.parametrize("persistent", [0, 1])
@pytest.mark.parametrize(
    ("sq", "sk", "kb"),
    [(200, 304, 32), (136, 600, 128), (72, 160, 96), (77, 160, 32)],  # the last is not in groups
)
def test_antidiagonal_scores_through_descriptors(
    make: Callable[..., Tensor], persistent: int, sq: int, sk: int, kb: int
) -> None:
    q, k = make(2, sq, 2, 32, 23), make(2, sk, 1, 32, 24)
    tile = Tile(16, 32, 4, 2, 16)
    got = antidiagonal_scores(q, k, 64, kb, 0.9, tile=tile, band=2, tma=True, persistent=persistent)
    limit = torch.full((2,), sk, device=DEVICE)
    want = antidiagonal_reference(q, k, 64, kb, 0.9, limit)
    torch.testing.assert_close(got, want, atol=2e-6, rtol=1e-4)


@pytest.mark.parametrize("normalised", [False, True])
def test_peak_scores_through_descriptors(normalised: bool) -> None:
    q, k = tokens(1, 64, 2, 16, 25), tokens(1, 530, 1, 16, 26)
    q_positions, k_positions = spread(64, 32, 8), spread(530, 32, 8)
    want, got = (
        sampled_peak_scores(
            q, k, 32, 32, 0.7, q_positions, k_positions, normalised=normalised, tma=tma
        )
        for tma in (False, True)
    )
    torch.testing.assert_close(got, want, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("dim", [32, 40])
@pytest.mark.parametrize("padded", [False, True])
def test_both_means_in_one_launch(dim: int, padded: bool) -> None:
    q, k = tokens(2, 150, 4, dim, 27), tokens(2, 117, 2, dim, 28)
    key_length = torch.tensor([33, 117], dtype=torch.int32, device=DEVICE) if padded else None
    q_means, k_means = block_mean_pair(q, k, 32, 64, key_length)
    torch.testing.assert_close(q_means, block_means(q, 32, tokens=16))
    torch.testing.assert_close(k_means, block_means(k, 64, key_length, tokens=16))
    torch.testing.assert_close(q_means[:, :, 1], q[:, :, 32:64].mean(2), atol=1e-5, rtol=1e-5)


def test_what_a_descriptor_can_read() -> None:
    x = tokens(2, 64, 3, 16, 29)
    view = matrix_view(spec_of(x), 8)
    assert view is not None
    assert (view.shape, view.stride, view.steps) == ((16, 8 * 48), 8 * 48, (8, 0, 16))
    view = matrix_view(spec_of(x.contiguous()), 8)
    assert view is not None
    assert (view.shape, view.stride, view.steps) == ((48, 128), 128, (24, 8, 0))
    assert matrix_view(spec_of(x[:, :, :63]), 8) is None  # a short last group
    assert matrix_view(spec_of(tokens(2, 63, 3, 16, 29))) is not None
    assert matrix_view(spec_of(x[..., :12].contiguous()[..., :7])) is not None
    assert matrix_view(spec_of(x[..., 1:])) is None  # not aligned


def test_work_is_cut_into_full_waves() -> None:
    assert even_splits(591, 120, 264) == 54  # 11 parts: 1,320 programs are five full waves
    assert even_splits(1, 1, 264) == 1
    assert even_splits(64, 768, 264) == 64  # enough programs as it is
    for tiles in (2, 3, 5, 9):
        assert 1 <= even_splits(tiles, 2, 264) <= tiles


def test_heads_are_split_when_scratch_is_large() -> None:
    assert head_ranges(12, 1) == [(0, 12)]
    parts = head_ranges(12, 20 * 1024 * 1024)
    assert [h for start, stop in parts for h in range(start, stop)] == list(range(12))
    assert len(parts) > 1
    assert head_ranges(3, 10**12) == [(0, 1), (1, 2), (2, 3)]


def test_tiles_shrink_to_the_shared_memory_there_is() -> None:
    tile = fit(Tile(128, 128, 8, 4), 512, 99 * 1024, resident=True)
    assert (tile.rows + tile.stages * tile.keys) * 512 <= 99 * 1024
    with pytest.raises(ValueError, match="power of two"):
        Tile(rows=48)


def test_refuses_what_it_cannot_score() -> None:
    q, k = tokens(1, 32, 2, 16, 19), tokens(1, 32, 2, 16, 20)
    with pytest.raises(ValueError, match="scale"):
        sampled_scores(q, k, 16, 16, 0.0, spread(32, 16, 2))
    with pytest.raises(ValueError, match="positions"):
        sampled_scores(q, k, 16, 16, 1.0, spread(16, 16, 2))
    with pytest.raises(ValueError, match="belong together"):
        sampled_scores(q, tokens(1, 32, 3, 16, 20), 16, 16, 1.0, spread(32, 16, 2))
