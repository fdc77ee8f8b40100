"""Tables of docs/nano.md about what nano shows of what it is asked for, and about its judge."""

from __future__ import annotations

from typing import Any

# As `training.adherence` calls them, and as a reader does.
ROWS = {
    "colour": "colour",
    "shape": "shape",
    "motion": "motion",
    "speed": "speed",
    "texture": "texture",
    "ground": "background",
    "view": "camera",
    "light": "light",
    "no_more": "nothing that was not asked for",
    "no_less": "all things that were asked for",
}
READABLE = 0.9  # of true films: what the judge reads less well is not believed


def evidence(sizes: list[dict[str, Any]]) -> str:
    """Every aspect that prompts name, with its interval and the judge's own score."""
    lines = _head(sizes)
    for aspect, name in ROWS.items():
        if any(aspect not in size["tallies"] for size in sizes):
            continue  # nobody read it back in that run
        cells = [
            _cell(size["tallies"][aspect], size["judge_of_truth"]["tallies"][aspect])
            for size in sizes
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _cell(seen: dict[str, Any], true: dict[str, Any]) -> str:
    if not seen["asked"] or not true["asked"]:
        return "not asked"
    known = true["right"] / true["asked"]
    if known < READABLE:
        return f"not readable (judge {known:.0%})"
    low, high = seen["interval"]
    share = seen["right"] / seen["asked"]
    return f"**{share:.0%}** of {seen['asked']}, {100 * low:.0f}–{high:.0%} (judge {known:.0%})"


def judge(result: dict[str, Any]) -> str:
    """What the judge reads from true films, and how long it takes."""
    sizes, back = result["sizes"], result.get("returned")
    took = ", ".join(f"{size['seconds']:.0f}" for size in sizes)
    lines = [
        f"True films of {result['films']} held-out scenes at every size, of those that name it; "
        f"{result['machine']['device']}, {took} seconds for all, {result['date']}."
    ]
    if back:
        lines[0] += f" Returned: {back['films']} films after a round trip through the autoencoder."
    lines += ["", *_head([*sizes, back] if back else sizes)]
    if back:
        lines[-2] = lines[-2].removesuffix(" |") + ", returned |"
    for aspect, name in ROWS.items():
        found = [size["tallies"][aspect] for size in ([*sizes, back] if back else sizes)]
        cells = [f"{tally['right']} of {tally['asked']}" for tally in found]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _head(sizes: list[dict[str, Any]]) -> list[str]:
    names = [f"{size['height']}×{size['width']}×{size['frames']}" for size in sizes]
    return ["| | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
