"""Clips of a group of prompts: made in one call of the pipeline, timed, and kept as run folders."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.clips.clip import read_clip
from jali.clips.source import to_uint8
from jali.error import InputError
from jali.evaluation.arena.record import DENSE, RUNS
from jali.files import make_folder
from jali.generation.folder import clip_name
from jali.generation.machine import machine, versions
from jali.generation.manifest import NAME, RunFolder, read_run
from jali.generation.produce import attention, clips_of, describe_clip, sites_text, write_clip
from jali.generation.settings import Settings
from jali.integration.stats import Stats
from jali.version import __version__

WRITERS = 8  # clips that are encoded at once


@dataclass(frozen=True)
class Made:
    """A group of clips, uint8 [n, F, H, W, 3] on the device, and what the one run of them took."""

    settings: Settings
    clips: Tensor
    seconds: float
    stats: Stats
    sites: str

    @property
    def cost(self) -> float:
        return self.stats.cost

    @property
    def backends(self) -> tuple[str, ...]:
        """Those of the sparse calls."""
        return tuple(sorted({row.backend for row in self.stats.rows if row.reason is None}))


@dataclass(frozen=True)
class Studio:
    """A pipeline, the prompts, and the folder that their clips go to."""

    pipe: Any
    prompts: tuple[str, ...]
    folder: Path

    @property
    def device(self) -> torch.device:
        """Where the pipeline computes, also one that is offloaded."""
        found: torch.device = getattr(self.pipe, "_execution_device", self.pipe.device)
        return found

    def make(self, settings: Settings, group: range) -> Made:
        """The clips of some prompts, each with the seed of its number, by resolved settings."""
        seeds = [settings.seed + number for number in group]
        with attention(self.pipe, settings) as handle:
            start = self._now()
            frames = clips_of(self.pipe, settings, self.some(group), seeds)
            seconds = self._now() - start
            stats = handle.stats()
            sites = sites_text(handle, stats)
        return Made(settings, to_uint8(frames), seconds, stats, sites)

    def some(self, group: range) -> tuple[str, ...]:
        return self.prompts[group.start : group.stop]

    def _now(self) -> float:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return time.perf_counter()

    def keep(self, name: str, made: Made, group: range, fresh: bool) -> None:
        """Put the clips into the run folder of that name, beside those of other groups. A fresh one
        has none: what is there was left by a process that was killed before it noted them, or was
        taken away; numbers stay."""
        folder = self.folder / RUNS / name
        make_folder(folder)
        run = RunFolder(folder, made.settings) if fresh else read_run(folder)
        if run.settings.digest != made.settings.digest:
            raise InputError(f"{folder} was changed by others: it is not the run of this arena")
        clips = [
            describe_clip(
                made.settings, number, self.prompts[number], clip, made.seconds, made.stats,
                together=len(group),
            )
            for number, clip in zip(group, made.clips, strict=True)
        ]  # fmt: skip
        with ThreadPoolExecutor(WRITERS) as pool:
            jobs = [
                pool.submit(write_clip, folder, clip, frames, made.sites)
                for clip, frames in zip(clips, made.clips.cpu(), strict=True)
            ]
            for job in jobs:
                job.result()
        known = {clip.name: clip for clip in (*run.clips, *clips)}
        run = replace(
            run,
            clips=tuple(known[name] for name in sorted(known)),
            complete=len(known) == len(self.prompts),
            machine=machine(str(made.settings.device)),
            versions=versions(),
            jali=__version__,
        )
        run.write()

    def has_run(self, name: str) -> bool:
        return (self.folder / RUNS / name / NAME).exists()

    def read_dense(self, group: range) -> Tensor | None:
        """The dense clips as they were kept, where the pipeline computes; None where none are."""
        folder = self.folder / RUNS / DENSE
        run = read_run(folder) if self.has_run(DENSE) else None
        known = {} if run is None else {clip.name: run.path(clip.lossless) for clip in run.clips}
        names = [clip_name(number, self.prompts[number]) for number in group]
        if not all(name in known for name in names):
            return None
        return torch.stack([read_clip(known[name]).frames for name in names]).to(self.device)


def film_of(folder: Path, name: str, number: int, prompt: str) -> Path | None:
    """A clip of a run for people, where it is there."""
    path = folder / RUNS / name / f"{clip_name(number, prompt)}.mp4"
    return path if path.is_file() else None
