"""Layouts: bit-exact round trips, flags against brute force, own blocks."""

from __future__ import annotations

import doctest
import importlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import jali
import jali.backends
from jali import Blocks, Box, FrameWindows, Gilbert, Raster, Text, Tiled, TokenGrid, block_layout
from jali.tokens import layout as layout_module
from jali.tokens.layout import BlockLayout

ORDERS = [Raster(), Gilbert(), FrameWindows(), Tiled((2, 4, 4)), Tiled((2, 3, 5), True)]
SEGMENTS = st.one_of(
    st.builds(Text, st.integers(1, 40)),
    st.builds(Box, st.integers(1, 5), st.integers(1, 11), st.integers(1, 11)),
)
GRIDS = st.builds(lambda s: TokenGrid(tuple(s)), st.lists(SEGMENTS, min_size=1, max_size=4))


@pytest.mark.parametrize("order", ORDERS, ids=str)
@given(GRIDS, st.sampled_from([torch.float32, torch.bfloat16]))
def test_restore_undoes_arrange_bit_for_bit(
    order: object, grid: TokenGrid, dtype: torch.dtype
) -> None:
    layout = block_layout(grid, order=order)  # type: ignore[arg-type]
    x = torch.randn(2, 3, grid.tokens, 4).to(dtype)
    assert torch.equal(layout.q.restore(layout.q.arrange(x)), x)
    assert torch.equal(layout.q.arrange(layout.q.restore(x)), x)
    rows = torch.rand(2, grid.tokens)
    assert torch.equal(layout.k.restore(layout.k.arrange(rows)), rows)
    if layout.q.index is not None:
        fixed = torch.arange(layout.q.fixed_from, grid.tokens)
        assert torch.equal(layout.q.index[layout.q.fixed_from :], fixed)


def test_raster_moves_nothing() -> None:
    layout = block_layout(TokenGrid.video(3, 4, 5, text=2))
    x = torch.randn(1, 1, 62, 4)
    assert layout.q.arrange(x) is x
    assert layout.q.restore(x) is x


def kinds(grid: TokenGrid) -> list[tuple[int, str]]:
    """(segment, kind) of every token, by a plain loop."""
    found = []
    for number, segment in enumerate(grid.segments):
        for i in range(segment.tokens):
            if isinstance(segment, Text):
                kind = "text"
            elif segment.frames == 1:
                kind = "single"
            else:
                kind = "first" if i < segment.height * segment.width else "later"
            found.append((number, kind))
    return found


@pytest.mark.parametrize("order", ORDERS, ids=str)
@given(GRIDS, st.sampled_from([(16, 8), (7, 13), (128, 64)]))
def test_flags_against_brute_force(order: object, grid: TokenGrid, sizes: tuple[int, int]) -> None:
    layout = block_layout(grid, order=order, blocks=Blocks(*sizes))  # type: ignore[arg-type]
    token = kinds(grid)
    index = range(grid.tokens) if layout.q.index is None else layout.q.index.tolist()
    arranged = [token[i] for i in index]
    for block, flags in (
        (sizes[0], (layout.text_rows, layout.first_rows, layout.single_rows, None)),
        (sizes[1], (layout.text_keys, layout.first_keys, layout.single_keys, layout.mixed_keys)),
    ):
        parts = [arranged[i : i + block] for i in range(0, grid.tokens, block)]
        for flag, kind in zip(flags, ("text", "first", "single"), strict=False):
            assert flag is not None
            assert flag.tolist() == [any(k == kind for _, k in part) for part in parts]
        if flags[3] is not None:
            assert flags[3].tolist() == [len({s for s, _ in part}) > 1 for part in parts]
    assert layout.has_text_keys == bool(layout.text_keys.any())
    assert layout.has_text_rows == bool(layout.text_rows.any())
    assert layout.only_text_rows == bool(layout.text_rows.all())
    assert -(-grid.tokens // sizes[0]) == layout.M
    assert layout.block_sizes.sum() == grid.tokens


def brute_own(layout: BlockLayout) -> torch.Tensor:
    own = torch.zeros(layout.M, layout.N, dtype=torch.bool)
    q_index, k_index = (
        range(x.tokens) if x.index is None else x.index.tolist() for x in (layout.q, layout.k)
    )
    place = {token: slot for slot, token in enumerate(k_index)}
    assert layout.offset is not None
    for slot, token in enumerate(q_index):
        own[slot // layout.blocks.q, place[token + layout.offset] // layout.blocks.k] = True
    return own


@pytest.mark.parametrize("order", ORDERS, ids=str)
@pytest.mark.parametrize("offset", [0, 37, 200])
def test_own_blocks_of_a_chunk(order: object, offset: int) -> None:
    keys = TokenGrid.video(5, 8, 10)
    layout = block_layout(
        TokenGrid.video(2, 10, 10),
        keys,
        order,
        Blocks(32, 16),
        offset,  # type: ignore[arg-type]
    )
    assert torch.equal(layout.own, brute_own(layout))


def test_other_keys_have_no_own_blocks() -> None:
    layout = block_layout(TokenGrid.flat(50), TokenGrid.flat(80), blocks=Blocks(16, 16))
    assert layout.offset is None
    assert not layout.own.any()


def test_square_layouts_share_one_arrangement() -> None:
    grid = TokenGrid.video(3, 9, 9)
    layout = block_layout(grid, order=Gilbert())
    assert layout.q is layout.k
    assert block_layout(TokenGrid.video(3, 9, 9), order=Gilbert()) is layout


def test_values_are_not_copied_before_they_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planning looks at q and k; a copy of v beside them would be the largest thing in memory."""
    layout = block_layout(TokenGrid.video(3, 6, 7), order=Gilbert(), blocks=Blocks(16, 16))
    q, k, v = torch.randn(3, 1, 2, 126, 8).unbind()
    moved: list[torch.Tensor] = []
    gather = layout_module._gather
    monkeypatch.setattr(
        layout_module, "_gather", lambda x, index: moved.append(x) or gather(x, index)
    )
    got_q, got_k, values = layout.arrange(q, k, v)
    assert [x.data_ptr() for x in moved] == [q.data_ptr(), k.data_ptr()]
    for got, x in ((got_q, q), (got_k, k), (values(), v)):
        assert torch.equal(got, x[:, :, layout.q.index])


def test_causal_blocks() -> None:
    layout = block_layout(TokenGrid.flat(30), TokenGrid.flat(100), blocks=Blocks(16, 8), offset=40)
    for m in range(layout.M):
        for n in range(layout.N):
            last = min(16 * (m + 1), 30) - 1 + 40
            assert bool(layout.causal[m, n]) == (8 * n <= last)
    with pytest.raises(ValueError, match="offset"):
        _ = block_layout(TokenGrid.flat(3), TokenGrid.flat(9)).causal
    with pytest.raises(ValueError, match="order"):
        _ = block_layout(TokenGrid.video(3, 9, 9), order=Gilbert()).causal


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="outside 9 keys"):
        block_layout(TokenGrid.flat(3), TokenGrid.flat(9), offset=7)
    for q, k in ((0, 1), (1, -1)):
        with pytest.raises(ValueError, match="block must be at least 1"):
            Blocks(q, k)
    for q, k in ((1, 2.0), (True, 1)):
        with pytest.raises(TypeError, match="block must be an int"):
            Blocks(q, k)  # type: ignore[arg-type]


def test_a_layout_is_shown_in_one_line() -> None:
    video = TokenGrid.video(2, 4, 4, text=3)
    layout = block_layout(video, order=Gilbert(), blocks=Blocks(16, 8))
    assert repr(layout) == "BlockLayout(3 text + 2×4×4, Gilbert(), 3×5 blocks of 16×8, cpu)"
    layout = block_layout(TokenGrid.flat(10), TokenGrid.flat(64), blocks=Blocks(16, 8), offset=5)
    assert repr(layout) == "BlockLayout(1×1×10 on 1×1×64 at 5, Raster(), 1×8 blocks of 16×8, cpu)"


EXAMPLES = ("backends", "backends.backend", "planning.plan", "tokens.grid", "tokens.layout",
            "tokens.order")  # fmt: skip


@pytest.mark.parametrize("module", EXAMPLES)
def test_examples_in_docstrings_run(module: str) -> None:
    names = {**vars(jali.backends), "torch": torch}
    names |= {name: getattr(jali, name) for name in jali.__all__}
    done = doctest.testmod(importlib.import_module(f"jali.{module}"), extraglobs=names)
    assert done.attempted
    assert not done.failed


def test_a_word_is_no_order() -> None:
    with pytest.raises(TypeError, match=r"order must be an Order, such as Tiled.*, got 'tiled'"):
        block_layout(TokenGrid.video(2, 4, 4), order="tiled")  # type: ignore[arg-type]
