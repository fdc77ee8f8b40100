"""How long a call takes on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch


def median_ms(
    call: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    *,
    device: torch.device,
    repeats: int = 10,
    warmup: int = 2,
) -> float:
    """Median time of call(*inputs), rotating among inputs so that no cache serves twice."""
    for i in range(warmup):
        call(*inputs[i % len(inputs)])
    if device.type != "cuda":
        return _host(call, inputs, repeats)
    torch.cuda.synchronize(device)
    events = []
    for i in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call(*inputs[i % len(inputs)])
        end.record()
        events.append((start, end))
    torch.cuda.synchronize(device)
    return statistics.median(start.elapsed_time(end) for start, end in events)


def _host(call: Callable[..., Any], inputs: Sequence[tuple[Any, ...]], repeats: int) -> float:
    times = []
    for i in range(repeats):
        begin = time.perf_counter()
        call(*inputs[i % len(inputs)])
        times.append(time.perf_counter() - begin)
    return 1e3 * statistics.median(times)
