"""Bits to lists against plain torch, and compiled for a GPU that is not here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from jali.kernels.select_bitmask import bitmask_lists
from jali.maskbook.bits import pack, unpack
from jali.planning.plan import list_blocks

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("blocks", [1, 3, 8, 31, 64, 127, 128, 129, 591, 1024])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_bit_lists(blocks: int, share: float) -> None:
    g = torch.Generator().manual_seed(blocks)
    kept = (torch.rand(2, 2, 3, blocks, generator=g) < share).to(DEVICE)
    kept[0, 0, 0] = False  # a row of nothing must not spoil its neighbours
    counts, indices = bitmask_lists(pack(kept), blocks)
    # The same on the host: the reference must not be a kernel too.
    want = list_blocks(kept.to(torch.uint8).cpu(), (1,))[1]
    assert torch.equal(counts.cpu(), want.counts)
    assert torch.equal(indices.cpu(), want.indices)


def test_bits_behind_the_last_block_are_ignored() -> None:
    bits = torch.full((1, 1, 2, 2), 255, dtype=torch.uint8, device=DEVICE)
    counts, indices = bitmask_lists(bits, 11)
    assert counts.flatten().tolist() == [11, 11]
    assert indices[0, 0, 0].tolist() == list(range(11))
    assert unpack(bits, 11).shape[-1] == 11


def test_refused() -> None:
    with pytest.raises(ValueError, match="rows of 2 bytes"):
        bitmask_lists(torch.zeros(1, 1, 1, 3, dtype=torch.uint8), 9)
    with pytest.raises(ValueError, match=r"int32"):
        bitmask_lists(torch.zeros(1, 1, 1, 2, dtype=torch.int32), 9)


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from jali.kernels.select_bitmask import _bitmask_lists_kernel
from jali.kernels.select_lists import row_options
for capability, blocks in ((80, 64), (90, 1024), (100, 1024)):
    types = {"bits": "*u8", "counts": "*i32", "indices": "*i32", "n": "i32", "row_bytes": "i32"}
    source = ASTSource(_bitmask_lists_kernel, types, {"N_PAD": blocks})
    target = GPUTarget("cuda", capability, 32)
    made = compile(source, target=target, options=row_options(blocks, None))
    assert made.asm["cubin"]
print("compiled")
"""


def test_it_compiles_for_gpus(compiles: Callable[[str], None]) -> None:
    compiles(COMPILE)
