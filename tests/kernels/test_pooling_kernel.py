"""Pooling against plain means over the real keys of each group."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

pytest.importorskip("triton")

from jali.kernels.launch import spec_of
from jali.kernels.pooling import SECTION_ROWS, make_sections, pool_launch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SUBSETS = [s for n in range(1, 4) for s in itertools.combinations((2, 4, 8), n)]


def check(k, v, ratios, lengths=None) -> None:
    batch, _, seq, _ = k.shape
    key_length = None
    if lengths is not None:
        key_length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    launch = pool_launch(spec_of(k), spec_of(v), ratios, lengths is not None)
    pooled, bias = launch(k, v, key_length)
    sections = launch.sections
    tol = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}[k.dtype]
    assert pooled.dtype == k.dtype
    assert pooled.is_contiguous()
    for x, means in zip((k, v), pooled, strict=True):
        for b, ratio in itertools.product(range(batch), ratios):
            length = seq if lengths is None else lengths[b]
            start = dict(sections.starts)[ratio]
            log2_count = bias[b % bias.shape[0], start:]
            for g in range(sections.tokens // ratio):
                group = x[b, :, g * ratio : min(g * ratio + ratio, length)].float()
                got = means[b, :, start + g].float()
                if group.shape[1]:
                    torch.testing.assert_close(got, group.mean(1), atol=tol, rtol=tol)
                    want = math.log2(group.shape[1])
                    assert log2_count[g].item() == pytest.approx(want, abs=1e-6)
                else:
                    assert got.abs().max() == 0
                    assert log2_count[g].item() == -math.inf
    assert torch.isneginf(bias[:, sections.empty_row :]).all()
    assert pooled[:, :, :, sections.empty_row :].abs().max() == 0


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
    sections = make_sections(seq, (8, 2))
    starts = dict(sections.starts)
    assert list(starts) == [2, 8]
    assert all(start % SECTION_ROWS == 0 for start in (*starts.values(), sections.rows))
    assert starts[8] * 2 >= seq


def test_unknown_ratio():
    k, v = torch.randn(2, 1, 1, 8, 16, device=DEVICE)
    with pytest.raises(ValueError, match="ratio"):
        pool_launch(spec_of(k), spec_of(v), (3,), False)
