"""What is asked of a calibration, checked before the first of its hours."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jali.maskbook import MEAN, Fingerprint
from jali.maskbook.calibration.scorer import Scorer
from jali.maskbook.header import LIMITS, canonical, write_order
from jali.planning.budget import check_share
from jali.tokens.layout import Blocks
from jali.tokens.order import Order

BRANCHES = {"mean": (MEAN,), "separate": ("cond", "uncond")}


@dataclass(frozen=True)
class CalibrationRequest:
    """The arguments of a calibration, checked."""

    prompts: tuple[str, ...]
    seed: int
    budgets: tuple[float, ...]
    branches: tuple[str, ...]
    importance: bool
    sharpness: float
    scorer: Scorer
    blocks: Blocks
    order: Order
    model: str | None
    steps: int | None
    arguments: dict[str, Any]

    def __post_init__(self) -> None:
        """What the book would refuse after hours is refused before them."""
        write_order(self.order)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise ValueError(f"seed must be an int >= 0, got {self.seed!r}")
        if not 0 <= self.sharpness < math.inf:
            raise ValueError(f"sharpness must be a finite number >= 0, got {self.sharpness}")
        if not isinstance(self.scorer, Scorer) or not isinstance(self.scorer.name, str):
            raise TypeError(f"a scorer is a callable with a name, got {self.scorer!r:.80}")
        if max(self.blocks.q, self.blocks.k) > LIMITS["block"]:
            raise ValueError(f"blocks of at most {LIMITS['block']}, got {self.blocks}")

    @property
    def digests(self) -> tuple[str, ...]:
        """One for each prompt and its seed: what was said is not in the book."""
        return tuple(
            hashlib.sha256(f"{self.seed + i}\n{prompt}".encode()).hexdigest()[:32]
            for i, prompt in enumerate(self.prompts)
        )

    def settings(self, marks: dict[str, Fingerprint]) -> dict[str, Any]:
        """All that decides what is recorded, as plain values."""
        return {
            "model": self.model,
            "transformers": {n: [m.kind, m.config, repr(m.weights)] for n, m in marks.items()},
            "prompts": list(self.digests),
            "seed": self.seed,
            "steps": self.steps,
            "branches": list(self.branches),
            "scorer": self.scorer.name,
            "blocks": [self.blocks.q, self.blocks.k],
            "order": write_order(self.order),
            **{f"argument {name}": _plain(value) for name, value in sorted(self.arguments.items())},
        }


def digest(settings: dict[str, Any]) -> str:
    return hashlib.sha256(canonical(settings).encode()).hexdigest()[:32]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        raw = value.detach().float().cpu().contiguous().numpy().tobytes()
        return f"tensor {tuple(value.shape)} {hashlib.sha256(raw).hexdigest()[:16]}"
    return repr(value)[:200]


def prompts_of(prompts: Sequence[str]) -> tuple[str, ...]:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is a list of texts, got {prompts!r:.80}")
    if not prompts:
        raise ValueError("calibrating needs at least one prompt")
    for prompt in prompts:
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"a prompt is a text that says something, got {prompt!r:.80}")
    return tuple(prompts)


def budgets_of(budgets: Sequence[float], importance: bool) -> tuple[float, ...]:
    for budget in budgets:
        check_share("every one of budgets", budget)
    if not budgets and not importance:
        raise ValueError("without importance a book needs budgets: nothing could be replayed")
    return tuple(sorted({float(budget) for budget in budgets}))


def branches_of(branches: str) -> tuple[str, ...]:
    if branches not in BRANCHES:
        raise ValueError(f"branches is 'mean' or 'separate', got {branches!r}")
    return BRANCHES[branches]
