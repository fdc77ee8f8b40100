"""Skips the work with plain PyTorch operations: any device, every plan.

Query blocks that read about as much are stacked; the key blocks they read are gathered next to
each other, so that two ordinary batched products do the attention. Scratch stays bounded.
"""

from __future__ import annotations

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

SCRATCH_BYTES = 16 * 2**20


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
        padding: KeyPadding | None = None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        B, H, Sq, D = q.shape
        dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
        levels = [_Level.of(k, v, ratio, plan, padding) for ratio in plan.ratios]
        out = torch.empty_like(q)
        lse = torch.empty(B, H, Sq, dtype=torch.float32, device=q.device)
        block = plan.blocks.q
        for rows in _chunks(plan, B, H, D):
            batch, head, m = (torch.from_numpy(x).to(q.device) for x in rows)
            first = int(rows.m[0]) * block
            length = min(block, Sq - first)  # chunks never mix the short last block with others
            at = m[:, None] * block + torch.arange(length, device=q.device)
            kv_row = batch * k.shape[1] + head // (H // k.shape[1])
            read = [level.read(batch, head, m, kv_row, dtype) for level in levels]
            keys, values, bias, place = (_joined(part) for part in zip(*read, strict=True))
            assert keys is not None
            assert values is not None
            step = max(1, SCRATCH_BYTES // (keys.shape[0] * keys.shape[1] * 4))
            for part in at.split(step, dim=1):
                where = (batch[:, None], head[:, None], part)
                queries = q[where].to(dtype) * scale
                logits = torch.bmm(queries, keys.transpose(1, 2))
                if bias is not None:
                    logits += bias[:, None]
                if plan.causal:
                    assert plan.layout.offset is not None
                    assert place is not None
                    # A short last group ends with the keys.
                    place = place.clamp_max(plan.layout.k.tokens - 1)
                    ahead = place[:, None] > part[:, :, None] + plan.layout.offset
                    logits.masked_fill_(ahead, -torch.inf)
                out_part, lse_part = _softmax_times(logits, values)
                out[where] = out_part.to(q.dtype)
                lse[where] = lse_part.float()
        return out, lse


def _softmax_times(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """softmax(logits) @ values and the log-sum-exp, in place of the logits."""
    top = logits.amax(-1, keepdim=True)
    top = torch.where(top == -torch.inf, 0, top)  # a row that reads no real key
    logits.sub_(top).exp_()
    total = logits.sum(-1, keepdim=True)
    out = torch.bmm(logits, values).div_(total.clamp_min(torch.finfo(total.dtype).tiny))
    return out, (total.log() + top).squeeze(-1)


@dataclass(frozen=True, eq=False)
class _Level:
    """The keys and values of one ratio, cut into blocks that can be picked by number."""

    keys: Tensor  # [B·Hkv·N, rows, D]
    values: Tensor
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
            F.pad(x, (0, 0, 0, missing)).reshape(-1, rows, x.shape[-1]) for x in (keys, values)
        )
        log_count = F.pad(log_count, (0, missing), value=-torch.inf).unflatten(1, (N, rows))
        listed = plan.lists[ratio]
        return cls(
            keys, values, None if plain else log_count, listed.counts, listed.indices, N, ratio
        )

    def read(
        self, batch: Tensor, head: Tensor, m: Tensor, kv_row: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
        """The blocks these rows read, side by side: keys and values [R, n, D], the bias of each
        key [R, n] (None where it is 0), and the place of each key's last token."""
        b, h = batch % self.counts.shape[0], head % self.counts.shape[1]
        count = self.counts[b, h, m]
        most = int(count.max())
        chosen = self.indices[b, h, m, :most].long()
        flat = (kv_row[:, None] * self.blocks + chosen).flatten()
        rows, D = self.keys.shape[1:]
        keys, values = (
            x.index_select(0, flat).view(len(m), most * rows, D).to(dtype)
            for x in (self.keys, self.values)
        )
        group = chosen[..., None] * rows + torch.arange(rows, device=m.device)
        place = (group + 1) * self.ratio - 1
        listed = torch.arange(most, device=m.device) < count[:, None]
        bias = None
        if self.log_count is not None:
            bias = self.log_count[batch[:, None] % self.log_count.shape[0], chosen].to(dtype)
        if int(count.min()) < most:
            bias = keys.new_zeros(*chosen.shape, rows) if bias is None else bias
            bias = bias.masked_fill(~listed[..., None], -torch.inf)
        return keys, values, None if bias is None else bias.flatten(1), place.flatten(1)


def _joined(parts: tuple[Tensor | None, ...]) -> Tensor | None:
    """Levels side by side along the keys."""
    return parts[0] if len(parts) == 1 else torch.cat([p for p in parts if p is not None], dim=1)


@dataclass(frozen=True)
class _Rows:
    """Query blocks that are worked on together."""

    batch: Index
    head: Index
    m: Index

    def __iter__(self) -> Iterator[Index]:
        return iter((self.batch, self.head, self.m))


def _chunks(plan: BlockPlan, B: int, H: int, D: int) -> Iterator[_Rows]:
    """All query blocks, those with equal work together, each chunk within the scratch limit."""
    M = plan.layout.M
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
        row_bytes = 4 * max(1, work[first]) * (plan.blocks.q + 2 * D)
        stop = position + max(1, SCRATCH_BYTES // row_bytes)
        rows = order[position:stop]
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
