"""What was submitted for a tag, and how often: a list that only grows."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass, field

from jali.experiments.lock import Owner, now
from jali.experiments.resources import Resources
from jali.experiments.results import Results
from jali.files import canonical, parse_json, read_bytes


@dataclass(frozen=True, slots=True)
class Submission:
    """One time that a job was handed to a machine: `job` is Slurm's number, or that of the local
    process, which is then also the `owner` that can be asked; else that is who submitted."""

    on: str
    job: str
    owner: Owner
    folder: str
    resources: Resources = field(default_factory=Resources)
    time: str = field(default_factory=now)


def add_submission(results: Results, tag: str, submission: Submission) -> None:
    path = results.submissions(tag)
    path.parent.mkdir(parents=True, exist_ok=True)
    # So short that one write is one line, whoever else writes.
    with path.open("ab", buffering=0) as file:
        file.write(f"{canonical(asdict(submission))}\n".encode())
        os.fsync(file.fileno())


def read_submissions(results: Results, tag: str) -> list[Submission]:
    """Every whole line; one that a crash or a full disk cut short is nothing anyone could ask."""
    try:
        text = read_bytes(results.submissions(tag)).decode(errors="replace")
    except FileNotFoundError:
        return []
    found = []
    for line in text.splitlines():
        try:
            facts = parse_json(line)
            facts["owner"] = Owner.from_dict(facts["owner"])
            facts["resources"] = Resources.from_dict(facts["resources"])
            sent = Submission(**facts)
        except (KeyError, TypeError, ValueError):
            continue
        if all(isinstance(text, str) for text in (sent.on, sent.job, sent.folder, sent.time)):
            found.append(sent)
    return found


def last_submission(results: Results, tag: str) -> Submission | None:
    return next(reversed(read_submissions(results, tag)), None)
