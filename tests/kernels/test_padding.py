"""No kernel lets anything of a padded key or value through: 0 · NaN is NaN."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali.kernels import scores
from jali.kernels.attention import Config, block_sparse_attention
from jali.kernels.launch import spec_of
from jali.kernels.pooling import pool_launch
from jali.planning.plan import list_blocks
from jali.planning.scoring import sample_positions

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SEQ, LENGTHS = 90, (0, 37, 64)


def same_whatever_is_padded(call: Callable[..., tuple[Tensor, ...]], dtype: torch.dtype) -> None:
    """`call(q, k, v, key_length)` gives the same bits over zeros, and over NaN and infinities."""
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(3, 1, SEQ, 16, generator=make).to(DEVICE, dtype) for _ in "qkv")
    length = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    token = torch.arange(SEQ, device=DEVICE)
    real = (token < length[:, None])[:, None, :, None]
    junk = torch.where(token % 2 == 0, torch.nan, torch.inf)[:, None].to(dtype)
    clean, other = (
        call(q, torch.where(real, k, filling), torch.where(real, v, filling), length)
        for filling in (torch.zeros_like(junk), junk)
    )
    for a, b in zip(clean, other, strict=True):
        assert not a.isnan().any()
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("levels", "config"),
    [
        ((1, 1, 1), Config(32, 16)),
        ((1, 1, 1), Config(32, 64)),
        ((1, 1, 1), Config(32, 32, tma=True)),
        ((2, 8, 4), Config(32, 16)),
    ],
    ids=("narrow tiles", "wide tiles", "descriptors", "pooled"),
)
def test_attention(levels: tuple[int, ...], config: Config) -> None:
    plan = torch.tensor(levels, dtype=torch.uint8, device=DEVICE).view(1, 1, 1, 3)
    lists = list_blocks(plan, tuple(sorted(set(levels))))

    def attend(q: Tensor, k: Tensor, v: Tensor, length: Tensor) -> tuple[Tensor, ...]:
        return block_sparse_attention(q[:, :, :32], k, v, lists, 32, 32, 0.25, length, config)

    same_whatever_is_padded(attend, torch.float16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_means_of_the_largest_values_are_no_infinity(dtype: torch.dtype) -> None:
    k = torch.full((1, 1, 21, 16), 3e38, device=DEVICE).to(dtype)
    launch = pool_launch(spec_of(k), spec_of(k), (2, 4, 8), False)
    pooled, bias = launch(k, -k, None)
    real = bias[0] > -torch.inf
    torch.testing.assert_close(pooled[0, 0, 0, real], k[0, 0, :1].expand(int(real.sum()), -1))
    assert torch.equal(pooled[1], -pooled[0])


def sampled(q: Tensor, k: Tensor, length: Tensor) -> Tensor:
    at = sample_positions(SEQ, 32, 2, q.device)
    return scores.sampled_scores(q, k, 32, 32, 0.25, at, length)


def antidiagonal(q: Tensor, k: Tensor, length: Tensor) -> Tensor:
    return scores.antidiagonal_scores(q, k, 32, 32, 0.25, 8, length)


def means(q: Tensor, k: Tensor, length: Tensor) -> Tensor:
    pair = scores.block_mean_pair(q, k, 32, 32, length)
    return scores.mean_scores(*pair, 0.25, length, 32)


def peaks(q: Tensor, k: Tensor, length: Tensor) -> Tensor:
    at = sample_positions(SEQ, 32, 4, q.device)
    args = q, k, 32, 32, 0.25, at, at, length
    both = (scores.sampled_peak_scores(*args, normalised=x) for x in (True, False))
    return torch.cat(list(both))


@pytest.mark.parametrize("score", [sampled, antidiagonal, means, peaks])
def test_scores(score: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
    same_whatever_is_padded(lambda q, k, _, n: (score(q, k, n),), torch.float32)
