"""The bits of the current step on a device, and those of the next one on their way.

Two buffers take turns. A thread reads, checks and copies the next step into one of them on a
stream of its own while the current step is read from the other; the streams wait for each other,
the host waits for nobody.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

if TYPE_CHECKING:
    from jali.maskbook.book import MaskBook

Key = tuple[float, int]  # budget, step


@dataclass(eq=False)
class _Slot:
    """One buffer: what it holds or will hold, and what has to be over before it may change."""

    host: Tensor
    device: Tensor
    key: Key | None = None
    ready: Future[Any] | None = None
    copied: Any = None
    released: Any = None
    waited: bool = False


class Replay:
    """Bits of a book by (budget, step, layer, branch). At most two steps are on the device."""

    def __init__(self, book: MaskBook, device: torch.device) -> None:
        self.device = device
        self._book = book
        h = book.header
        shape = (h.layers, *h.slab[:3], -(-h.N // 8))
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._slots = [
            _Slot(
                torch.empty(shape, dtype=torch.uint8, pin_memory=self._cuda),
                torch.empty(shape if self._cuda else (0,), dtype=torch.uint8, device=device),
            )
            for _ in range(2)
        ]
        if self._stream is not None:
            for slot in self._slots:
                # The memory may have belonged to someone whose work is not over yet.
                slot.released = torch.cuda.current_stream(device).record_event()
                slot.device.record_stream(self._stream)
        self._current = 0
        self._first: Key | None = None
        self._worker: ThreadPoolExecutor | None = None

    @property
    def bytes(self) -> int:
        """What it keeps on the device."""
        return sum(slot.device.numel() for slot in self._slots)

    def bits(self, budget: float, step: int, layer: int, branch: int) -> Tensor:
        """uint8 [H, M, ⌈N / 8⌉] on the device."""
        key = (budget, step)
        if self._slots[self._current].key != key:
            self._turn(key)
        slot = self._slots[self._current]
        return (slot.device if self._cuda else slot.host)[layer, branch]

    def prefetch(self, budget: float, step: int) -> None:
        """Begin to load a step into the buffer that is not in use."""
        key = (budget, step)
        if self._first is None:
            self._first = key
        if any(slot.key == key for slot in self._slots):
            return
        slot = self._slots[1 - self._current]
        self._settle(slot)
        slot.key, slot.waited = key, False
        if self._worker is None:
            self._worker = ThreadPoolExecutor(1, thread_name_prefix="jali-bits")
        slot.ready = self._worker.submit(self._load, slot, key)

    def close(self) -> None:
        if self._worker is not None:
            self._worker.shutdown(wait=True)
            self._worker = None
        for slot in self._slots:
            slot.key, slot.ready = None, None

    def _turn(self, key: Key) -> None:
        """Make a step the current one, and send for the one after it."""
        before = self._slots[self._current]
        if self._cuda:
            # Whoever fills this buffer next has to wait for the work that still reads it.
            before.released = torch.cuda.current_stream(self.device).record_event()
        if self._slots[1 - self._current].key != key:
            self.prefetch(*key)
        self._current = 1 - self._current
        slot = self._slots[self._current]
        assert slot.ready is not None
        try:
            slot.ready.result()
        except BaseException:
            slot.key, slot.ready = None, None
            raise
        if self._cuda and not slot.waited:
            torch.cuda.current_stream(self.device).wait_event(slot.copied)
            slot.waited = True
        budget, step = key
        if step + 1 < self._book.steps:
            self.prefetch(budget, step + 1)
        elif self._first is not None:
            self.prefetch(*self._first)  # the next generation begins there

    def _settle(self, slot: _Slot) -> None:
        """A load that nobody asked for may still be going on in this buffer."""
        if slot.ready is not None and not slot.ready.done():
            slot.ready.exception()
        slot.ready = None

    def _load(self, slot: _Slot, key: Key) -> None:
        bits = self._book.bits(*key)
        if slot.copied is not None:
            slot.copied.synchronize()  # an earlier copy may still read the host's half
        np.copyto(slot.host.numpy(), bits)
        if self._stream is None:
            return
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            self._stream.wait_event(slot.released)
            slot.device.copy_(slot.host, non_blocking=True)
            slot.copied = self._stream.record_event()
