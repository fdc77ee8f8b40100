"""The tables of docs/stacking.md, and that of heads among ranks."""

from __future__ import annotations

from statistics import fmean
from typing import Any

NAMES = {
    "none": "no cache",
    "first block": "first-block cache",
    "cache-dit": "cache-dit",
    "mag": "MagCache",
    "taylor": "TaylorSeer, lite",
    "pab": "PAB",
    "faster": "FasterCache",
}


def stacking(result: dict[str, Any]) -> str:
    """What each cache gives alone and with sparse attention."""
    prompts = sorted({row["prompt"] for row in result["rows"]})
    size, steps = result["size"], result["steps"]
    lines = [
        f"nano, {size['height']}×{size['width']}×{size['num_frames']}, {steps} steps, guidance "
        f"{result['guidance']:g} (two calls a step), {len(prompts)} held-out prompts, fp32 on one "
        f"thread ({result['machine']}), torch {result['torch']}, {result['date']}. Speed-ups are "
        f"ratios of the processor time of denoising loops, prompt by prompt; the cores were shared "
        f"with other work. PSNR is against the dense run without a cache. `entropy` is at a total "
        f"of 0.4 with a dense first layer; *work* is the share of all self-attention work that was "
        f"done.",
        "",
        "| | skipped | speed-up | work | PSNR | with `entropy`: skipped | speed-up | if gains "
        "multiplied | work | PSNR |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    sparse_alone = _gain(result, "none", "entropy")
    for cache in dict.fromkeys(row["cache"] for row in result["rows"]):
        alone, both = (_rows(result, cache, sparse) for sparse in ("none", "entropy"))
        gain = _gain(result, cache, "none")
        lines.append(
            f"| {NAMES[cache]} | {_skipped(alone)} | {gain:.2f}× | {_mean(alone, 'attention'):.2f} "
            f"| {_psnr(alone)} | {_skipped(both)} | **{_gain(result, cache, 'entropy'):.2f}×** "
            f"| {gain * sparse_alone:.2f}× | {_mean(both, 'attention'):.2f} | {_psnr(both)} |"
        )
    return "\n".join(lines)


def judged(result: dict[str, Any]) -> str:
    """What a sparse first block does to the decisions of first-block cache."""
    words = {
        "none": "dense everywhere", "entropy": "`entropy`, first block dense",
        "entropy, first block sparse": "`entropy`, first block sparse",
    }  # fmt: skip
    lines = [
        "| first-block cache over | skipped | speed-up | PSNR | without the cache: PSNR |",
        "|---|---:|---:|---:|---:|",
    ]
    for sparse, name in words.items():
        rows = _rows(result, "first block", sparse)
        lines.append(
            f"| {name} | {_skipped(rows)} | {_gain(result, 'first block', sparse):.2f}× "
            f"| {_psnr(rows)} | {_psnr(_rows(result, 'none', sparse))} |"
        )
    return "\n".join(lines)


def dealing(result: dict[str, Any]) -> str:
    """Heads among ranks: measured by work, and on paper."""
    wan, shape = result["wan"], result["shape"]
    lines = [
        f"What the slowest rank of every call does, over an even share; a total of "
        f"{result['total']:g}, {result['steps']} steps, {result['date']}. By processes on a CPU, "
        f"from the plans that they ran (the made-up model has eight heads of very different "
        f"sharpness):",
        "",
        "| | method | ranks | heads as they are | dealt |",
        "|---|---|---:|---:|---:|",
        *(
            f"| {row['model']} | `{row['method']}` | {row['ranks']} | {row['as they are']:.3f} "
            f"| {row['dealt']:.3f} |"
            for row in result["ranks"]
        ),
        "",
        f"On paper, for models with more heads than nano: heads drawn {result['draws']} times from "
        f"nano's 32, with what each costs along its run. *Back and forth* is a snake that does not "
        f"look at what the rounds before have made; *known before* would deal by the costs of the "
        f"step itself. The last column is one layer of Wan 14B at 720p on {shape['gpus']} GPUs, in "
        f"a later run: an even share is {wan['even_ms']:.1f} ms at the rate of an H200, and moving "
        f"heads {wan['moving_ms']:.2f} ms at {result['bandwidth'] / 1e12:g} TB/s, which is in it.",
        "",
        "| method | heads, GPUs | as they are | back and forth | dealt | in a later run "
        "| known before | ms a layer |",
        "|---|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for row in result["paper"]:
        heads, ranks = row["heads"], row["ranks"]
        if (heads, ranks) not in ((40, 8), (24, 8)):
            continue
        ms = "–"
        if (heads, ranks) == (shape["heads"], shape["gpus"]):
            ms = "{:.2f} → {:.2f}".format(*wan[row["method"]])
        lines.append(
            f"| `{row['method']}` | {heads}, {ranks} | {row['as they are']:.3f} "
            f"| {row['snake']:.3f} | {row['dealt']:.3f} | {row['dealt, a later run']:.3f} "
            f"| {row['by their own costs']:.3f} | {ms} |"
        )
    return "\n".join(lines)


def _rows(result: dict[str, Any], cache: str, sparse: str) -> list[dict[str, Any]]:
    return [r for r in result["rows"] if (r["cache"], r["sparse"]) == (cache, sparse)]


def _gain(result: dict[str, Any], cache: str, sparse: str) -> float:
    """Mean over prompts of the plain run's time over this one's."""
    plain = {row["prompt"]: row["seconds"] for row in _rows(result, "none", "none")}
    return fmean(plain[row["prompt"]] / row["seconds"] for row in _rows(result, cache, sparse))


def _mean(rows: list[dict[str, Any]], name: str) -> float:
    return fmean(row[name] for row in rows)


def _skipped(rows: list[dict[str, Any]]) -> str:
    return f"{sum(r['skipped'] for r in rows) / sum(r['calls'] for r in rows):.0%}"


def _psnr(rows: list[dict[str, Any]]) -> str:
    found = [row["psnr"] for row in rows]
    return "=" if None in found else f"{fmean(found):.1f}"
