"""How long transformer calls take, dense and sparse ones, without waiting for any of them."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

LATEST = 256  # calls of a kind whose times are kept
KINDS = 64  # those that were met last
WARM = 2  # calls that have to agree, so that one that was held up does not decide


class RanAttention(NamedTuple):
    """One self-attention that ran in a transformer call; a cache may have skipped others."""

    layer: int
    shape: tuple[int, ...]  # of its output
    backend: str
    sparse: bool


@dataclass(eq=False)
class CallTimes:
    """(begin, end) of calls that are alike, as moments on their device.

    The first one is apart: it compiles, tunes and allocates.
    """

    first: tuple[Any, Any]
    warm: deque[tuple[Any, Any]] = field(default_factory=deque)

    def seconds(self) -> list[float]:
        """Of the warm calls, where both ends were seen by one clock."""
        times = (_seconds(*call) for call in self.warm)
        return [each for each in times if not math.isnan(each)]


Kind = tuple[str, tuple[RanAttention, ...]]  # transformer, and what ran


@dataclass(eq=False)
class Stopwatch:
    """The transformer calls of a generation by what ran in them. Nothing is read before someone
    asks; adding waits for nothing.

    However long a generation is, the latest calls of the latest kinds are kept, and of all others
    the sum of their seconds.
    """

    kinds: dict[Kind, CallTimes] = field(default_factory=dict)  # the latest last
    why_not: str | None = None  # no two calls can be compared
    _first: tuple[Any, Any] | None = None
    _older: float = 0.0

    def add(self, transformer: str, ran: tuple[RanAttention, ...], start: Any, end: Any) -> None:
        """One call, and the self-attentions that ran in it."""
        kind, call = (transformer, ran), (start, end)
        self._first = self._first or call
        times = self.kinds.pop(kind, None)
        if times is None:
            times = CallTimes(call)
        else:
            times.warm.append(call)
        self.kinds[kind] = times
        if len(times.warm) > LATEST:
            self._older += _seconds(*times.warm.popleft())
        if len(self.kinds) > KINDS:
            gone = self.kinds.pop(next(iter(self.kinds)))
            self._older += sum(_seconds(*each) for each in (gone.first, *gone.warm))

    def total(self) -> float | None:
        """Seconds of all calls together, those that warmed up too; None where they are not known.
        Waits for the device."""
        kept = (call for times in self.kinds.values() for call in (times.first, *times.warm))
        total = self._older + sum(_seconds(*call) for call in kept)
        return total if self.kinds and not math.isnan(total) else None

    def first(self) -> float | None:
        """Seconds of the first call of all, which loads and compiles; None where they are not
        known. Waits for the device."""
        seconds = math.nan if self._first is None else _seconds(*self._first)
        return None if math.isnan(seconds) else seconds

    def speedup(self) -> float | str:
        """Time of a dense call over that of a sparse one, or why there is none to state. Waits for
        the device.

        Compared are warm calls of one transformer in which the same layers ran on tensors of the
        same shape, all that it has: no call in which a cache skipped some.
        """
        if not self.kinds:
            return "no transformer call was timed: a model compiled as a whole does not say when"
        if self.why_not is not None:
            return self.why_not
        pairs = [(dense, sparse) for dense, sparse in self._alike() if dense and sparse]
        if not pairs:
            return "no dense call ran the same layers on the same shapes as a sparse one"
        pair = max(pairs, key=lambda pair: min(len(times.warm) for times in pair))
        found = [times.seconds() for times in pair]
        for name, seconds in zip(("dense", "sparse"), found, strict=True):
            if len(seconds) < WARM:
                return (
                    f"{WARM} warm {name} calls of one shape are needed, there were {len(seconds)}"
                )
        # Of two, the lower: whatever disturbs a call makes it longer.
        dense, sparse = map(statistics.median_low, found)
        return dense / max(sparse, 1e-9)

    def _alike(self) -> list[list[CallTimes | None]]:
        """[dense, sparse] calls that differ in nothing else.

        Where either are of several kinds (other backends, other sparse layers), the kind with the
        most calls stands for them.
        """
        whole = {name: max(len(ran) for own, ran in self.kinds if own == name)
                 for name, _ in self.kinds}  # fmt: skip
        found: dict[Any, list[CallTimes | None]] = {}
        for (name, ran), times in self.kinds.items():
            if not ran or len(ran) < whole[name]:
                continue
            pair = found.setdefault((name, *((r.layer, r.shape) for r in ran)), [None, None])
            sparse = any(r.sparse for r in ran)
            known = pair[sparse]
            if known is None or len(times.warm) > len(known.warm):
                pair[sparse] = times
        return list(found.values())


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
