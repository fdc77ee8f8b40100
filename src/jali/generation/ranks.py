"""Several processes for one clip: who they are, and how a pipeline is shared among them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from jali.error import ArgumentError
from jali.generation.settings import Settings


@dataclass(frozen=True, slots=True)
class Rank:
    """This process among all. Number 0 writes, the others only compute."""

    number: int = 0
    count: int = 1

    @property
    def writes(self) -> bool:
        return self.number == 0

    def wait(self) -> None:
        """For the others."""
        if self.count > 1:
            import torch.distributed as dist

            dist.barrier()


def check_ranks(settings: Settings) -> None:
    """Refuse a count of processes that is not the one asked for, with the command that is."""
    asked = max(settings.context_parallel, settings.tensor_parallel)
    running = int(os.environ.get("WORLD_SIZE", "1"))
    name = "tensor_parallel" if settings.tensor_parallel > 1 else "context_parallel"
    if asked == running:
        return
    if running == 1:
        raise ArgumentError(
            name,
            f"{asked} needs {asked} processes and this is one alone; start them with "
            f"torchrun --nproc-per-node {asked} -m jali generate …",
        )
    raise ValueError(
        f"torchrun started {running} processes, but the run is for {asked}: "
        f"give --context-parallel {running} or --tensor-parallel {running}"
    )


@contextlib.contextmanager
def join_ranks(settings: Settings) -> Iterator[Rank]:
    """This process among those of the run; alone where there is one."""
    check_ranks(settings)
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield Rank()
        return
    import torch
    import torch.distributed as dist

    own = not dist.is_initialized()
    if own:
        cuda = torch.cuda.is_available() and settings.device != "cpu"
        if cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        dist.init_process_group("nccl" if cuda else "gloo")
    try:
        yield Rank(dist.get_rank(), count)
    finally:
        if own:
            dist.destroy_process_group()


def share_pipeline(pipe: Any, settings: Settings) -> None:
    """Spread the transformers of a pipeline over the ranks."""
    if settings.context_parallel == 1 and settings.tensor_parallel == 1:
        return
    import diffusers as library

    diffusers: Any = library
    if settings.context_parallel > 1:
        config = diffusers.ContextParallelConfig(ulysses_degree=settings.context_parallel)
    elif hasattr(diffusers, "TensorParallelConfig"):
        config = diffusers.TensorParallelConfig(tp_degree=settings.tensor_parallel)
    else:
        raise ValueError(
            f"diffusers {diffusers.__version__} has no tensor parallelism; use context parallelism"
        )
    for name in ("transformer", "transformer_2"):
        part = getattr(pipe, name, None)
        if part is not None:
            part.enable_parallelism(config=config)
