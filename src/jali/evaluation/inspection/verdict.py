"""Which method is nearest to dense, where the judged calls can tell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from jali.evaluation.inspection.judge import JudgedCall, ranking, too_costly
from jali.evaluation.quality.interval import interval
from jali.name import CONTROLS


@dataclass(frozen=True)
class Verdict:
    """The method with the smallest mean error at this cost, and those it cannot be told from.

    It is ahead of another where the mean difference of their errors, head by head of every call,
    is above 0 by its 95 % interval. `unfree` are methods that chose nothing: all that they read is
    always read.
    """

    first: str | None
    equals: tuple[str, ...]
    pairs: int  # heads of calls
    unfree: tuple[str, ...]

    @property
    def winner(self) -> str | None:
        """The first one, if it has no equals and chose what it read."""
        return None if self.equals or self.first in self.unfree else self.first


def verdict(judged: Sequence[JudgedCall]) -> Verdict:
    """Over all calls; methods that cannot be had at this cost do not take part."""
    costly, names = too_costly(judged), [name for name, _, _ in ranking(judged)]
    chose = {score.method for call in judged for score in call.scores if not score.no_choice}
    unfree = tuple(name for name in names if name not in chose)
    fair = [name for name in names if name not in costly]
    if len(fair) < 2:  # nothing to be nearer than
        return Verdict(None, (), 0, unfree)
    first, *others = fair
    errors = {name: _errors(judged, name) for name in fair}
    equals = tuple(name for name in others if not _ahead(errors[first], errors[name]))
    return Verdict(first, equals, len(errors[first]), unfree)


def sentences(judged: Sequence[JudgedCall]) -> list[str]:
    """The verdict in words."""
    found, said = verdict(judged), []
    if found.first is not None and found.first not in found.unfree:
        said.append(_who_is_first(judged, found))
    if found.unfree:
        least = min(s.always for j in judged for s in j.scores if s.method in found.unfree)
        tokens = max(call.capture.grid.tokens for call in judged)
        every = len(found.unfree) == len(judged[0].scores)
        whom = "any method" if every else ", ".join(found.unfree)
        said.append(
            f"a cost of {judged[0].cost:g} leaves no choice to {whom} at {tokens:,} tokens: what "
            f"is always read (own blocks, text, a first frame) costs {least:.3f} or more; ask for "
            f"a higher --cost or a larger clip"
        )
    return said


def what_is_left(judged: Sequence[JudgedCall]) -> str | None:
    """How far from dense any choice of levels would be at this cost, in words."""
    found = [call.reachable for call in judged if call.reachable is not None]
    if not found:
        return None
    error = fmean(each.score.error for each in found)
    least = min(found, key=lambda each: each.rows)
    if least.rows < least.of:
        return f"{least}: error {error:.1%}; with all of them it would be less, and take longer"
    return (
        f"{least}: error {error:.1%}, about the least that any choice of blocks and levels has at "
        f"this cost; to know it takes more than dense attention"
    )


def _who_is_first(judged: Sequence[JudgedCall], found: Verdict) -> str:
    name, error, mass = ranking(judged)[0]
    said = f"{name}, error {error:.1%} with {mass:.0%} of the attention"
    if found.equals:
        return (
            f"a tie: {said}, is not ahead of {', '.join(found.equals)} by more than the spread "
            f"over {found.pairs} heads of calls"
        )
    if name in CONTROLS:
        return f"nearest to dense here: {said}; it looks at nothing, so no method found anything"
    return f"nearest to dense here: {said}"


def _errors(judged: Sequence[JudgedCall], name: str) -> list[float]:
    """Of every head of every call."""
    own = (score for call in judged for score in call.scores if score.method == name)
    return [error for score in own for _, _, error in score.heads]


def _ahead(errors: Sequence[float], others: Sequence[float]) -> bool:
    found = interval([other - own for own, other in zip(errors, others, strict=True)])
    return found.low is not None and found.low > 0
