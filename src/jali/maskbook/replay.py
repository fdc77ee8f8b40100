"""The bits of the current step on a device, and those of the next one on their way.

Two buffers take turns. A thread reads, checks and copies the next step into one of them on a
stream of its own while the current step is read from the other; the streams wait for each other,
the host waits for nobody.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from jali.maskbook.bits import width

if TYPE_CHECKING:
    from jali.maskbook.book import MaskBook


@dataclass(eq=False)
class _StepBuffer:
    """What it holds or will hold, and what has to be over before it may change."""

    host: Tensor
    device: Tensor
    key: tuple[float, int] | None = None  # budget, step
    loading: Future[None] | None = None
    copied: Any = None  # event: the copy from host to device is over
    released: Any = None  # event: the work that reads the device's half is over


class Replay:
    """Bits of a book by (budget, step, layer, branch). At most two steps are on the device."""

    def __init__(self, book: MaskBook, device: torch.device) -> None:
        self.device = device
        self._book = book
        h, cuda = book.header, device.type == "cuda"
        shape = (h.layers, *h.slab[:3], width(h.N))
        self._stream = torch.cuda.Stream(device) if cuda else None
        hosts = [torch.empty(shape, dtype=torch.uint8, pin_memory=cuda) for _ in range(2)]
        self._buffers = [
            _StepBuffer(host, torch.empty_like(host, device=device) if cuda else host)
            for host in hosts
        ]
        if self._stream is not None:
            for buffer in self._buffers:
                # The memory may have belonged to someone whose work is not over yet.
                buffer.released = torch.cuda.current_stream(device).record_event()
                buffer.device.record_stream(self._stream)
        self._current = 0
        self._after: dict[tuple[float, int], tuple[float, int]] = {}
        self._first: tuple[float, int] | None = None
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="jali-bits")

    @property
    def bytes(self) -> int:
        """What it keeps on the device."""
        return sum(b.device.numel() for b in self._buffers) if self._stream else 0

    def bits(self, budget: float, step: int, layer: int, branch: int) -> Tensor:
        """uint8 [H, M, ⌈N / 8⌉] on the device."""
        if self._buffers[self._current].key != (budget, step):
            self._turn(budget, step)
        return self._buffers[self._current].device[layer, branch]

    def expect(self, steps: Sequence[tuple[float, int]]) -> None:
        """The (budget, step) of a run in order: what to send for while each is running."""
        self._after = dict(pairwise((*steps, *steps[:1])))  # the next generation begins there
        if steps:
            self.prefetch(*steps[0])

    def prefetch(self, budget: float, step: int) -> None:
        """Begin to load a step into the buffer that is not in use."""
        key = (budget, step)
        self._first = self._first or key
        if any(buffer.key == key for buffer in self._buffers):
            return
        buffer = self._buffers[1 - self._current]
        if buffer.loading is not None:
            buffer.loading.exception()  # a load that nobody waited for may still be going on
        buffer.key = key
        buffer.loading = self._worker.submit(self._load, buffer, budget, step)

    def close(self) -> None:
        self._worker.shutdown(wait=True)

    def _turn(self, budget: float, step: int) -> None:
        """Make a step the current one, and send for the one after it."""
        if self._stream is not None:
            # Whoever fills this buffer next has to wait for the work that still reads it.
            stream = torch.cuda.current_stream(self.device)
            self._buffers[self._current].released = stream.record_event()
        self.prefetch(budget, step)
        self._current = 1 - self._current
        buffer = self._buffers[self._current]
        assert buffer.loading is not None
        try:
            buffer.loading.result()
        except BaseException:
            buffer.key = buffer.loading = None
            raise
        if self._stream is not None:
            stream.wait_event(buffer.copied)
        if (budget, step) in self._after:
            self.prefetch(*self._after[budget, step])
        elif step + 1 < self._book.steps:
            self.prefetch(budget, step + 1)
        elif self._first is not None:
            self.prefetch(*self._first)  # the next generation begins there

    def _load(self, buffer: _StepBuffer, budget: float, step: int) -> None:
        bits = self._book.bits(budget, step)
        if buffer.copied is not None:
            buffer.copied.synchronize()  # an earlier copy may still read the host's half
        np.copyto(buffer.host.numpy(), bits)
        if self._stream is None:
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(buffer.released)
            buffer.device.copy_(buffer.host, non_blocking=True)
            buffer.copied = self._stream.record_event()
