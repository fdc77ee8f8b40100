"""Skips the work with plain PyTorch operations: any device, every plan.

Query blocks that read about as much are stacked; what they read is gathered next to each other, so
that PyTorch's own attention does the rest. Memory for what is gathered stays bounded.
"""

from __future__ import annotations

import functools
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jali.backends.backend import Backend, Task
from jali.backends.pyramid import pool
from jali.kernels.lists import MEAN, group_size
from jali.planning.plan import BlockPlan
from jali.tokens.order import Index
from jali.tokens.padding import KeyPadding

# Keys and values of a chunk, in a cache while they are read.
GATHERED_BYTES = 8 * 2**20
# Pooled, padded or rearranged keys and values are copies: of so many heads at a time.
COPIED_BYTES = 12 * 2**20
# Elsewhere (a GPU without Triton) few long chunks count, not the cache: so many times q in fp32.
GATHERED_ON_DEVICE, COPIED_ON_DEVICE = 1, 1
# Rows of a chunk are filled up to the longest: by at most so much of what they read, and so many
# elements, which take as long as a chunk of their own would.
FILLED_UP, ALWAYS_FILLED_UP = 0.05, 2**16


class Torch(Backend):
    """Reads only kept and pooled blocks. It looks at the counts, so it waits for the device."""

    name: ClassVar[str] = "torch"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2,
    }  # fmt: skip

    def why_not(self, task: Task) -> list[str]:  # noqa: ARG002
        return []

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, out_buffer: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        out = torch.empty_like(q) if out_buffer is None else out_buffer
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        each = q.shape[1] // k.shape[1]
        copies = sum(1 / group_size(ratio, plan.blocks.k) for ratio in plan.ratios)
        most = max(1, int(_room(q).copied / (2 * k[:, 0].numel() * copies)))
        at_once = -(-k.shape[1] // -(-k.shape[1] // most))  # about as many each time
        for kv in range(0, k.shape[1], at_once):
            some, heads = slice(kv, kv + at_once), slice(kv * each, (kv + at_once) * each)
            _attend_heads(
                q[:, heads], k[:, some], v[:, some], plan, heads, scale, padding,
                out[:, heads], lse[:, heads],
            )  # fmt: skip
        return out, lse


def _attend_heads(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, heads: slice, scale: float,
    padding: KeyPadding | None, out: Tensor, lse: Tensor,
) -> None:  # fmt: skip
    """Attention of those `heads` of the plan, written into `out` and `lse`."""
    if padding is not None:
        k, v = padding.zeroed(k), padding.zeroed(v)
    factor = _factor(v)
    levels = _levels_read(plan, heads, q.shape[:2], padding)
    room = _room(q)
    memory = _Memory(sum(room), k)
    piles = _piles(k, v * factor if factor != 1 else v, plan, levels, padding, memory)
    copied = memory.used
    Sq, block = q.shape[2], plan.blocks.q
    for rows in _chunks(piles, levels.shape[:3], Sq % block > 0, room.gathered):
        # Chunks never mix a short last block with others, so all rows are of one length.
        length = min(block, Sq - int(rows.m[0]) * block)
        queries, into, into_lse = (_cut(x, block, length) for x in (q, out, lse))
        memory.used = copied
        used = [pile.read(rows.lines, memory) for pile in piles if pile.counts[rows.lines[0]]]
        if not used:  # no key is real
            into[rows.place], into_lse[rows.place] = 0, -torch.inf
            continue
        query = _places(rows.m, plan, length, q.device) if plan.causal else None
        some = queries[rows.place][:, None]
        part, part_lse = functools.reduce(
            _merged, (_attend(some, read, scale, query) for read in used)
        )
        part = part / factor if factor != 1 else part
        into[rows.place] = part[:, 0].to(out.dtype)
        into_lse[rows.place] = part_lse[:, 0].to(lse.dtype)


def _factor(values: Tensor) -> float:
    """A power of two that keeps sums of all values from overflow, 1 nearly always."""
    low, high = values.aminmax()
    largest = float(torch.maximum(-low, high)) * values.shape[2]
    limit = torch.finfo(_exact(values)).max / 2
    return 1.0 if largest < limit or math.isnan(largest) else 2.0**-32


def _exact(x: Tensor) -> torch.dtype:
    """Of logits: at least fp32."""
    return torch.promote_types(x.dtype, torch.float32)


def _places(m: Index, plan: BlockPlan, length: int, device: torch.device) -> Tensor:
    """Where the queries of some blocks lie among the keys. [R, 1, L, 1]."""
    assert plan.layout.offset is not None
    place = torch.from_numpy(m)[:, None] * plan.blocks.q + torch.arange(length)
    return (place + plan.layout.offset).to(device)[:, None, :, None]


def _cut(x: Tensor, block: int, length: int) -> Tensor:
    """The first tokens of every block that has so many, as a view: [B, H, S, ...] ->
    [B, H, blocks, length, ...]."""
    return x.unfold(2, length, block).movedim(-1, 3)


class _Room(NamedTuple):
    """How many elements of keys and values are held at a time."""

    copied: int
    gathered: int


def _room(q: Tensor) -> _Room:
    if q.is_cpu:
        return _Room(COPIED_BYTES // q.itemsize, GATHERED_BYTES // q.itemsize)
    fp32 = 4 * q.numel() // q.itemsize
    return _Room(COPIED_ON_DEVICE * fp32, GATHERED_ON_DEVICE * fp32)


class _Memory:
    """One piece of memory, taken in parts. On a CPU a thread keeps it from call to call: the system
    hands out fresh memory page by page, which takes longer than the copies that go there."""

    _of_thread = threading.local()

    def __init__(self, size: int, like: Tensor) -> None:
        self.memory = self._kept(size * like.itemsize, like.dtype) if like.is_cpu else None
        self.like = like
        self.used = 0

    @classmethod
    def _kept(cls, size: int, dtype: torch.dtype) -> Tensor:
        found = getattr(cls._of_thread, "memory", None)
        if found is None or found.nbytes < size:
            with torch.inference_mode(False):  # such a tensor could be written to in no other mode
                found = cls._of_thread.memory = torch.empty(-(-size // 8), dtype=torch.float64)
        return found.view(dtype)

    def take(self, shape: tuple[int, ...]) -> Tensor:
        size = math.prod(shape)
        if self.memory is None or self.used + size > len(self.memory):
            return self.like.new_empty(shape)
        self.used += size
        return self.memory[self.used - size : self.used].view(shape)


@dataclass(frozen=True, eq=False)
class _Read:
    """What R rows read of one pile, side by side."""

    keys: Tensor  # [R, 1, n, D]
    values: Tensor
    bias: Tensor | None  # the log of the keys behind each, −inf for none; [R, 1, 1, n]
    last: Tensor | None  # causal: the place of each key's last token; [R, 1, 1, n]


def _attend(
    queries: Tensor, read: _Read, scale: float, query: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Output [R, 1, L, D] and log-sum-exp [R, 1, L] of queries at the places `query`."""
    bias, hidden = read.bias, None
    if query is not None:
        assert read.last is not None
        behind = read.last > query
        bias = torch.zeros_like(behind, dtype=_exact(queries)) if bias is None else bias
        bias = bias.masked_fill(behind, -torch.inf)
        hidden = (bias == -torch.inf).all(-1)
    attention = _fused if queries.is_cpu else _written_out
    out, lse = attention(queries, read.keys, read.values, bias, scale)
    if hidden is not None:  # versions of PyTorch differ in what they make of a row without keys
        out, lse = out.masked_fill(hidden[..., None], 0), lse.masked_fill(hidden, -torch.inf)
    return out, lse


def _fused(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention and log-sum-exp, on a CPU. F.scaled_dot_product_attention calls the same, and keeps
    the second to itself; it also looks at what this takes for granted."""
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        q, k, v, attn_mask=bias, scale=scale
    )


def _written_out(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The same on any device."""
    q, k, v = (x.to(_exact(x)) for x in (q, k, v))
    logits = q @ k.mT * scale
    logits = logits if bias is None else logits + bias
    return logits.softmax(-1) @ v, logits.logsumexp(-1)


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both."""
    lse = torch.logaddexp(one[1], other[1])
    own, others = ((each - lse).exp().nan_to_num_(0.0)[..., None] for _, each in (one, other))
    return one[0] * own + other[0] * others, lse


@dataclass(frozen=True, eq=False)
class _Pile:
    """Keys and values of some levels, in pieces of equal length that are picked by number."""

    keys: Tensor  # [pieces, length, D]
    values: Tensor
    log_counts: Tensor | None  # [pieces, length]; None where every key counts once
    last: Tensor | None  # causal: the place of each key's last token, [pieces, length]
    numbers: Index  # of the pieces that are read: row after row of [B, H, M]
    first: Index  # where those of each row begin, [B · H · M + 1]

    @functools.cached_property
    def counts(self) -> Index:
        """How many pieces each row reads, [B · H · M]."""
        return np.diff(self.first)

    @property
    def numel(self) -> Index:
        """Elements of what each row reads."""
        return self.counts * (2 * self.keys[0].numel())

    def read(self, lines: Index, memory: _Memory) -> _Read:
        """What some rows read. Those that read less have their last piece again, and hidden."""
        device = self.keys.device
        counts = self.counts[lines][:, None]
        slot = np.arange(counts.max())
        found = self.numbers[self.first[lines][:, None] + np.minimum(slot, counts - 1)]
        numbers = torch.from_numpy(found).to(device)

        def picked(source: Tensor, into: Tensor | None = None) -> Tensor:
            pieces = torch.index_select(source, 0, numbers.flatten(), out=into)
            return pieces.unflatten(0, numbers.shape).flatten(1, 2)

        bias = None if self.log_counts is None else picked(self.log_counts)
        if int(counts.min()) < len(slot):
            if bias is None:
                shape = len(lines), len(slot) * self.keys.shape[1]
                bias = self.keys.new_zeros(shape, dtype=_exact(self.keys))
            filled_up = torch.from_numpy(slot >= counts).to(device)
            bias = bias.masked_fill(filled_up.repeat_interleave(self.keys.shape[1], 1), -torch.inf)
        shape = numbers.numel(), *self.keys.shape[1:]
        return _Read(
            picked(self.keys, memory.take(shape))[:, None],
            picked(self.values, memory.take(shape))[:, None],
            None if bias is None else bias[:, None, None],
            None if self.last is None else picked(self.last)[:, None, None],
        )


def _levels_read(
    plan: BlockPlan, heads: slice, shape: tuple[int, ...], padding: KeyPadding | None
) -> Index:
    """The levels of some heads, where blocks without a real key are skipped. uint8 [B, H, M, N]."""
    levels = plan.levels
    levels = levels if levels.shape[1] == 1 else levels[:, heads]
    if padding is not None:
        tokens, block = plan.layout.k.tokens, plan.blocks.k
        real = F.pad(padding.valid(tokens), (0, plan.layout.N * block - tokens))
        levels = levels * real.unflatten(1, (-1, block)).any(-1)[:, None, None]
    found: Index = levels.cpu().expand(*shape, -1, -1).numpy()
    return found


def _piles(
    k: Tensor, v: Tensor, plan: BlockPlan, levels: Index, padding: KeyPadding | None,
    memory: _Memory,
) -> list[_Pile]:  # fmt: skip
    """One of all levels but the mean of a block, whose pieces are of one key."""
    sorts = [r for r in plan.ratios if r != MEAN], [r for r in plan.ratios if r == MEAN]
    return [_pile(k, v, ratios, plan, levels, padding, memory) for ratios in sorts if ratios]


def _pile(
    k: Tensor, v: Tensor, ratios: list[int], plan: BlockPlan, levels: Index,
    padding: KeyPadding | None, memory: _Memory,
) -> _Pile:  # fmt: skip
    B, heads, tokens, _ = k.shape
    N, block = plan.layout.N, plan.blocks.k
    sizes = [group_size(level, block) for level in ratios]
    length = block // max(sizes)
    parts: list[list[Tensor]] = [[], [], [], []]
    for size in sizes:
        keys, values, count = pool(k, v, size, padding)
        missing = N * block // size - keys.shape[2]
        log_count = F.pad(count.to(_exact(k)).log(), (0, missing), value=-torch.inf)
        last = torch.arange(size, N * block + 1, size, device=k.device).clamp_max(tokens) - 1
        found = (
            F.pad(keys, (0, 0, 0, missing)) if missing else keys,
            F.pad(values, (0, 0, 0, missing)) if missing else values,
            log_count[:, None].expand(B, heads, -1),
            last.expand(B, heads, -1),
        )
        for part, each in zip(parts, found, strict=True):
            part.append(each)
    keys, values = (_stacked(some, length, memory) for some in parts[:2])
    log_counts, last = (_stacked(some, length) for some in parts[2:])
    alike = max(sizes) == 1 and padding is None and N * block == tokens
    numbers, first = _pieces(
        levels, heads, {r: block // s // length for r, s in zip(ratios, sizes, strict=True)}
    )
    return _Pile(
        keys, values, None if alike else log_counts, last if plan.causal else None, numbers, first
    )


def _stacked(levels: list[Tensor], length: int, memory: _Memory | None = None) -> Tensor:
    """Pieces of all levels [B, Hkv, tokens, ...], one behind the other."""
    parts = [level.unflatten(2, (-1, length)) for level in levels]
    if len(parts) == 1 and parts[0].is_contiguous():
        return parts[0].flatten(0, 2)
    sizes = [math.prod(part.shape[:3]) for part in parts]
    shape = sum(sizes), *parts[0].shape[3:]
    whole = parts[0].new_empty(shape) if memory is None else memory.take(shape)
    for part, into in zip(parts, whole.split(sizes), strict=True):
        into.view(part.shape).copy_(part)
    return whole


def _pieces(levels: Index, kv_heads: int, pieces: dict[int, int]) -> tuple[Index, Index]:
    """The numbers of all pieces that are read, row after row, and where rows begin. `pieces` are
    those of a block at each level; one level lies behind the other."""
    B, H, _, N = levels.shape
    each, begin = np.zeros((2, 256), dtype=np.int64)
    for level, count in pieces.items():
        begin[level] = each.sum() * B * kv_heads * N
        each[level] = count
    counts = each[levels]
    head = np.arange(B)[:, None] * kv_heads + np.arange(H) // (H // kv_heads)
    block = head[:, :, None, None] * N + np.arange(N)
    start = begin[levels] + block * counts
    first = np.concatenate([[0], np.cumsum(counts.sum(-1).ravel())])
    counts = counts.ravel()
    inside = np.arange(first[-1]) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.repeat(start.ravel(), counts) + inside, first


@dataclass(frozen=True)
class _Rows:
    """Query blocks that are worked on together."""

    lines: Index  # their numbers in [B · H · M]
    batch: Index
    head: Index
    m: Index

    @functools.cached_property
    def place(self) -> tuple[int | Index, int | Index, slice | Index]:
        """Where the rows lie in [B, H, M, ...]: slices where neighbours make it a view."""
        b, h, m = int(self.batch[0]), int(self.head[0]), int(self.m[0])
        one_head = (self.batch[-1], self.head[-1]) == (b, h)
        if one_head and np.array_equal(self.m, np.arange(m, m + len(self.m))):
            return b, h, slice(m, m + len(self.m))
        return self.batch, self.head, self.m


def _chunks(piles: list[_Pile], shape: tuple[int, ...], short: bool, room: int) -> Iterator[_Rows]:
    """All query blocks [B, H, M], those with about equal work together, within `room` elements; the
    last ones apart where they are `short`, and rows that read nothing of a pile."""
    threads = torch.get_num_threads()
    work = np.sum([pile.numel for pile in piles], axis=0)
    sort = np.broadcast_to(short & (np.arange(shape[2]) == shape[2] - 1), shape).ravel().astype(int)
    for pile in piles:
        sort = 2 * sort + (pile.counts > 0)
    order = np.lexsort((work, sort))
    while len(order):
        run = work[order[sort[order] == sort[order[0]]]]
        read, filled = np.cumsum(run), run * np.arange(1, len(run) + 1)
        fits = (filled <= room) & (filled - read <= FILLED_UP * read + ALWAYS_FILLED_UP)
        size = len(run) if fits.all() else max(1, int(np.argmin(fits)))
        if threads < size < len(run):  # work is shared out by rows: none should wait for the last
            size -= size % threads
        yield _Rows(order[:size], *np.unravel_index(order[:size], shape))
        order = order[size:]
