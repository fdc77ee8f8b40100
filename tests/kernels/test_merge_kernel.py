"""Merging two attentions equals one attention over both sets of keys."""

from __future__ import annotations

import pytest
import torch

from jali.kernels.merge import merge_attention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = q @ k.mT
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


@pytest.mark.parametrize("order", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", [(1, 1, 1, 16), (2, 3, 37, 80), (1, 4, 130, 64)])
def test_merged_is_one_attention(shape: tuple[int, ...], order: str) -> None:
    make = torch.Generator().manual_seed(0)
    B, H, S, D = shape
    q = torch.randn(B, H, S, D, generator=make)
    k, v = (torch.randn(B, H, 50, D, generator=make) for _ in range(2))
    whole, whole_lse = attention(q, k, v)
    a, lse_a = attention(q, k[:, :, :20], v[:, :, :20])
    b, lse_b = attention(q, k[:, :, 20:], v[:, :, 20:])
    if order == "bshd":
        a, b = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, b))
    out, lse = merge_attention(*(x.to(DEVICE) for x in (a, lse_a, b, lse_b)))
    torch.testing.assert_close(out.cpu(), whole, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.cpu(), whole_lse, atol=1e-5, rtol=1e-5)


def test_a_side_without_keys_changes_nothing() -> None:
    a, b = torch.randn(1, 2, 9, 16), torch.zeros(1, 2, 9, 16)
    lse = torch.randn(1, 2, 9)
    none = torch.full((1, 2, 9), -torch.inf)
    out, merged = merge_attention(*(x.clone().to(DEVICE) for x in (a, lse, b, none)))
    torch.testing.assert_close(out.cpu(), a)
    torch.testing.assert_close(merged.cpu(), lse)
    out, merged = merge_attention(*(x.clone().to(DEVICE) for x in (b, none, b, none)))
    assert (out == 0).all()
    assert (merged == -torch.inf).all()
