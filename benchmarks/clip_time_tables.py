"""The table of whole clips on a CPU, from results/clip-times-*.json."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from jali.evaluation.quality.interval import interval

HEAD = "| run | work | planning | PSNR | seconds a clip | of dense | of the first row |"


def page(result: dict[str, Any]) -> str:
    """One size: every row beside dense, and beside the first row, clip by clip."""
    size, clips = result["size"], list(result["clips"].values())
    first = next(name for name in clips[0] if name != "dense")
    lines = [
        f"nano, {size['height']}×{size['width']}×{size['num_frames']}, {result['tokens']:,} "
        f"tokens, {result['steps']} steps, {len(clips)} held-out prompts, float32 on "
        f"{result['machine']['threads']} cores ({result['machine']['cpu']}), torch "
        f"{result['machine']['torch']}, {result['date']}. From noise to latents, planning "
        f"included. PSNR is in dB against the dense clip; ratios are means over clips ± their 95 % "
        f"interval.",
        "",
        HEAD,
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for name in clips[0]:
        own = [clip[name] for clip in clips]
        seconds = f"{fmean(_all(own, 'seconds')):.1f}"
        if name == "dense":
            lines.append(f"| dense | 1 | – | – | {seconds} | 1 | – |")
            continue
        over = [
            _ratio(own, [clip[other] for clip in clips]) if name != other else "1"
            for other in ("dense", first)
        ]
        lines.append(
            f"| `{name.rsplit(' ', 1)[0]}` | {fmean(_all(own, 'achieved')):.3f} "
            f"| {fmean(_all(own, 'planning')):.3f} | {fmean(_all(own, 'psnr')):.1f} | {seconds} "
            f"| {' | '.join(over)} |"
        )
    return "\n".join(lines)


def _all(runs: Sequence[dict[str, float]], what: str) -> list[float]:
    return [run[what] for run in runs]


def _ratio(own: Sequence[dict[str, float]], others: Sequence[dict[str, float]]) -> str:
    """Of times, clip by clip."""
    found = interval([a["seconds"] / b["seconds"] for a, b in zip(own, others, strict=True)])
    assert found.mean is not None
    half = "" if found.high is None else f" ± {found.high - found.mean:.2f}"
    return f"{found.mean:.2f}{half}"
