"""What a tuning is asked for, checked without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jali.error import ArgumentError, InputError
from jali.files import WriteError, check_place, read_text

METHODS = ("rd", "entropy")
PROMPTS = 8  # of the shipped set: four decide, four judge
PROBES = 12  # places that are probed: six of steps, six of layers
SAVES = ("time", "work")
KIND = "kind: jali-recipe"
LARGEST = 2**20
# By metric: the argument, and between which values a target can be.
TARGETS = {
    "psnr": ("target_psnr", 5.0, 80.0),
    "ssim": ("target_ssim", 0.0, 1.0),
    "lpips": ("target_lpips", 0.0, 2.0),
    "speedup": ("speedup", 1.0, 100.0),
}


def check_target(**asked: float | None) -> tuple[str, float]:
    """The one target that was asked for, by its metric."""
    given = {metric: value for metric, value in asked.items() if value is not None}
    names = [f"`{TARGETS[metric][0]}`" for metric in TARGETS]
    if len(given) != 1:
        first = TARGETS[next(iter(given), "psnr")][0]
        rule = f"or one of {', '.join(names[1:])} says what is wanted: give exactly one"
        if given:
            others = [f"`{TARGETS[metric][0]}`" for metric in list(given)[1:]]
            rule = f"and {', '.join(others)} are two targets: give one of them"
        raise ArgumentError(first, rule)
    ((metric, value),) = given.items()
    name, low, high = TARGETS[metric]
    if isinstance(value, bool) or not isinstance(value, int | float) or not low < value < high:
        raise ArgumentError(
            name, f"must be a number above {low:g} and below {high:g}, got {value!r}"
        )
    return metric, float(value)


def make_target(**asked: float | None) -> Any:
    from jali.integration.recipe import Target

    return Target(*check_target(**asked))


def check_saves(saves: str, metric: str) -> None:
    """Time or work; a speed that is asked for is one of time."""
    if saves not in SAVES:
        raise ArgumentError("saves", f"must be one of {', '.join(SAVES)}, got {saves!r}")
    if saves == "work" and metric == "speedup":
        raise ArgumentError("saves", "is work, and `speedup` asks for time: leave one of them out")


def folder_of(output: Path) -> Path:
    """Where the clips, numbers and page of a tuning go."""
    return output.with_name(f"{output.stem}-tuning")


def check_output(output: Path) -> None:
    """Refuse, before any work, a place where a recipe cannot be, or where something else is."""
    if output.suffix not in (".yaml", ".yml"):
        raise ArgumentError("output", f"is a recipe's file and ends in .yaml, got {str(output)!r}")
    if output.is_dir():
        raise ArgumentError("output", f"is a folder: {output}; name a file in it")
    try:
        check_place(output)
        held = read_text(output, LARGEST) if output.exists() else KIND
    except (WriteError, InputError) as error:
        raise ArgumentError("output", f": {error}") from None
    if not held.startswith(KIND):
        raise ArgumentError(
            "output", f": {output} is no recipe, and would be replaced; name another"
        )
