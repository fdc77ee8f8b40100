"""How long a call takes on the device, and how far its output is from exact attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from jali.backends.pyramid import pool
from jali.kernels.lists import group_size
from jali.planning.plan import BlockPlan


def median_ms(
    call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], *, device: torch.device,
    repeats: int = 10, warmup: int = 2,
) -> float:  # fmt: skip
    """Median time of call(*inputs), rotating among inputs so that no cache serves twice."""
    cuda = device.type == "cuda"
    times = []
    for i in range(-warmup, repeats):
        if cuda and i == 0:
            torch.cuda.synchronize(device)
        begin = _now(cuda)
        call(*inputs[i % len(inputs)])
        times.append((begin, _now(cuda)))
    if cuda:
        torch.cuda.synchronize(device)
    return statistics.median(
        begin.elapsed_time(end) if cuda else 1e3 * (end - begin) for begin, end in times[warmup:]
    )


def _now(cuda: bool) -> Any:
    """The host's time, or an event that the device will reach."""
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def sampled_error(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, plan: BlockPlan | None, scale: float,
    rows: int = 64, heads: int = 4, seed: int = 0,
) -> float:  # fmt: skip
    """‖out − exact‖ / ‖exact‖ over some rows, in arranged order; a plan None reads everything.

    Exact is one fp32 softmax over what the plan reads of each sampled row, level by level.
    """
    B, H, Sq, _ = q.shape
    generator = torch.Generator().manual_seed(seed)
    row = torch.randint(Sq, (rows,), generator=generator)
    row[0], row[-1] = 0, Sq - 1
    row = row.to(q.device)
    chosen = torch.randperm(H, generator=generator)[:heads].tolist()
    wrong = total = 0.0
    for b in range(B):
        for h in chosen:
            exact = _exact(q, k, v, plan, scale, b, h, row)
            got = out[b, h, row].float()
            wrong += float((got - exact).square().sum())
            total += float(exact.square().sum())
    return float((wrong / max(total, 1e-30)) ** 0.5)


def _exact(
    q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan | None, scale: float,
    b: int, h: int, row: Tensor,
) -> Tensor:  # fmt: skip
    kv = h // (q.shape[1] // k.shape[1])
    query, keys, values = q[b, h, row].float() * scale, k[b, kv][None, None], v[b, kv][None, None]
    if plan is None:
        return (query @ keys[0, 0].float().T).softmax(-1) @ values[0, 0].float()
    levels = plan.levels[b % plan.levels.shape[0], h % plan.levels.shape[1]][row // plan.blocks.q]
    logits, means = [], []
    for level in plan.ratios:
        ratio = group_size(level, plan.blocks.k)
        key, value, count = pool(keys, values, ratio, None)
        read = (levels == level).repeat_interleave(plan.blocks.k // ratio, dim=-1)
        logit = query @ key[0, 0].float().T + count.float().log()
        logits.append(logit.masked_fill(~read[:, : logit.shape[1]], -torch.inf))
        means.append(value[0, 0].float())
    return torch.cat(logits, dim=-1).softmax(-1) @ torch.cat(means)
