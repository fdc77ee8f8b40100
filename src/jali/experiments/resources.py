"""What one job asks of the cluster."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jali.value import check_count

MEMORY = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT])?B?", re.IGNORECASE)
MEGABYTES = {"K": 1 / 1024, "M": 1.0, "G": 1024.0, "T": 1024.0**2}
NAMES = ("partition", "account", "qos", "constraint")
# These become lines of a shell script: one plain word each. A constraint may also be a formula.
NAME = {name: re.compile(r"[\w.,:+@/=-]+", re.ASCII) for name in NAMES}
NAME["constraint"] = re.compile(r"[\w.,:+@/=|&*()\[\]!-]+", re.ASCII)


@dataclass(frozen=True, slots=True)
class Resources:
    """One GPU, eight CPUs, 64 GB and six hours, unless you say otherwise. No GPUs: a CPU job."""

    gpus: int = 1
    cpus_per_task: int = 8
    mem: str = "64GB"
    time: str = "6:00:00"
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None

    def __post_init__(self) -> None:
        for name, least in (("gpus", 0), ("cpus_per_task", 1)):
            check_count(name, getattr(self, name), least)
        for name, value in self.names().items():
            if value is not None and not (isinstance(value, str) and NAME[name].fullmatch(value)):
                raise ValueError(f"{name} must be a name, one plain word, got {value!r}")
        _ = self.megabytes, self.minutes

    @property
    def megabytes(self) -> int:
        found = MEMORY.fullmatch(str(self.mem).strip())
        if not found or float(found[1]) <= 0:
            raise ValueError(f"mem is a size such as 64GB or 8000MB, got {self.mem!r}")
        return max(1, round(float(found[1]) * MEGABYTES[(found[2] or "M").upper()]))

    @property
    def minutes(self) -> int:
        """As Slurm reads it: minutes, minutes:seconds, hours:minutes:seconds, days-hours[:…]."""
        found = re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", str(self.time).strip())
        if not found:
            raise ValueError(f"time is minutes, H:MM:SS or D-HH:MM:SS, got {self.time!r}")
        days, *rest = (None if part is None else int(part) for part in found.groups())
        parts = [part for part in rest if part is not None]
        if days is None and len(parts) < 3:
            parts = [0, *parts]  # no hours
        hours, minutes, seconds = (*parts, 0, 0)[:3]
        total = (((days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds
        if total < 60:
            raise ValueError(f"time must be at least a minute, got {self.time!r}")
        return -(-total // 60)

    def names(self) -> dict[str, str | None]:
        """What the administrators of a cluster have named."""
        return {name: getattr(self, name) for name in NAMES}

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Resources:
        known = {f.name for f in dataclasses.fields(cls)}
        unknown = sorted(set(data) - known)
        if unknown:
            raise ValueError(f"unknown resource {unknown[0]!r}; known: {', '.join(sorted(known))}")
        return cls(**data)
