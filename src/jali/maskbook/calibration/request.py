"""What is asked of a calibration, checked before the first of its hours."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jali import files
from jali.maskbook import MEAN, Fingerprint
from jali.maskbook.calibration.scorer import Scorer
from jali.maskbook.header import check_blocks
from jali.presets import schema
from jali.tokens.layout import Blocks
from jali.tokens.order import Order
from jali.value import check_amount, check_count, check_share

BRANCHES = {"mean": (MEAN,), "separate": ("cond", "uncond")}


@dataclass(frozen=True)
class CalibrationRequest:
    """The arguments of `calibrate`. What a book would refuse after hours is refused at once."""

    prompts: Sequence[str]
    seed: int
    budgets: Sequence[float]
    branches: str
    importance: bool
    sharpness: float
    scorer: Scorer
    blocks: Blocks
    order: Order
    model: str | None
    steps: int | None
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        _check_prompts(self.prompts)
        for budget in self.budgets:
            check_share("every one of budgets", budget)
        if not self.budgets and not self.importance:
            raise ValueError("without importance a book needs budgets: nothing could be replayed")
        if self.branches not in BRANCHES:
            raise ValueError(f"branches is 'mean' or 'separate', got {self.branches!r}")
        check_count("seed", self.seed, least=0)
        check_amount("sharpness", self.sharpness)
        if not isinstance(self.scorer, Scorer) or not isinstance(self.scorer.name, str):
            raise TypeError(f"a scorer is a callable with a name, got {self.scorer!r:.80}")
        schema.write(self.order)  # refuses one that no file can hold
        check_blocks(self.blocks)

    @property
    def header_fields(self) -> dict[str, Any]:
        """What a book's header says of its calibration."""
        return {
            "budgets": tuple(sorted({float(budget) for budget in self.budgets})),
            "branches": BRANCHES[self.branches],
            "importance": self.importance,
            "sharpness": float(self.sharpness),
        }

    @property
    def prompt_digests(self) -> tuple[str, ...]:
        """One for each prompt and its seed: what was said is not in the book."""
        return tuple(
            files.digest(f"{self.seed + i}\n{prompt}")[:32] for i, prompt in enumerate(self.prompts)
        )

    def settings(self, fingerprints: Mapping[str, Fingerprint]) -> dict[str, Any]:
        """All that decides what is recorded, as plain values."""
        return {
            "model": self.model,
            "transformers": {
                name: [f.kind, f.config, repr(f.weights)] for name, f in fingerprints.items()
            },
            "prompts": list(self.prompt_digests),
            "seed": self.seed,
            "steps": self.steps,
            "branches": list(BRANCHES[self.branches]),
            "scorer": self.scorer.name,
            "blocks": [self.blocks.q, self.blocks.k],
            "order": schema.write(self.order),
            **{f"argument {name}": _plain(value) for name, value in sorted(self.arguments.items())},
        }


def settings_digest(settings: Mapping[str, Any]) -> str:
    """By which a finished book knows its calibration. Not `files.digest`: books hold it already,
    and it escapes what is not ASCII."""
    text = json.dumps(settings, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return files.digest(text)[:32]


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        raw = value.detach().float().cpu().contiguous().numpy().tobytes()
        return f"tensor {tuple(value.shape)} {files.digest(raw)[:16]}"
    return repr(value)[:200]


def _check_prompts(prompts: Sequence[str]) -> None:
    if isinstance(prompts, str) or not isinstance(prompts, Sequence):
        raise TypeError(f"prompts is a list of texts, got {prompts!r:.80}")
    if not prompts:
        raise ValueError("calibrating needs at least one prompt")
    for prompt in prompts:
        if not isinstance(prompt, str) or not prompt.strip():
            raise ValueError(f"a prompt is a text that says something, got {prompt!r:.80}")
