"""How long a call takes on the device, and how far its output is from exact attention."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

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
    query, keys, values = q[b, h, row].float() * scale, k[b, kv].float(), v[b, kv].float()
    if plan is None:
        return (query @ keys.T).softmax(-1) @ values
    levels = plan.levels[b % plan.levels.shape[0], h % plan.levels.shape[1]][row // plan.blocks.q]
    logits, means = [], []
    for ratio in plan.ratios:
        groups = -(-len(keys) // ratio)
        count = torch.full((groups,), float(ratio), device=q.device)
        count[-1] = len(keys) - (groups - 1) * ratio
        key, value = (_group_sums(x, ratio) / count[:, None] for x in (keys, values))
        if ratio > 1:  # pooled keys are stored in the input's precision
            key, value = key.to(k.dtype).float(), value.to(v.dtype).float()
        read = (levels == ratio).repeat_interleave(plan.blocks.k // ratio, dim=-1)[:, :groups]
        logits.append((query @ key.T + count.log()).masked_fill(~read, -torch.inf))
        means.append(value)
    return torch.cat(logits, dim=-1).softmax(-1) @ torch.cat(means)


def _group_sums(x: Tensor, ratio: int) -> Tensor:
    missing = -len(x) % ratio
    return torch.nn.functional.pad(x, (0, 0, 0, missing)).unflatten(0, (-1, ratio)).sum(1)
