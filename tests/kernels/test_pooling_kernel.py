"""Pooling against plain means over the real keys of each group."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")

from jali.kernels.pooling import SECTION_ROWS, pool_pyramid, section_starts

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUBSETS = [s for n in range(1, 4) for s in itertools.combinations((2, 4, 8), n)]


def check(k, v, ratios, lengths=None) -> None:
    batch, _, seq, _ = k.shape
    key_length = None
    if lengths is not None:
        key_length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    pyramid = pool_pyramid(k, v, ratios, key_length)
    tol = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[k.dtype]
    assert pyramid.k.dtype == k.dtype
    assert pyramid.k.is_contiguous()
    for x, pooled in ((k, pyramid.k), (v, pyramid.v)):
        for b, ratio in itertools.product(range(batch), ratios):
            length = seq if lengths is None else lengths[b]
            start = pyramid.starts[ratio]
            log_count = pyramid.log_count[b % pyramid.bias.shape[0], start:]
            for g in range(pyramid.section_rows(ratio)):
                group = x[b, :, g * ratio : min(g * ratio + ratio, length)].float()
                got = pooled[b, :, start + g].float()
                if group.shape[1]:
                    torch.testing.assert_close(got, group.mean(1), atol=tol, rtol=tol)
                    assert log_count[g].item() == pytest.approx(math.log(group.shape[1]), abs=1e-6)
                else:
                    assert got.abs().max() == 0
                    assert log_count[g].item() == -math.inf
    assert torch.isneginf(pyramid.bias[:, pyramid.empty_row :]).all()
    assert pyramid.k[:, :, pyramid.empty_row :].abs().max() == 0
    assert pyramid.v[:, :, pyramid.empty_row :].abs().max() == 0


@pytest.mark.parametrize("ratios", SUBSETS, ids=str)
def test_ratio_subsets(ratios):
    k, v = torch.randn(2, 1, 2, 77, 16, device=DEVICE)
    check(k, v, ratios)


@pytest.mark.parametrize("seq", [1, 7, 8, 255, 256, 257])
def test_lengths(seq):
    k, v = torch.randn(2, 1, 1, seq, 16, device=DEVICE)
    check(k, v, (2, 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [64, 80])
def test_strided_views(dtype, dim):
    fused = torch.randn(2, 50, 2, 3, dim, device=DEVICE).to(dtype)
    check(fused[:, :, 0].transpose(1, 2), fused[:, :, 1].transpose(1, 2), (2, 4))


def test_key_lengths():
    k, v = torch.randn(2, 3, 2, 40, 16, device=DEVICE)
    check(k, v, (2, 4, 8), [0, 13, 40])


def test_what_lies_beyond_the_length_is_never_read():
    k, v = torch.randn(2, 1, 1, 40, 16, device=DEVICE)
    k[:, :, 21:] = float("nan")
    v[:, :, 21:] = float("nan")
    check(k, v, (2, 4, 8), [21])


@pytest.mark.parametrize("seq", [1, 300, 32760])
def test_sections_are_aligned(seq):
    starts, rows = section_starts(seq, (8, 2))
    assert list(starts) == [2, 8]
    assert all(start % SECTION_ROWS == 0 for start in (*starts.values(), rows))
    assert starts[8] * 2 >= seq


def test_unknown_ratio():
    k, v = torch.randn(2, 1, 1, 8, 16, device=DEVICE)
    with pytest.raises(ValueError, match="ratio"):
        pool_pyramid(k, v, (3,))
