"""Sees every attention call of a dense run and records how important its blocks are."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali.attend import prepare
from jali.checks import check_call
from jali.integration.transformer import AttentionCall
from jali.maskbook import MEAN
from jali.maskbook.calibration.running_mean import RunningMean
from jali.maskbook.calibration.scorer import Scorer
from jali.maskbook.header import Errors
from jali.methods import Method, Query
from jali.planning.site import Site
from jali.tokens.grid import TokenGrid

IN_FLIGHT = 8  # slabs between the device and the disk

Floats = NDArray[np.float32]


@dataclass(eq=False)
class Recorder:
    """Scores calls on their device and averages them on disk.

    Sums over branches wait in memory until their step is over (of errors, until their part of the
    run is); copies from a GPU and writing go
    on in a thread, in the order of the calls, so that a run gives the same numbers every time.
    """

    scorer: Scorer
    method: Method  # of whose blocks and order it gets its queries
    branches: tuple[str, ...]
    start: Callable[[Recorder], RunningMean]
    errors: Errors | None = None  # in which parts of a run, where errors are recorded
    on_step: Callable[[int, int], None] | None = None
    mean: RunningMean | None = None
    grid: TokenGrid | None = None
    sizes: tuple[int, int, int] | None = None  # steps, layers, heads
    transformers: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.places: dict[tuple[int, str], int] = {}  # as they come, as in a `Header`
        # Of the place that is going on, by place and layer: sum and count of each branch's calls.
        self._pending: dict[tuple[int, int], dict[int, tuple[Floats, int]]] = {}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="jali-calibrate")
        self._room = threading.Semaphore(IN_FLIGHT)
        self._jobs: list[Future[None]] = []
        self._step = -1

    # One call

    def __call__(self, seen: AttentionCall) -> None:
        if seen.q.shape[2] != seen.k.shape[2]:
            return  # not self-attention
        site = seen.site
        self._check(seen)
        if self.mean is None:
            self.mean = self.start(self)
        if site.step != self._step:
            self._step = site.step
            if self.on_step is not None:
                self.on_step(site.step, site.steps)
        at = self._branch(site.branch)
        # A mean over samples of a batch: each is one prompt's or one branch's picture.
        scores = self.scorer(self._query(seen)).mean(0, dtype=torch.float32)
        self._send(self._place(site), site.layer, at, scores)

    def _place(self, site: Site) -> int:
        """Where in the book the step lies: a step is a place of its own, or one of several."""
        if self.errors is None:
            return site.step
        key = self.errors.bucket(site.step, site.steps), site.transformer
        return self.places.setdefault(key, len(self.places))

    def _query(self, seen: AttentionCall) -> Query:
        """The call on the book's blocks, in its order."""
        call = check_call(
            seen.q, seen.k, seen.v, self.method, self.grid, scale=seen.scale, padding=seen.padding
        )
        return prepare(call, self.method, "auto").query(seen.q, seen.k, seen.v, seen.site)[0]

    def _check(self, seen: AttentionCall) -> None:
        """Every call must be one of the same grid, steps and layers."""
        site, grid = seen.site, seen.grid
        if isinstance(grid, str):
            raise ValueError(f"this run cannot be recorded: {grid}")
        sizes = (site.steps, site.layers, seen.q.shape[1])
        if self.grid is None or self.sizes is None:
            self.grid, self.sizes = grid, sizes
        if grid != self.grid:
            raise ValueError(
                f"a book is of one grid, and this run has {self.grid} and {grid}; give all prompts "
                f"one size, and one text length where the text is part of the sequence"
            )
        if sizes != self.sizes:
            raise ValueError(
                f"a book is of one number of steps, layers and heads, and this run has "
                f"{self.sizes} and {sizes}"
            )
        known = self.transformers.setdefault(site.step, seen.transformer)
        if known != seen.transformer:
            raise ValueError(f"step {site.step} runs in {known} and in {seen.transformer}")

    def _branch(self, branch: str) -> int:
        if self.branches == (MEAN,):
            return 0
        if branch not in self.branches:
            raise ValueError(
                f"this pipeline calls its branch {branch!r}, which cannot be told apart into "
                f"{' and '.join(self.branches)}; calibrate with branches='mean'"
            )
        return self.branches.index(branch)

    # To the disk

    def _send(self, place: int, layer: int, branch: int, scores: Tensor) -> None:
        for job in [job for job in self._jobs if job.done()]:
            self._jobs.remove(job)
            job.result()  # what went wrong there is said here
        self._room.acquire()
        host, copied = scores, None
        if scores.is_cuda:
            host = torch.empty(scores.shape, dtype=scores.dtype, pin_memory=True)
            host.copy_(scores, non_blocking=True)
            copied = torch.cuda.current_stream(scores.device).record_event()
        job = self._worker.submit(self._fold, place, layer, branch, host, copied)
        job.add_done_callback(lambda _: self._room.release())
        self._jobs.append(job)

    def _fold(self, place: int, layer: int, branch: int, scores: Tensor, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        for key in [key for key in self._pending if key[0] != place]:
            self._flush(key)
        here = self._pending.setdefault((place, layer), {})
        total, calls = here.get(branch, (np.float32(0), 0))
        here[branch] = (total + scores.numpy(), calls + 1)

    def _flush(self, key: tuple[int, int]) -> None:
        place, layer = key
        where = f"{'step' if self.errors is None else 'part'} {place}"
        pending = self._pending.pop(key)
        for at, name in enumerate(self.branches):
            if at not in pending:
                raise ValueError(
                    f"branch {name!r} did not run in {where}: without guidance there is "
                    f"nothing to keep apart; calibrate with branches='mean'"
                )
        x = np.stack([pending[at][0] / np.float32(pending[at][1]) for at in sorted(pending)])
        if not np.isfinite(x).all() or (x < 0).any():
            raise ValueError(
                f"{self.scorer.name} gave {'importance' if self.errors is None else 'errors'} "
                f"that {'is' if self.errors is None else 'are'} negative or not finite at {where}, "
                f"layer {layer}"
            )
        assert self.mean is not None
        self.mean.put(place, layer, x)

    def finish(self) -> RunningMean:
        """A prompt is over: all of it is in the mean, or this raises."""
        jobs, self._jobs = self._jobs, []
        for job in jobs:
            job.result()
        for key in sorted(self._pending):
            self._flush(key)
        if self.mean is None:
            raise ValueError(
                "no self-attention came by: this pipeline does not run its transformer's attention "
                "through jali, or made no step"
            )
        self._step = -1
        return self.mean

    def close(self) -> None:
        """Wait for what is on its way to the disk."""
        self._worker.shutdown(wait=True)
