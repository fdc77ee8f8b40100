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
from jali.maskbook.header import Errors, check_blocks
from jali.methods import Entropy, Method, RateDistortion
from jali.presets import schema
from jali.presets.method import write_method
from jali.tokens.layout import Blocks
from jali.tokens.order import Order, Raster
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
    method: RateDistortion | None  # whose errors are recorded, instead of importance
    model: str | None
    steps: int | None
    arguments: Mapping[str, Any]

    def __post_init__(self) -> None:
        _check_prompts(self.prompts)
        for budget in self.budgets:
            check_share("every one of budgets", budget)
        if not self.budgets and not self.importance and self.method is None:
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
        if self.errors is not None:
            branches = BRANCHES[self.branches]
            return {"branches": branches, "errors": self.errors, "importance": False}
        return {
            "budgets": tuple(sorted({float(budget) for budget in self.budgets})),
            "branches": BRANCHES[self.branches],
            "importance": self.importance,
            "sharpness": float(self.sharpness),
        }

    @property
    def errors(self) -> Errors | None:
        """Of which levels, and in how many parts of a run, where they are recorded."""
        if self.method is None:
            return None
        return Errors(self.method.codes, float(self.method.keep))

    @property
    def recording_method(self) -> Method:
        """A method with the blocks and the order of the book."""
        if self.method is not None:
            return self.method
        return Entropy(q_block=self.blocks.q, k_block=self.blocks.k, order=self.order)

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
            **({} if self.method is None else {"method": write_method(self.method)}),
            **{f"argument {name}": _plain(value) for name, value in sorted(self.arguments.items())},
        }


# A book is made once, and whoever replays it chooses among the levels that it has.
OF_A_BOOK: dict[str, Any] = {"samples": 8, "levels": (2, 4, 8, "mean", "skip")}


def method_of_errors(
    method: str | Method, blocks: Blocks | None, order: Order | None, **others: Any
) -> RateDistortion | None:
    """The rd whose errors are recorded; None where importance is, as entropy has it.

    `others` are arguments that only mean something for importance.
    """
    if method == "entropy":
        return None
    if method == "rd":
        q, k = (blocks.q, blocks.k) if blocks is not None else (128, 128)
        method = RateDistortion(**OF_A_BOOK, q_block=q, k_block=k, order=order or Raster())
    elif isinstance(method, RateDistortion):
        others = {**others, "blocks": blocks, "order": order}
    else:
        raise ValueError(
            f"a book is made by the method 'entropy' (of importance) or 'rd' (of errors), got "
            f"{method!r:.80}"
        )
    for name, value in others.items():
        if value is not None:
            raise ValueError(
                f"{name} has no meaning for a book of rd: its options are those of RateDistortion, "
                f"and it serves any budget"
            )
    if method.price is not None:
        raise ValueError("a book of rd is asked for a budget when it is replayed: leave price out")
    if method.costs:
        raise ValueError(
            "what is recorded does not depend on costs, and the levels of a book cost their work "
            "when it is replayed: leave costs out"
        )
    if not isinstance(method.keep, float) or method.keep == 0:
        raise ValueError(
            f"a book of rd serves any number of steps, so keep is a share of the run above 0, as "
            f"0.25, got {method.keep!r}"
        )
    return method


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
