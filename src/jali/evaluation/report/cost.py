"""What every attention call cost, from a clip's sites.json to the few numbers a page needs."""

from __future__ import annotations

import base64
import binascii
import math
from pathlib import Path
from typing import Any

from jali.error import InputError, shorten
from jali.files import read_json

VERSION, MOST = 1, 100_000


def read_sites(path: Path) -> dict[str, Any]:
    """Costs and plans of one clip; words that repeat are listed once and named by number."""
    found = read_json(path)
    if found.get("version") != VERSION:
        raise InputError(
            f"{path} has version {found.get('version')!r}; this jali reads version {VERSION}"
        )
    try:
        return _pack(found)
    except (KeyError, TypeError, ValueError, binascii.Error) as error:
        raise InputError(
            f"{path} is not what `jali generate` writes: {type(error).__name__} {shorten(error)}"
        ) from None


def _pack(found: dict[str, Any]) -> dict[str, Any]:
    words: dict[str, dict[str, int]] = {"branches": {}, "reasons": {}, "backends": {}}

    def number(kind: str, word: object) -> int:
        return words[kind].setdefault(str(word), len(words[kind]))

    rows: list[list[Any]] = [
        [
            _index(row["layer"]),
            _index(row["step"]),
            number("branches", row.get("branch") or "both"),
            _short(row["cost"]),
            -1 if row.get("reason") is None else number("reasons", row["reason"]),
            number("backends", row.get("backend") or "unknown"),
            [_short(share) for share in row.get("heads") or ()],
        ]
        for row in found["rows"]
    ]
    return {
        "layers": max([_index(found["layers"]), *(row[0] + 1 for row in rows)]),
        "steps": max([_index(found["steps"]), *(row[1] + 1 for row in rows)]),
        "heads": max([_index(found["heads"]), *(len(row[6]) for row in rows)]),
        **{kind: list(known) for kind, known in words.items()},
        "rows": rows,
        "weights": _weights(found["rows"]),
        "plans": [_check_plan(plan) for plan in found.get("plans") or ()],
    }


def _index(number: Any) -> int:
    """A page draws a field for each of them."""
    if not 0 <= int(number) < MOST:
        raise ValueError(f"a number of layers, steps or heads is below {MOST:,}, got {number}")
    return int(number)


def _weights(rows: list[dict[str, Any]]) -> list[float]:
    """The dense work of every row, the largest being 1; equal where a file does not say."""
    work = [float(row.get("dense_work", 1.0)) for row in rows]
    if not all(math.isfinite(own) and own >= 0 for own in work):
        raise ValueError("a dense_work that is no amount of work")
    most = max(work, default=0.0) or 1.0
    return [round(own / most, 6) for own in work]


def _short(share: float) -> float:
    if not math.isfinite(share):
        raise ValueError(f"a cost of {share}")
    return round(float(share), 3)


def _check_plan(plan: dict[str, Any]) -> dict[str, Any]:
    frames, height, width = (int(side) for side in plan["grid"])
    levels = base64.b64decode(plan["levels"], validate=True)
    if len(levels) != frames * height * width:
        raise ValueError(
            f"a plan with {len(levels)} levels for a grid of {frames}×{height}×{width} tokens"
        )
    return {
        "layer": int(plan["layer"]),
        "step": int(plan["step"]),
        "branch": str(plan.get("branch") or "both"),
        "head": int(plan["head"]),
        "block": int(plan["query_block"]),
        "grid": [frames, height, width],
        "own": [[int(first), int(count)] for first, count in plan["query_tokens"]],
        "levels": plan["levels"],
    }
