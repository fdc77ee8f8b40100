"""Skips the work with plain PyTorch operations: any device, every plan.

Query blocks that read about as much are stacked; the key blocks they read are gathered next to
each other, so that two ordinary batched products do the attention. Scratch stays bounded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jali.backends.backend import Backend, Task
from jali.backends.pyramid import pool
from jali.layout import Blocks
from jali.order import Index
from jali.padding import KeyPadding
from jali.plan import BlockPlan

# Longer chunks waste less between products. Just below 32 MB, above which the C library gives
# memory back at once and every call pays for its pages again; less where rearranged copies of q, k
# and v take memory already. Rows of several levels differ in length: short chunks fill up less.
SCRATCH_BYTES = 30 * 2**20
SCRATCH_BESIDE_COPIES = 12 * 2**20
SCRATCH_OF_SEVERAL_LEVELS = 4 * 2**20


class Torch(Backend):
    """Reads only kept and pooled blocks. It looks at the counts, so it waits for the device."""

    name: ClassVar[str] = "torch"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {
        torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2,
    }  # fmt: skip

    def why_not(self, task: Task) -> list[str]:  # noqa: ARG002
        return []

    def preferred(self, task: Task) -> Blocks:  # noqa: ARG002
        return Blocks(256, 128)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None = None, spare: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        B, H, Sq, _ = q.shape
        if len(plan.ratios) > 1 and k.shape[1] > 1:
            return self._head_by_head(q, k, v, plan, scale, padding, spare)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        levels = [_Level.of(k, v, ratio, plan, padding) for ratio in plan.ratios]
        out = torch.empty_like(q) if spare is None else spare
        lse = torch.empty(B, H, Sq, dtype=torch.float32, device=q.device)
        limit = SCRATCH_BYTES if spare is None else SCRATCH_BESIDE_COPIES
        if len(levels) > 1:
            limit = SCRATCH_OF_SEVERAL_LEVELS
        scratch = _Scratch(limit, dtype, q.device)
        block, calm = plan.blocks.q, True
        for rows in _chunks(levels, (B, H, plan.layout.M), block, scratch.size):
            scratch.clear()
            read = _read(levels, rows, k.shape[2], k.shape[1], H, scratch)
            # Chunks never mix the short last block with others, so all rows are of one length.
            length = min(block, Sq - int(rows.m[0]) * block)
            # Dense rows of a long sequence are cut once more, to keep their logits small.
            step = max(1, scratch.room // (len(rows.m) * read.keys.shape[1]))
            for start in range(0, length, step):
                size = min(step, length - start)
                queries = _cut(q, block, start, size)[rows.place].to(dtype)
                ahead = None
                if plan.causal:
                    assert plan.layout.offset is not None
                    query = torch.from_numpy(rows.m).to(q.device)[:, None] * block + start
                    query = query + torch.arange(size, device=q.device) + plan.layout.offset
                    ahead = read.last()[:, None] > query[..., None]
                logits = scratch.take(len(rows.m), size, read.keys.shape[1])
                part, sums, calm = _attend(queries, read, scale, ahead, logits, calm)
                _cut(out, block, start, size)[rows.place] = part.to(out.dtype)
                _cut(lse, block, start, size)[rows.place] = sums.to(lse.dtype)
                scratch.give(logits)
        return out, lse

    def _head_by_head(
        self, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float,
        padding: KeyPadding | None, spare: Tensor | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """Pooled keys and values of all heads at once would take as much memory as q twice."""
        out = torch.empty_like(q) if spare is None else spare
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        group = q.shape[1] // k.shape[1]
        for h in range(k.shape[1]):
            some = slice(h * group, (h + 1) * group)
            levels = plan.levels if plan.levels.shape[1] == 1 else plan.levels[:, some]
            part = BlockPlan(plan.layout, plan.ratios, map=levels, causal=plan.causal)
            _, lse[:, some] = self.attend(
                q[:, some], k[:, h : h + 1], v[:, h : h + 1], part, scale, padding, out[:, some]
            )
        return out, lse


def _cut(x: Tensor, block: int, start: int, size: int) -> Tensor:
    """Tokens start to start + size of every block that has them, as a view: [B, H, S, ...] ->
    [B, H, blocks, size, ...]."""
    return x[:, :, start:].unfold(2, size, block).movedim(-1, 3)


def _attend(
    queries: Tensor, read: _Read, scale: float, ahead: Tensor | None, logits: Tensor, calm: bool
) -> tuple[Tensor, Tensor, bool]:
    """Two batched products, with the softmax in place of the logits. [R, L, D] and [R, L].

    While a call is `calm`, the two passes that find and subtract each row's largest logit are left
    out; the sums tell whether that was right. If not, the chunk is done again, and whether the
    rest of the call is calm is the last of the three results.
    """
    keys = read.keys.transpose(1, 2)
    while True:
        torch.baddbmm(logits, queries, keys, beta=0, alpha=scale, out=logits)
        if read.bias is not None:
            logits += read.bias[:, None]
        if ahead is not None:
            logits.masked_fill_(ahead, -torch.inf)
        top: Tensor | float = 0.0
        if not calm:
            top = logits.amax(-1, keepdim=True)
            top = torch.where(top == -torch.inf, 0, top)  # a row that reads no real key
            logits.sub_(top)
        total = logits.exp_().sum(-1, keepdim=True)
        if not calm or _in_range(total):
            break
        calm = False
    out = torch.bmm(logits, read.values).div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    return out, (total.log() + top).squeeze(-1), calm


def _in_range(total: Tensor) -> bool:
    """Whether sums of exponentials are so far from overflow and underflow that they are as exact
    as with the largest logit taken out, and that their products with values are too."""
    low, high = total.aminmax()
    return float(low) > math.exp(-60) and float(high) < math.exp(60)


class _Scratch:
    """One piece of memory, used for every chunk again: fresh memory costs more than the work."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.size = size // dtype.itemsize
        self.memory = torch.empty(self.size, dtype=dtype, device=device)
        self.used = 0

    @property
    def room(self) -> int:
        """Elements left, at least a few: what does not fit gets memory of its own."""
        return max(self.size - self.used, self.size // 8)

    def take(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self.used + size > self.size:
            return self.memory.new_empty(shape)
        found = self.memory[self.used : self.used + size].view(shape)
        self.used += size
        return found

    def give(self, last: Tensor) -> None:
        """Take back what was taken last."""
        if last.untyped_storage().data_ptr() == self.memory.untyped_storage().data_ptr():
            self.used -= last.numel()

    def clear(self) -> None:
        self.used = 0


@dataclass(frozen=True, eq=False)
class _Read:
    """What a chunk of R rows reads, side by side: keys and values [R, n, D], and the bias of each
    key [R, n] (None where all are 0)."""

    keys: Tensor
    values: Tensor
    bias: Tensor | None
    chosen: tuple[tuple[_Level, Tensor], ...]
    tokens: int

    def last(self) -> Tensor:
        """The place of each key's last token [R, n]; the last group ends with the last key."""
        places = []
        for level, blocks in self.chosen:
            row = torch.arange(level.rows, device=blocks.device)
            group = blocks[..., None] * level.rows + row
            places.append(((group + 1) * level.ratio).clamp_max(self.tokens).flatten(1) - 1)
        return torch.cat(places, dim=1)


@dataclass(frozen=True, eq=False)
class _Level:
    """The keys and values of one ratio, cut into blocks that can be picked by number."""

    keys: Tensor  # [B·Hkv·N, rows, D]
    values: Tensor
    log_count: Tensor | None  # [B|1, N, rows]; None where every key counts once
    counts: Index  # [B|1, H|1, M], on the host
    indices: Tensor  # [B|1 · H|1 · M, W]
    blocks: int
    ratio: int

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, ratio: int, plan: BlockPlan, padding: KeyPadding | None
    ) -> _Level:
        N, rows = plan.layout.N, plan.blocks.k // ratio
        keys, values, log_count = pool(k, v, ratio, padding)
        missing = N * rows - keys.shape[2]
        # Several levels share one bias; a plan of one level may do without.
        plain = plan.ratios == (1,) and padding is None and not missing
        keys, values = (
            (F.pad(x, (0, 0, 0, missing)) if missing else x).reshape(-1, rows, x.shape[-1])
            for x in (keys, values)
        )
        log_count = F.pad(log_count, (0, missing), value=-torch.inf).unflatten(1, (N, rows))
        listed = plan.lists[ratio]
        bias = None if plain else log_count
        counts = listed.counts.cpu().numpy()
        return cls(keys, values, bias, counts, listed.indices.flatten(0, 2), N, ratio)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    def chosen(self, rows: _Rows) -> tuple[Tensor, Tensor | None]:
        """The key blocks that the rows read [R, most], and which of these entries mean something
        (None: all do)."""
        b, h = rows.batch % self.counts.shape[0], rows.head % self.counts.shape[1]
        count = self.counts[b, h, rows.m]
        most = int(count.max())
        line = np.ravel_multi_index((b, h, rows.m), self.counts.shape)
        device = self.indices.device
        blocks = self.indices[:, :most].index_select(0, torch.from_numpy(line).to(device))
        if bool((count == most).all()):
            return blocks, None
        return blocks, torch.from_numpy(np.arange(most) < count[:, None]).to(device)

    def bias(
        self, rows: _Rows, chosen: Tensor, listed: Tensor | None, like: Tensor
    ) -> Tensor | None:
        """What is added to the logits: the log of the keys behind each, −inf for none. [R, n]."""
        if self.log_count is None and listed is None:
            return None
        if self.log_count is None:
            bias = like.new_zeros(*chosen.shape, self.rows)
        else:
            batch = torch.from_numpy(rows.batch % self.log_count.shape[0]).to(chosen.device)
            bias = self.log_count[batch[:, None], chosen].to(like)
        if listed is not None:
            bias = bias.masked_fill(~listed[..., None], -torch.inf)
        return bias.flatten(1)


def _read(
    levels: list[_Level], rows: _Rows, tokens: int, kv_heads: int, heads: int, scratch: _Scratch
) -> _Read:
    """Gather the blocks that these rows read of all `tokens` keys, level after level."""
    R, D = len(rows.m), levels[0].keys.shape[-1]
    kv_row = rows.batch * kv_heads + rows.head // (heads // kv_heads)
    found = [(level, *level.chosen(rows)) for level in levels]
    total = sum(chosen.shape[1] * level.rows for level, chosen, _ in found)
    keys, values = scratch.take(R, total, D), scratch.take(R, total, D)
    biases = []
    start = 0
    for level, chosen, listed in found:
        first = torch.from_numpy(kv_row * level.blocks).to(chosen.device)
        flat = (first[:, None] + chosen).flatten()
        stop = start + chosen.shape[1] * level.rows
        for into, source in ((keys, level.keys), (values, level.values)):
            if len(levels) == 1 and source.dtype == into.dtype:
                torch.index_select(source, 0, flat, out=into.view(-1, *source.shape[1:]))
            else:
                into[:, start:stop] = source.index_select(0, flat).view(R, -1, D)
        biases.append(level.bias(rows, chosen, listed, keys))
        start = stop
    present = [bias for bias in biases if bias is not None]  # of several levels, all are
    bias = torch.cat(present, dim=1) if present else None
    chosen_blocks = tuple((level, blocks) for level, blocks, _ in found)
    return _Read(keys, values, bias, chosen_blocks, tokens)


@dataclass(frozen=True)
class _Rows:
    """Query blocks that are worked on together."""

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


def _chunks(
    levels: list[_Level], shape: tuple[int, int, int], block: int, room: int
) -> Iterator[_Rows]:
    """All query blocks [B, H, M], those with equal work together, within `room` elements."""
    threads = torch.get_num_threads()
    work_bhm = np.zeros(shape, dtype=np.int64)
    for level in levels:
        work_bhm += level.counts.astype(np.int64) * level.rows
    D = levels[0].keys.shape[-1]
    is_last = np.broadcast_to(np.arange(shape[2]) == shape[2] - 1, shape).ravel()
    work = work_bhm.ravel()
    order = np.lexsort((work, is_last))
    position = 0
    # Only a plan of one level gains from equal counts: its rows then need no bias at all.
    exact = len(levels) == 1
    while position < len(order):
        first = order[position]
        fitting = max(1, room // (max(1, int(work[first])) * (2 * D + block)))
        if fitting > threads:  # a product is shared out by rows: none should wait for the last
            fitting -= fitting % threads
        rows = order[position : position + fitting]
        same = is_last[rows] == is_last[first]
        if exact:
            same &= work[rows] == work[first]
        else:
            same &= work[rows] <= 2 * work[first]
        rows = rows[: len(rows) if same.all() else int(np.argmin(same))]
        yield _Rows(*np.unravel_index(rows, shape))
        position += len(rows)
