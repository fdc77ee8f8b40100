"""Skips the work with plain PyTorch operations: any device, every plan.

Query blocks that read about as much are stacked; the key blocks they read are gathered next to
each other, so that two ordinary batched products do the attention. Scratch stays bounded.
"""

from __future__ import annotations

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
# memory back at once and every call pays for its pages again; half of it where rearranged copies
# of q, k and v take memory already.
SCRATCH_BYTES = 30 * 2**20
SCRATCH_BESIDE_COPIES = 15 * 2**20


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
        B, H, Sq, D = q.shape
        if len(plan.ratios) > 1 and k.shape[1] > 1:
            return self._head_by_head(q, k, v, plan, scale, padding, spare)
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        levels = [_Level.of(k, v, ratio, plan, padding) for ratio in plan.ratios]
        out = torch.empty_like(q) if spare is None else spare
        lse = torch.empty(B, H, Sq, dtype=torch.float32, device=q.device)
        limit = SCRATCH_BYTES if spare is None else SCRATCH_BESIDE_COPIES
        scratch = _Scratch(limit, dtype, q.device)
        longest = F.pad(_norms(q), (0, plan.layout.M * plan.blocks.q - Sq))
        longest = longest.unflatten(2, (plan.layout.M, plan.blocks.q)).amax(-1)  # [B, H, M]
        for rows in _chunks(plan, B, H, D, limit):
            scratch.clear()
            read = _read(levels, rows, k.shape[2], k.shape[1], H, scratch)
            tame = bool(abs(scale) * longest[tuple(rows)].amax() * read.longest < 60)
            # Chunks never mix the short last block with others, so all rows are of one length.
            first = int(rows.m[0]) * plan.blocks.q
            length = min(plan.blocks.q, Sq - first)
            # Dense rows of a long sequence are cut once more, to keep their logits small.
            step = max(1, scratch.room // (read.keys.shape[0] * (read.keys.shape[1] + D)))
            for start in range(0, length, step):
                size = min(step, length - start)
                runs = list(_runs(rows, plan.blocks.q, start, size, length))
                queries = scratch.take(len(rows.m), size, D)
                for here, b, h, there in runs:
                    queries[here] = q[b, h, there].unflatten(0, (-1, size))
                ahead = None
                if plan.causal:
                    assert plan.layout.offset is not None
                    query = torch.from_numpy(rows.m).to(q.device)[:, None] * plan.blocks.q + start
                    query = query + torch.arange(size, device=q.device) + plan.layout.offset
                    ahead = read.last()[:, None] > query[..., None]
                logits = scratch.take(len(rows.m), size, read.keys.shape[1])
                out_part, lse_part = _attend(queries, read, scale, ahead, logits, tame)
                for here, b, h, there in runs:
                    out[b, h, there] = out_part[here].flatten(0, 1)
                    lse[b, h, there] = lse_part[here].flatten()
                scratch.give(logits)
                scratch.give(queries)
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


def _norms(x: Tensor) -> Tensor:
    """The length of every row, [..., D] -> [...]."""
    return torch.linalg.vector_norm(x, dim=-1, dtype=torch.promote_types(x.dtype, torch.float32))


def _attend(
    queries: Tensor, read: _Read, scale: float, ahead: Tensor | None, logits: Tensor, tame: bool
) -> tuple[Tensor, Tensor]:
    """Two batched products, with the softmax in place of the logits. [R, L, D] and [R, L].

    `tame`: no logit can be beyond ±60, by the lengths of queries and keys. Then exp() neither
    overflows nor loses a row, and the two passes that find and subtract each row's largest logit
    are left out.
    """
    torch.bmm(queries.mul_(scale), read.keys.transpose(1, 2), out=logits)
    if read.bias is not None:
        logits += read.bias[:, None]
    if ahead is not None:
        logits.masked_fill_(ahead, -torch.inf)
    top: Tensor | float = 0.0
    if not tame:
        top = logits.amax(-1, keepdim=True)
        top = torch.where(top == -torch.inf, 0, top)  # a row that reads no real key
        logits.sub_(top)
    total = logits.exp_().sum(-1, keepdim=True)
    out = torch.bmm(logits, read.values).div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    return out, (total.log() + top).squeeze(-1)


class _Scratch:
    """One piece of memory, used for every chunk again: fresh memory costs more than the work."""

    def __init__(self, size: int, dtype: torch.dtype, device: torch.device) -> None:
        self.memory = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
        self.used = 0

    @property
    def room(self) -> int:
        """Elements left, at least a few: what does not fit gets memory of its own."""
        return max(self.memory.numel() - self.used, self.memory.numel() // 8)

    def take(self, *shape: int) -> Tensor:
        size = math.prod(shape)
        if self.used + size > self.memory.numel():
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
    longest: Tensor  # the length of the longest key, a scalar
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
    norms: Tensor  # [B·Hkv·N]; the length of the longest key of each block
    log_count: Tensor | None  # [B|1, N, rows]; None where every key counts once
    counts: Tensor  # [B|1, H|1, M]
    indices: Tensor  # [B|1, H|1, M, W]
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
        norms = _norms(keys).amax(-1)
        return cls(keys, values, norms, bias, listed.counts, listed.indices, N, ratio)

    @property
    def rows(self) -> int:
        return self.keys.shape[1]

    def bias(self, batch: Tensor, chosen: Tensor, listed: Tensor, like: Tensor) -> Tensor | None:
        """What is added to the logits: the log of the keys behind each, −inf for none. [R, n]."""
        if self.log_count is None and bool(listed.all()):
            return None
        if self.log_count is None:
            bias = like.new_zeros(*chosen.shape, self.rows)
        else:
            bias = self.log_count[(batch % self.log_count.shape[0])[:, None], chosen].to(like)
        return bias.masked_fill(~listed[..., None], -torch.inf).flatten(1)


def _read(
    levels: list[_Level], rows: _Rows, tokens: int, kv_heads: int, heads: int, scratch: _Scratch
) -> _Read:
    """Gather the blocks that these rows read of all `tokens` keys, level after level."""
    device = levels[0].keys.device
    batch, head, m = (torch.from_numpy(x).to(device) for x in rows)
    kv_row = batch * kv_heads + head // (heads // kv_heads)
    found = []
    for level in levels:
        b, h = batch % level.counts.shape[0], head % level.counts.shape[1]
        count = level.counts[b, h, m]
        most = int(count.max())
        chosen = level.indices[b, h, m, :most].long()
        listed = torch.arange(most, device=device) < count[:, None]
        found.append((level, chosen, listed))
    total = sum(chosen.shape[1] * level.rows for level, chosen, _ in found)
    D = levels[0].keys.shape[-1]
    keys, values = scratch.take(len(m), total, D), scratch.take(len(m), total, D)
    biases, longest = [], []
    start = 0
    for level, chosen, listed in found:
        flat = (kv_row[:, None] * level.blocks + chosen).flatten()
        stop = start + chosen.shape[1] * level.rows
        for into, source in ((keys, level.keys), (values, level.values)):
            if len(levels) == 1 and source.dtype == into.dtype:
                torch.index_select(source, 0, flat, out=into.view(-1, *source.shape[1:]))
            else:
                into[:, start:stop] = source.index_select(0, flat).view(len(m), -1, D)
        biases.append(level.bias(batch, chosen, listed, keys))
        longest.append(level.norms[flat].amax() if len(flat) else level.norms.new_zeros(()))
        start = stop
    present = [bias for bias in biases if bias is not None]  # of several levels, all are
    bias = torch.cat(present, dim=1) if present else None
    chosen_blocks = tuple((level, blocks) for level, blocks, _ in found)
    return _Read(keys, values, bias, torch.stack(longest).amax(), chosen_blocks, tokens)


@dataclass(frozen=True)
class _Rows:
    """Query blocks that are worked on together."""

    batch: Index
    head: Index
    m: Index

    def __iter__(self) -> Iterator[Index]:
        return iter((self.batch, self.head, self.m))


def _runs(
    rows: _Rows, block: int, start: int, size: int, length: int
) -> Iterator[tuple[slice, int, int, slice]]:
    """Neighbouring rows that one copy serves: their slice of the chunk, sample, head, tokens."""
    first = 0
    for row in range(1, len(rows.m) + 1):
        together = (
            row < len(rows.m)
            and size == length == block
            and rows.batch[row] == rows.batch[first]
            and rows.head[row] == rows.head[first]
            and rows.m[row] == rows.m[row - 1] + 1
        )
        if not together:
            at = int(rows.m[first]) * block + start
            tokens = slice(at, at + (row - first) * size)
            yield slice(first, row), int(rows.batch[first]), int(rows.head[first]), tokens
            first = row


def _chunks(plan: BlockPlan, B: int, H: int, D: int, limit: int) -> Iterator[_Rows]:
    """All query blocks, those with equal work together, each chunk within `limit` bytes."""
    M, threads = plan.layout.M, torch.get_num_threads()
    work_bhm = np.zeros((B, H, M), dtype=np.int64)
    for ratio in plan.ratios:
        counts = plan.lists[ratio].counts.cpu().numpy()
        work_bhm += counts.astype(np.int64) * (plan.blocks.k // ratio)
    is_last = np.broadcast_to(np.arange(M) == M - 1, work_bhm.shape).ravel()
    work = work_bhm.ravel()
    order = np.lexsort((work, is_last))
    position = 0
    # Only a plan of one level gains from equal counts: its rows then need no bias at all.
    exact = len(plan.ratios) == 1
    while position < len(order):
        first = order[position]
        row_bytes = 4 * (max(1, work[first]) * (2 * D + plan.blocks.q) + plan.blocks.q * D)
        fitting = max(1, limit // row_bytes)
        if fitting > threads:  # a product is shared out by rows: none should wait for the last
            fitting -= fitting % threads
        rows = order[position : position + fitting]
        same = is_last[rows] == is_last[first]
        if exact:
            same &= work[rows] == work[first]
        else:
            same &= work[rows] <= 2 * work[first]
        rows = rows[: len(rows) if same.all() else int(np.argmin(same))]
        batch, rest = np.divmod(rows, H * M)
        head, m = np.divmod(rest, M)
        yield _Rows(batch, head, m)
        position += len(rows)
