"""Tuning nano: are targets met, are intervals honest, does a tuned spread gain, how long is it?

    python -m benchmarks.tune_nano --device cuda --dtype bf16 --seconds 1500

For every method and target: `jali.tune` on 16 prompts (eight find, eight judge), timed; then, on 16
others that are seen once, the recipe, and at its total the exponential and the linear curve and the
best spread that the probes of steps and layers led to, whether the tuning took it or not, as paired
clips against one dense run. One JSON, whole after every row; what it has is not made again, and a
tuning that was cut goes on. `--seconds` ends it in the middle of a tuning, too.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.nano_quality import Made, Metrics, Studio, machine, weights_digest
from jali import Recipe, load_pipeline, tune
from jali.error import InputError
from jali.evaluation.arena.match import UnreachableError, matched
from jali.evaluation.arena.record import RUNS, read_results
from jali.evaluation.arena.row import Row, ScheduleSpec, read_method_spec
from jali.evaluation.quality.interval import interval
from jali.evaluation.tuning.search import PER_DB
from jali.evaluation.tuning.size import folder_of
from jali.files import check_place, read_json, write_json
from jali.generation import Settings
from jali.methods import Method, Schedule
from jali.nano import folder
from training.evidence import WORLDS

START = time.monotonic()
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
HAND = ("exponential", "linear")  # curves of one parameter, the first one being the usual
SAME = ("device", "dtype", "weights", "size", "steps", "prompts", "others", "probes", "batch")


def say(*words: object) -> None:
    print(f"{time.monotonic() - START:5.0f} s", *words, flush=True)


class OverTime(KeyboardInterrupt):
    """The seconds are over; not an error of any one method."""


@dataclass
class Benchmark:
    """A file of results, and the rows that are added to it."""

    asked: argparse.Namespace
    result: dict[str, Any]
    pipe: Any
    studio: Studio  # of the other prompts
    _dense: Tensor | None = None

    # One row

    def measure(self, method: str, target: float) -> dict[str, Any]:
        row: dict[str, Any] = {"method": method, "target": target}
        recipe, results = self._tune(method, target, row)
        if recipe.curve is None:
            return row | {"dense": True}
        total = float(recipe.curve.total)
        spreads: dict[str, Method] = {"recipe": recipe.scheduled}
        specs = {name: ScheduleSpec(name) for name in HAND} | _moved(results, method)
        spreads |= {name: spread.over(recipe.method, total) for name, spread in specs.items()}
        found = {name: self._others(spread, total) for name, spread in spreads.items()}
        row["others"] = found
        row["inside"] = inside(recipe, found["recipe"]["psnr"])
        row["against"] = {
            name: paired(found[name]["psnr"], found[HAND[0]]["psnr"])
            for name in found
            if name != HAND[0]
        }
        return row

    def _tune(self, method: str, target: float, row: dict[str, Any]) -> tuple[Recipe, Path]:
        """The recipe, as a user would have it; also where sparse is no faster on this machine."""
        name = f"{method.partition(':')[0]}-{target:g}.yaml"
        output = self.asked.work / name
        key = f"{method} {target:g}"
        before = float(self.result["spent"].get(key, 0.0))
        begun, clips = time.monotonic(), 0

        def hear(what: str, done: int, all_: int) -> None:
            nonlocal clips
            clips += 1
            say(f"{name} {done}/{all_} {what[:100]}")
            if time.monotonic() - START > self.asked.seconds:
                self.result["spent"][key] = before + time.monotonic() - begun
                self.write()
                raise OverTime

        settings = Settings(
            "nano", path=self.asked.path, steps=self.asked.steps, height=self.asked.height,
            width=self.asked.width, num_frames=self.asked.frames, device=self.asked.device,
            dtype=self.asked.dtype,
        )  # fmt: skip
        recipe = tune(
            self.pipe, output=output, target_psnr=target, methods=[method], saves="work",
            prompts=self.result["prompts"], batch=self.asked.batch, probes=self.asked.probes,
            settings=settings, progress=hear,
        )  # fmt: skip
        row["seconds"] = before + time.monotonic() - begun
        row["cut"] = before > 0
        row["groups_made"] = clips
        row["recipe"] = recipe.to_dict()
        row["said"] = recipe.sentences()
        row["deciding"] = self._deciding(folder_of(output), method, recipe)
        return recipe, folder_of(output)

    def _deciding(self, place: Path, method: str, recipe: Recipe) -> dict[str, Any]:
        """What the prompts showed that decided, at the recipe's point; and all totals tried."""
        results = read_results(place)
        first = 0
        points = [
            {"schedule": record.schedule, "total": record.total, "achieved": record.achieved,
             "psnr": fmean(record.metrics["psnr"]), "seconds": record.seconds}
            for record in results.records
            if record.first == first
        ]  # fmt: skip
        own = None
        if recipe.curve is not None:
            for record in results.records:
                spread = record.row.schedule
                same = spread is not None and spread.curve(float(record.total or 1)) == recipe.curve
                if (
                    record.first == first
                    and same
                    and record.method == str(read_method_spec(method))
                ):
                    own = fmean(record.metrics["psnr"])
        return {"psnr": own, "points": points}

    # Prompts that had no part in it

    def _others(self, spread: Method, total: float) -> dict[str, Any]:
        assert isinstance(spread, Schedule)

        def make(asked: float) -> Made:
            assert isinstance(spread, Schedule)
            assert spread.curve is not None
            try:
                own = replace(spread, curve=replace(spread.curve, total=asked))
                own.check_total(self.asked.steps)
                return self.studio.make(self.asked.steps, own)
            except ValueError as error:
                raise UnreachableError(str(error)) from None

        made, tries = matched(total, make)
        clips = Metrics(self.studio.sentences, None).compare(
            self.studio.frames(made.latents), self.dense
        )["clips"]
        return {
            "asked": tries[0][0], "achieved": made.cost, "planning": made.planning,
            "seconds": made.seconds, "psnr": clips["psnr"], "ssim": clips["ssim"],
        }  # fmt: skip

    @property
    def dense(self) -> Tensor:
        if self._dense is None:
            made = self.studio.make(self.asked.steps)
            self._dense = self.studio.frames(made.latents)
            self.result["dense_seconds"] = made.seconds
        return self._dense

    # The file

    def has(self, method: str, target: float) -> bool:
        return any((r["method"], r["target"]) == (method, target) for r in self.result["rows"])

    def write(self) -> None:
        write_json(self.asked.output, self.result, sort_keys=False)


def _moved(place: Path, method: str) -> dict[str, ScheduleSpec]:
    """The better of the spreads that the probes led to, by the prompts that decide."""
    results = read_results(place)
    label = str(read_method_spec(method))
    best: tuple[float, ScheduleSpec] | None = None
    for record in results.records:
        spread = record.row.schedule
        numbers = spread is not None and not isinstance(spread.shape, str)
        kept = (place / RUNS / Row(record.row.method, spread, record.total).folder).is_dir()
        if record.first or record.method != label or not numbers or not kept or spread is None:
            continue
        value = fmean(record.metrics["psnr"]) - record.achieved / PER_DB
        if best is None or value > best[0]:
            best = value, spread
    return {} if best is None else {"moved": best[1]}


def inside(recipe: Recipe, values: Sequence[float]) -> dict[str, Any]:
    """Whether the mean of other clips is where the recipe says."""
    told, mean = recipe.measured.metrics["psnr"], fmean(values)
    found: dict[str, Any] = {"mean": mean, "clips": [min(values), max(values)]}
    for name, low, high in (
        ("interval_of_mean", told.low, told.high),
        ("interval_of_next", told.next_low, told.next_high),
    ):
        found[name] = None if low is None or high is None else low <= mean <= high
    if told.low is not None and told.high is not None:
        # The mean of n others, each side being uncertain: what a 95 % interval is for.
        clips = recipe.measured.clips
        half = (told.high - told.low) / 2 * (1 + clips / len(values)) ** 0.5
        found["interval_of_mean_of_others"] = abs(mean - told.mean) <= half
        found["half_of_mean_of_others"] = half
    return found


def paired(own: Sequence[float], other: Sequence[float]) -> dict[str, float | None]:
    found = interval([a - b for a, b in zip(own, other, strict=True)])
    return {"mean": found.mean, "low": found.low, "high": found.high}


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--output", type=Path, default=Path("benchmarks/results/tune-h200.json"))
    made.add_argument("--work", type=Path, default=Path("build/tune-nano"), help="of the tunings")
    made.add_argument("--path", help="another model folder than the shipped one")
    made.add_argument("--methods", nargs="+", default=["entropy", "rd"])
    made.add_argument("--targets", nargs="+", type=float, default=[35.0, 30.0, 40.0])
    made.add_argument("--prompts", type=int, default=16, help="half of them find, half judge")
    made.add_argument("--others", type=int, default=16, help="seen once")
    made.add_argument("--batch", type=int, default=8)
    made.add_argument("--probes", type=int, default=14)
    made.add_argument("--steps", type=int, default=12)
    made.add_argument("--height", type=int, default=192)
    made.add_argument("--width", type=int, default=320)
    made.add_argument("--frames", type=int, default=37)
    made.add_argument("--seconds", type=float, default=float("inf"), help="end then")
    made.add_argument("--dtype", choices=tuple(DTYPES), default="bf16")
    made.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    return made


def prepared(asked: argparse.Namespace) -> Benchmark:
    """Everything that may be refused, before anything slow."""
    check_place(asked.output)
    for method in asked.methods:
        read_method_spec(method)
    # Others come first: they are those of the table of quality per work.
    sentences = WORLDS["second"].scene.prompts(asked.others + asked.prompts)
    others, prompts = list(sentences[: asked.others]), list(sentences[asked.others :])
    size = {"height": asked.height, "width": asked.width, "num_frames": asked.frames}
    about = {
        "machine": machine(asked.device), "date": time.strftime("%Y-%m-%d"), "dtype": asked.dtype,
        "weights": weights_digest(Path(asked.path) if asked.path else folder()), "size": size,
        "steps": asked.steps, "batch": asked.batch, "probes": asked.probes, "prompts": prompts,
        "others": others,
    }  # fmt: skip
    about["device"] = about["machine"]["device"]
    result = about | {"spent": {}, "rows": []}
    if asked.output.exists():
        result = read_json(asked.output)
        for name in SAME:
            if result.get(name) != about[name]:
                raise InputError(
                    f"{asked.output} was made with other {name}: give another --output"
                )
    pipe = load_pipeline("nano", path=asked.path, device=asked.device, dtype=DTYPES[asked.dtype])
    pipe.set_progress_bar_config(disable=True)
    studio = Studio(pipe, tuple(others), size, 4.0, asked.batch, asked.device)
    return Benchmark(asked, result, pipe, studio)


def line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    words = f"{row['method']} {row['target']:g} dB: tuned in {row['seconds']:.0f} s"
    if row.get("dense"):
        return f"{words}, dense is the answer"
    against = ", ".join(
        f"{name} {one['mean']:+.2f} ({one['low']:+.2f} to {one['high']:+.2f})"
        if one["low"] is not None else f"{name} {one['mean']:+.2f}"
        for name, one in row["against"].items()
    )  # fmt: skip
    deciding = row["deciding"]["psnr"]
    return (
        f"{words}, total {row['recipe']['curve']['total']:g}, deciding {deciding or 0:.2f}, "
        f"held-out {row['recipe']['measured']['metrics']['psnr']['mean']:.2f}, others "
        f"{row['inside']['mean']:.2f} inside {row['inside']['interval_of_mean']}; over "
        f"{HAND[0]}: {against}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        benchmark = prepared(asked)
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    failed = 0
    for target, method in itertools.product(asked.targets, asked.methods):
        if benchmark.has(method, target):
            continue
        try:
            row = benchmark.measure(method, target)
        except OverTime:
            say(f"{asked.seconds:g} s are over; the same command goes on")
            return 0
        except Exception as error:  # the other rows do not depend on this one
            failed += 1
            sys.stderr.write(f"{method} {target:g}: {type(error).__name__}: {error}\n")
            continue
        benchmark.result["rows"].append(row)
        benchmark.write()
        say(line(row))
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
