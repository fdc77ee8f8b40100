"""Skips the work with plain PyTorch operations: any device, every plan.

Query blocks that read about as much are stacked; the key blocks they read are gathered next to
each other, so that two ordinary batched products do the attention. Scratch stays bounded.

Logits are held as [keys, rows], and values get a column of ones: so both products run as fast as
they can, and the second one also yields the sums of the exponentials.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from jali.backends.backend import Backend, Task
from jali.backends.pyramid import pool
from jali.kernels.lists import group_size
from jali.planning.plan import BlockPlan
from jali.tokens.order import Index
from jali.tokens.padding import KeyPadding

# Longer chunks waste less between products. Just below 32 MB, above which the C library gives
# memory back at once and every call pays for its pages again; less where rearranged copies of q, k
# and v take memory already. Rows of several levels differ in length: short chunks fill up less.
SCRATCH_BYTES = 31 * 2**20
SCRATCH_BESIDE_COPIES = 9 * 2**20
SCRATCH_OF_SEVERAL_LEVELS = 15 * 2**18
# Values with their ones, and pooled keys and values, are copies: of so many heads at a time.
COPIED_BYTES = 3 * 2**20
# Elsewhere (a GPU without Triton) few long chunks count, not the cache: so many times q in fp32.
SCRATCH_ON_DEVICE, COPIED_ON_DEVICE = 2, 1

# Values among which exponentials that nothing was subtracted from neither overflow nor vanish.
ORDINARY = (1e-15, 1e10)


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
        limit, at_most = _limits(q, plan, out_buffer)
        scratch = _Scratch(limit, torch.promote_types(q.dtype, torch.float32), q.device)
        out = torch.empty_like(q) if out_buffer is None else out_buffer
        lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
        each = q.shape[1] // k.shape[1]
        copied = k[:, 0].numel() * scratch.memory.itemsize  # of one head
        at_once = max(1, at_most // copied)
        # Asked after every chunk, and asking a GPU means waiting.
        unshifted = q.device.type == "cpu"
        for kv in range(0, k.shape[1], at_once):
            some, heads = slice(kv, kv + at_once), slice(kv * each, (kv + at_once) * each)
            unshifted = _attend_heads(
                q[:, heads], k[:, some], v[:, some], plan, heads, scale, padding, scratch,
                out[:, heads], lse[:, heads], unshifted,
            )  # fmt: skip
        return out, lse


def _limits(q: Tensor, plan: BlockPlan, out_buffer: Tensor | None) -> tuple[int, int]:
    """Bytes of scratch, and of what is copied at a time."""
    limit = SCRATCH_BYTES if out_buffer is None else SCRATCH_BESIDE_COPIES
    if len(plan.ratios) > 1:
        limit = SCRATCH_OF_SEVERAL_LEVELS
    if q.device.type == "cpu":
        return limit, COPIED_BYTES
    size = 4 * q.numel()
    return max(limit, SCRATCH_ON_DEVICE * size), max(COPIED_BYTES, COPIED_ON_DEVICE * size)


def _attend_heads(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, heads: slice, scale: float,
    padding: KeyPadding | None, scratch: _Scratch, out: Tensor, lse: Tensor, unshifted: bool,
) -> bool:  # fmt: skip
    """Attention of those `heads` of the plan, written into `out` and `lse`; the result
    says whether the rest of the call may stay `unshifted` (see `_attend`)."""
    if padding is not None:
        k, v = padding.zeroed(k), padding.zeroed(v)
    largest = _largest(v)
    unshifted &= ORDINARY[0] < largest < ORDINARY[1] or largest == 0
    levels = [_Level.of(k, v, level, plan, heads, padding) for level in plan.ratios]
    B, H, Sq, _ = q.shape
    block = plan.blocks.q
    for rows in _chunks(levels, (B, H, plan.layout.M), Sq % block > 0, block, scratch.size):
        scratch.clear()
        read = _read(levels, rows, block, plan.layout.k.tokens, H, scratch)
        # Chunks never mix a short last block with others, so all rows are of one length.
        length = min(block, Sq - int(rows.m[0]) * block)
        # Dense rows of a long sequence are cut once more, to keep their logits small.
        step = max(1, scratch.room // (len(rows.m) * read.keys.shape[1]))
        for start in range(0, length, step):
            size = min(step, length - start)
            queries = _cut(q, block, start, size)[rows.place].to(scratch.memory.dtype)
            ahead = None
            if plan.causal:
                assert plan.layout.offset is not None
                query = torch.from_numpy(rows.m).to(q.device)[:, None] * block + start
                query = query + torch.arange(size, device=q.device) + plan.layout.offset
                ahead = read.last()[..., None] > query[:, None]
            logits = scratch.take(len(rows.m), read.keys.shape[1], size)
            part, part_lse, unshifted = _attend(
                queries, read, scale, ahead, logits, largest, unshifted
            )
            _cut(out, block, start, size)[rows.place] = part.to(out.dtype)
            _cut(lse, block, start, size)[rows.place] = part_lse.to(lse.dtype)
            scratch.give(logits)
    return unshifted


def _cut(x: Tensor, block: int, start: int, size: int) -> Tensor:
    """Tokens start to start + size of every block that has them, as a view: [B, H, S, ...] ->
    [B, H, blocks, size, ...]."""
    return x[:, :, start:].unfold(2, size, block).movedim(-1, 3)


def _attend(
    queries: Tensor,
    read: _Read,
    scale: float,
    ahead: Tensor | None,
    logits: Tensor,
    largest: float,
    unshifted: bool,
) -> tuple[Tensor, Tensor, bool]:
    """Two batched products, with the softmax in place of the logits. [R, L, D] and [R, L].

    `unshifted` leaves out the two passes that find and subtract each row's largest logit; a sample
    of the logits and the sums tell whether that is right. If the sums say no, the chunk is done
    again. Whether the rest of the call may stay unshifted is the last of the three results.

    `largest` is that of all values: where a sum of so many could overflow, weights are divided by
    their sum before they meet the values, not the result after.
    """
    limits = torch.finfo(logits.dtype)
    early = not largest * read.keys.shape[1] < limits.max / 2
    while True:
        if read.shared:
            read.bring("keys")
        torch.baddbmm(logits, read.keys, queries.mT, beta=0, alpha=scale, out=logits)
        if unshifted and float(logits[:, ::64].amin()) < -80:
            unshifted = False  # denormal weights make exponentials and products many times slower
        if read.bias is not None:
            logits += read.bias[..., None]
        if ahead is not None:
            logits.masked_fill_(ahead, -torch.inf)
        top: Tensor | float = 0.0
        if not unshifted:
            top = logits.amax(1, keepdim=True)
            top = torch.where(top == -torch.inf, 0, top)  # a row that reads no real key
            logits.sub_(top)
            hides = read.bias is not None or ahead is not None
            _without_denormals(logits, exactly=hides or not largest < ORDINARY[1])
        logits.exp_()
        if read.shared:
            read.bring("values")
        if early:
            total = logits.sum(1, keepdim=True)
            logits.div_(total.clamp_min(limits.tiny))
            out = torch.bmm(read.values.mT, logits)[:, :-1]
        else:
            weighed = torch.bmm(read.values.mT, logits)
            out, total = weighed[:, :-1], weighed[:, -1:]
        if not unshifted or _in_range(total):
            break
        unshifted = False
    if not early:
        out.div_(total.clamp_min(limits.tiny))
    return out.mT, (total.log() + top).squeeze(1), unshifted


def _without_denormals(logits: Tensor, exactly: bool) -> None:
    """Leave no logit whose exponential is denormal: as good as nothing, or `exactly` nothing, which
    takes longer and counts where keys are hidden or values enormous."""
    least = math.log(torch.finfo(logits.dtype).tiny) + 1
    if exactly:
        F.threshold(logits, least, -torch.inf, inplace=True)
    else:
        logits.clamp_min_(least)


def _in_range(total: Tensor) -> bool:
    """Whether sums of exponentials are so far from overflow and underflow that they are as exact
    as with the largest logit taken out, and that their products with ordinary values are too."""
    low, high = total.aminmax()
    return float(low) > math.exp(-30) and float(high) < math.exp(60)


def _largest(values: Tensor) -> float:
    """The largest magnitude; NaN where one of them is."""
    low, high = values.aminmax()
    return float(torch.maximum(-low, high))


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
    """What a chunk of R rows reads, side by side: keys [R, n, D], values with their ones
    [R, n, D + 1], and the bias of each key [R, n] (None where all are 0).

    Where one memory is `shared` by keys and values, each is brought there when it is needed.
    """

    keys: Tensor
    values: Tensor
    shared: bool
    bias: Tensor | None
    chosen: tuple[_Chosen, ...]
    tokens: int

    def bring(self, side: Literal["keys", "values"]) -> None:
        """Gather the blocks of one side, level after level."""
        into: Tensor = getattr(self, side)
        start = 0
        for level, blocks, numbers in self.chosen:
            source: Tensor = getattr(level, side)
            if len(self.chosen) == 1 and source.dtype == into.dtype:
                torch.index_select(source, 0, numbers, out=into.view(-1, *source.shape[1:]))
                return
            size = blocks.shape[1] * level.rows
            found = source.index_select(0, numbers).view(len(into), size, source.shape[-1])
            into[:, start : start + size] = found
            start += size

    def last(self) -> Tensor:
        """The place of each key's last token [R, n]; the last group ends with the last key."""
        places = []
        for level, blocks, _ in self.chosen:
            row = torch.arange(level.rows, device=blocks.device)
            group = blocks[..., None] * level.rows + row
            places.append(((group + 1) * level.ratio).clamp_max(self.tokens).flatten(1) - 1)
        return torch.cat(places, dim=1)


@dataclass(frozen=True, eq=False)
class _Level:
    """The keys and values of one ratio, cut into blocks that can be picked by number."""

    keys: Tensor  # [B·Hkv·N, rows, D]
    values: Tensor  # [B·Hkv·N, rows, D + 1], the last of them 1
    log_count: Tensor | None  # [B|1, N, rows]; None where every key counts once
    counts: Index  # [B|1, H|1, M], on the host
    indices: Tensor  # [B|1 · H|1 · M, W]
    kv_heads: int
    blocks: int
    ratio: int

    @classmethod
    def of(
        cls, k: Tensor, v: Tensor, level: int, plan: BlockPlan, heads: slice,
        padding: KeyPadding | None,
    ) -> _Level:  # fmt: skip
        ratio = group_size(level, plan.blocks.k)
        N, rows = plan.layout.N, plan.blocks.k // ratio
        keys, values, log_count = pool(k, v, ratio, padding)
        missing = N * rows - keys.shape[2]
        # Several levels share one bias; a plan of one level may do without.
        plain = plan.ratios == (1,) and padding is None and not missing
        keys = F.pad(keys, (0, 0, 0, missing)) if missing else keys
        keys = keys.reshape(-1, rows, keys.shape[-1])
        values = F.pad(values, (0, 1, 0, missing), value=1.0).view(-1, rows, values.shape[-1] + 1)
        log_count = F.pad(log_count, (0, missing), value=-torch.inf).unflatten(1, (N, rows))
        listed = plan.lists[level]
        bias = None if plain else log_count
        counts, indices = (
            x if x.shape[1] == 1 else x[:, heads] for x in (listed.counts, listed.indices)
        )
        indices = indices.flatten(0, 2)
        return cls(keys, values, bias, counts.cpu().numpy(), indices, k.shape[1], N, ratio)

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


class _Chosen(NamedTuple):
    """The blocks that a chunk reads of one level: by their place in the sequence [R, most], and by
    their number in the level [R · most]."""

    level: _Level
    blocks: Tensor
    numbers: Tensor


def _read(
    levels: list[_Level], rows: _Rows, block: int, tokens: int, heads: int, scratch: _Scratch
) -> _Read:
    """The blocks that these rows read of all `tokens` keys."""
    R, D = len(rows.m), levels[0].keys.shape[-1]
    kv_heads = levels[0].kv_heads
    kv_row = rows.batch * kv_heads + rows.head // (heads // kv_heads)
    found = [(level, *level.chosen(rows)) for level in levels]
    n = sum(blocks.shape[1] * level.rows for level, blocks, _ in found)
    # Rows that have to be cut need their keys again for every piece.
    shared = R * n * (D + 1 + block) <= scratch.size
    memory = scratch.take(R * n * (D + 1 if shared else 2 * D + 1))
    keys, values = memory[: R * n * D].view(R, n, D), memory[-R * n * (D + 1) :].view(R, n, D + 1)
    chosen, biases = [], []
    for level, blocks, listed in found:
        first = torch.from_numpy(kv_row * level.blocks).to(blocks.device)
        chosen.append(_Chosen(level, blocks, (first[:, None] + blocks).flatten()))
        biases.append(level.bias(rows, blocks, listed, keys))
    present = [bias for bias in biases if bias is not None]  # of several levels, all are
    bias = torch.cat(present, dim=1) if present else None
    read = _Read(keys, values, shared, bias, tuple(chosen), tokens)
    if not shared:
        read.bring("keys")
        read.bring("values")
    return read


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
    levels: list[_Level], shape: tuple[int, int, int], short: bool, block: int, room: int
) -> Iterator[_Rows]:
    """All query blocks [B, H, M], those with equal work together, within `room` elements; the last
    ones apart where they are `short`."""
    threads = torch.get_num_threads()
    work_bhm = np.zeros(shape, dtype=np.int64)
    for level in levels:
        work_bhm += level.counts.astype(np.int64) * level.rows
    D = levels[0].keys.shape[-1]
    is_short = np.broadcast_to(short & (np.arange(shape[2]) == shape[2] - 1), shape).ravel()
    work = work_bhm.ravel()
    order = np.lexsort((work, is_short))
    position = 0
    # Only a plan of one level gains from equal counts: its rows then need no bias at all.
    exact = len(levels) == 1
    while position < len(order):
        left = order[position:]
        short, least = is_short[left[0]], work[left[0]]
        same = (is_short[left] == short) & (work[left] <= (least if exact else 2 * least))
        run = len(left) if same.all() else int(np.argmin(same))
        fitting = max(1, room // (max(1, int(least)) * (D + 1 + block)))
        # Even pieces; and a product is shared out by rows: none should wait for the last.
        size = math.ceil(run / math.ceil(run / fitting))
        if fitting > threads:
            size = min(size + -size % threads, fitting - fitting % threads)
        rows = left[: min(size, run)]
        yield _Rows(*np.unravel_index(rows, shape))
        position += len(rows)
