"""Who executes a plan. Fastest first; the last ones run anything."""

from __future__ import annotations

import functools
import logging

from jali.backends.backend import Backend, Task
from jali.backends.fa4 import Fa4
from jali.backends.fa4_triton import Fa4Triton
from jali.backends.flex import Flex
from jali.backends.reference import Reference
from jali.backends.torch import Torch
from jali.backends.triton import Triton
from jali.value import suggest

log = logging.getLogger("jali")

BACKENDS: dict[str, Backend] = {
    backend.name: backend
    for backend in (Fa4(), Fa4Triton(), Triton(), Flex(), Torch(), Reference())
}

# What `auto` chose is said once for every kind of call, not once per call.
_logged: set[tuple[str, str]] = set()


def choose(name: str, task: Task) -> Backend:
    """The backend asked for by name, or with "auto" the fastest one that can run the task.

    A named backend never falls back: it raises with all its reasons.
    """
    check_name(name)
    if name == "auto":
        return _fastest(task)
    reasons = _reasons(name, task)
    if reasons:
        raise ValueError(f"backend {name!r} cannot run this: " + "; ".join(reasons))
    return BACKENDS[name]


def check_name(name: str) -> None:
    """Only 'auto' and known names pass."""
    if name != "auto" and name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}{suggest(name, ['auto', *BACKENDS])}")


def why_not(task: Task) -> dict[str, list[str]]:
    """Every backend by name, fastest first, with the reasons why it cannot run the task, each a
    sentence; an empty list means that it can.

    >>> task = Task(torch.device("cpu"), torch.float32, 64, 4, 4, q_tokens=512, k_tokens=512)
    >>> [name for name, reasons in why_not(task).items() if not reasons]
    ['torch', 'reference']
    """
    return {name: backend.why_not(task) for name, backend in BACKENDS.items()}


# A model asks the same few questions thousands of times, and the answers do not change.
@functools.lru_cache(maxsize=256)
def _reasons(name: str, task: Task) -> tuple[str, ...]:
    return tuple(BACKENDS[name].why_not(task))


@functools.lru_cache(maxsize=256)
def _fastest(task: Task) -> Backend:
    passed: list[str] = []
    for backend in BACKENDS.values():
        reasons = _reasons(backend.name, task)
        if not reasons:
            said = f"{'; '.join(passed)}" if passed else ""
            if passed and (backend.name, said) not in _logged:
                _logged.add((backend.name, said))
                slow = task.device.type != "cpu" and backend.name in ("torch", "reference")
                log.log(
                    logging.WARNING if slow else logging.INFO,
                    "attention backend: %s%s (not %s)",
                    backend.name,
                    ", which is slower than dense attention on a GPU" if slow else "",
                    said,
                )
            return backend
        passed.append(f"{backend.name}: {', '.join(reasons)}")
    raise RuntimeError("the reference backend runs everything")  # pragma: no cover


__all__ = ["BACKENDS", "Backend", "Task", "check_name", "choose", "why_not"]
