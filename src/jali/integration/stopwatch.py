"""How long transformer calls take, dense and sparse ones, without waiting for any of them."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


@dataclass(eq=False)
class Stopwatch:
    """Begin and end of every call of a run, as moments: nothing is read before someone asks."""

    calls: dict[bool, list[tuple[Any, Any]]] = field(
        default_factory=lambda: {True: [], False: []}  # whether it was sparse
    )

    def add(self, sparse: bool, start: Any, end: Any) -> None:
        self.calls[sparse].append((start, end))

    def total(self) -> float | None:
        """Seconds of all calls together; None where they are not known. Waits for the device."""
        times = [_seconds(*call) for kind in self.calls.values() for call in kind]
        return None if not times or any(map(math.isnan, times)) else sum(times)

    def speedup(self) -> float | None:
        """Time of a dense call over that of a sparse one. Waits for the device."""
        dense, sparse = (
            [s for s in (_seconds(*call) for call in self.calls[kind]) if not math.isnan(s)]
            for kind in (False, True)
        )
        # The first call warms caches up, and with one kind only there is nothing to compare.
        if len(dense) < 2 or not sparse:
            return None
        return statistics.median(dense) / max(statistics.median(sparse), 1e-9)


def now(x: Any) -> Any:
    """A moment on x's device: an event there, or the clock."""
    if isinstance(x, Tensor) and x.is_cuda:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def _seconds(start: Any, end: Any) -> float:
    if isinstance(start, float) or isinstance(end, float):
        return end - start if isinstance(start, float) and isinstance(end, float) else math.nan
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
