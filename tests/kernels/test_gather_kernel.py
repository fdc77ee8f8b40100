"""The row gather is bit for bit what indexing gives, in BSHD memory, for any source strides."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from jali.kernels.gather import gather_each, gather_rows
from jali.kernels.launch import TensorSpec, spec_of

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def source(memory: str, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = {"bshd": (2, 37, 3, 24), "bhsd": (2, 3, 37, 24), "fused": (2, 37, 9, 24)}[memory]
    x = torch.randn(*shape, generator=generator).to(DEVICE, dtype)
    if memory == "bhsd":
        return x
    return x.transpose(1, 2)[:, :3]


@pytest.mark.parametrize("memory", ["bshd", "bhsd", "fused"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_gather_rows(memory: str, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    x = source(memory, dtype)
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = gather_rows(x, order.to(index_dtype), rows=4, columns=64)
    assert torch.equal(got, x[:, :, order])
    assert got.transpose(1, 2).is_contiguous()
    back = gather_rows(got, order.argsort().to(index_dtype))
    assert torch.equal(back, x)


def test_gather_may_repeat_and_drop_rows() -> None:
    x = source("bshd", torch.float32)
    index = torch.tensor([5, 5, 0], device=DEVICE)
    assert torch.equal(gather_rows(x, index), x[:, :, index])


@pytest.mark.parametrize("memories", [("bshd",) * 3, ("bshd", "bshd", "fused"), ("bhsd",) * 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gather_three(memories: tuple[str, ...], dtype: torch.dtype) -> None:
    q, k, v = (source(memory, dtype) + i for i, memory in enumerate(memories))
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    got = gather_each(q, k, v, order, rows=4, columns=64)
    for one, x in zip(got, (q, k, v), strict=True):
        assert torch.equal(one, x[:, :, order])
        assert one.transpose(1, 2).is_contiguous()
        known = spec_of(one)  # as if it were asked
        assert known == TensorSpec(one.shape, one.stride(), one.dtype, one.device, known.aligned)
        assert not known.aligned or one.data_ptr() % 16 == 0


def test_gather_three_of_two_shapes() -> None:
    q = source("bshd", torch.float32)
    k, v = q[:, :1], q[:, 1:2]
    order = torch.randperm(37, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for one, x in zip(gather_each(q, k, v, order), (q, k, v), strict=True):
        assert torch.equal(one, x[:, :, order])
