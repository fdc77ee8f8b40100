"""The work of a plan's lists against the same from its levels, and compiled for absent GPUs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from jali import BlockPlan, Blocks, TokenGrid, block_layout
from jali.kernels.lists import BlockList, StackedLists, StackedListsSpec
from jali.kernels.plan_work import pairs_read
from jali.planning.cost import read_sizes
from jali.tokens.padding import KeyPadding

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CPU = torch.device("cpu")


@pytest.mark.parametrize("tokens", [(33, 150), (64, 128), (5, 3)])
@pytest.mark.parametrize("ratios", [(1,), (1, 2, 4, 8), (8,)])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("padded", [False, True])
def test_pairs_read(
    tokens: tuple[int, int], ratios: tuple[int, ...], batch: int, padded: bool
) -> None:
    g = torch.Generator().manual_seed(tokens[1])
    layout = block_layout(*map(TokenGrid.flat, tokens), blocks=Blocks(16, 16))
    values = torch.tensor([0, *ratios], dtype=torch.uint8)
    shape = batch, 3, layout.M, layout.N
    levels = values[torch.randint(0, len(values), shape, generator=g)]
    padding = KeyPadding.of_lengths((tokens[1] // 2, tokens[1]), CPU) if padded else None
    plan = replace(BlockPlan(layout, ratios, map=levels), padding=padding)
    sizes = read_sizes(layout, ratios, padding).to(DEVICE)
    parts = [plan.lists[ratio] for ratio in ratios]
    counts, indices = (torch.stack(x).to(DEVICE) for x in zip(*parts, strict=True))
    stacked = StackedLists(StackedListsSpec(ratios, tuple(indices.shape)), counts, indices)
    for lists in (stacked, {ratio: stacked[ratio] for ratio in ratios}):
        found = pairs_read(lists, ratios, sizes, layout.row_sizes.to(DEVICE))
        assert found.dtype == torch.int64
        assert torch.equal(found.cpu(), plan.pairs_read)  # on the host: not a kernel too


def test_lists_of_other_widths_and_heads() -> None:
    layout = block_layout(TokenGrid.flat(29), TokenGrid.flat(43), blocks=Blocks(16, 16))
    one = torch.tensor([[[1, 2]]]).int(), torch.tensor([[[[2, 0], [0, 1]]]]).int()
    two = torch.tensor([[[1, 0], [0, 1]]]).int(), torch.tensor([[[[1], [0]], [[0], [2]]]]).int()
    lists = {
        ratio: BlockList(*(x.to(DEVICE) for x in part)) for ratio, part in ((1, one), (2, two))
    }
    sizes = read_sizes(layout, (1, 2), None).to(DEVICE)
    found = pairs_read(lists, (1, 2), sizes, layout.row_sizes.to(DEVICE))
    shared = 16 * 11 + 13 * 32
    assert found.tolist() == [[shared + 16 * 8, shared + 13 * 6]]


COMPILE = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from jali.kernels.plan_work import _pairs_read_kernel
from jali.kernels.select_lists import row_options
names = ("heads", "width", "n", "lists_batch", "sizes_batch", "batch")
for capability, blocks in ((80, 64), (90, 1024), (100, 4096)):
    types = {"counts": "*i32", "indices": "*i32", "sizes": "*i32", "rows": "*i64", "pairs": "*i64"}
    source = ASTSource(_pairs_read_kernel, types | dict.fromkeys(names, "i32"), {"W_PAD": blocks})
    target = GPUTarget("cuda", capability, 32)
    assert compile(source, target=target, options=row_options(blocks, None)).asm["cubin"]
print("compiled")
"""


def test_it_compiles_for_gpus(compiles: Callable[[str], None]) -> None:
    compiles(COMPILE)
