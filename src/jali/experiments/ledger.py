"""What was submitted for a tag, and how often: a list that only grows."""

from __future__ import annotations

import datetime
from dataclasses import dataclass, field
from typing import Any

from jali.experiments.owner import Owner, me
from jali.experiments.resources import Resources
from jali.experiments.results import Results
from jali.experiments.storage import append_line, read_lines

WHERE = ("local", "slurm")


@dataclass(frozen=True, slots=True)
class Submission:
    """One time that a job was handed to a machine. `job` is Slurm's number, or the local
    controller's process."""

    on: str
    job: str
    owner: Owner
    folder: str
    resources: Resources = field(default_factory=Resources)
    time: str = ""


def enter(
    results: Results,
    tag: str,
    on: str,
    job: str,
    folder: str,
    resources: Resources,
    owner: Owner | None = None,
) -> None:
    """`owner` is the process that can be asked: the local controller, else who submitted."""
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    facts: dict[str, Any] = {
        "on": on, "job": job, "owner": (owner or me()).to_dict(), "folder": folder, "time": now,
        "resources": resources.to_dict(),
    }  # fmt: skip
    append_line(results.ledger(tag), facts)


def submissions(results: Results, tag: str) -> list[Submission]:
    found = []
    for line in read_lines(results.ledger(tag)):
        try:
            found.append(
                Submission(
                    str(line["on"]),
                    str(line["job"]),
                    Owner.from_dict(line["owner"]),
                    str(line["folder"]),
                    Resources.from_dict(line["resources"]),
                    str(line["time"]),
                )
            )
        except (KeyError, TypeError, ValueError):
            continue  # a line that was damaged is no submission that anyone could ask about
    return found
