"""Several processes on one experiment: one decides and writes, the others compute along."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass

from jali.experiments.experiment import Experiment
from jali.experiments.results import Results


@dataclass(frozen=True, slots=True)
class Team:
    """This process among those of the experiment."""

    rank: int = 0
    count: int = 1

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def agree(self, decision: bool | None) -> bool:
        """What the leader has decided; the others bring None."""
        if self.count == 1:
            return bool(decision)
        import torch.distributed as dist

        said = [decision]
        dist.broadcast_object_list(said, src=0)
        return bool(said[0])


def speaks() -> bool:
    """Whether this process is the one that talks to people, before and after there is a team."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def assembled(experiment: Experiment, results: Results) -> Iterator[Team]:
    """The team of an experiment; torchrun has started its processes."""
    running = int(os.environ.get("WORLD_SIZE", "1"))
    if experiment.ranks == 1 and running == 1:
        yield Team()
        return
    if experiment.ranks != running:
        raise ValueError(
            f"the experiment is for {experiment.ranks} processes, and {running} run; start it with "
            f"torchrun --nproc-per-node {experiment.ranks} -m jali experiment run …"
        )
    from jali.experiments.stages.variant import DENSE, settings_of
    from jali.generation.ranks import join_ranks

    with join_ranks(settings_of(experiment, DENSE, results.folder(experiment.tag))) as rank:
        yield Team(rank.number, rank.count)
