"""The pictures of docs/nano.md, and the film in the README.

python -m docs.nano_pictures losses           # from benchmarks/results/nano-training.json
python -m docs.nano_pictures heads            # from nano-heads.json, of training.head_kind
python -m docs.nano_pictures sheet PNG NAME   # a contact sheet of training.evidence, made small
python -m docs.nano_pictures film MP4         # side-by-side.mp4 of a demo, made small
python -m docs.nano_pictures world            # eight true films of the second world
python -m docs.nano_pictures totals           # from benchmarks/results/quality-totals.json
python -m docs.nano_pictures arena            # one for each of benchmarks/results/arena-*.json
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from benchmarks.quality_tables import Row

HERE = Path(__file__).parent
ASSETS = HERE / "assets"
RESULTS = HERE.parent / "benchmarks/results"
INK, FAINT = "#1d2433", "#8a93a6"
KINDS = {"local": "#2f6fb3", "temporal": "#3a9d6e", "frame": "#d98324", "global": "#b0413e"}
LINES = {
    "rd": "#b0413e", "entropy": "#2f6fb3", "psa": "#3a9d6e", "ada_bsa": "#7d5ba6",
    "rf_v2": "#d98324", "cached": "#3f9db5", "random": "#6b7385", "local": "#b3bac7",
}  # fmt: skip


def losses() -> Figure:
    """The three stages that learn something, each over its own seconds."""
    from matplotlib.figure import Figure

    told: dict[str, Any] = json.loads((RESULTS / "nano-training.json").read_text("utf-8"))
    parts = [part for stage in ("stage 1", "stage 2") for part in told[stage]["parts"]]
    figure = Figure(figsize=(9.5, 2.5), layout="constrained")
    titles = {"autoencoder": "autoencoder", "text": "text encoder", "flow": "flow matching"}
    for axis, (name, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
        own = [part for part in parts if part["part"] == name]
        begun = [0.0, *itertools.accumulate(part["seconds"] for part in own)]
        kinds: dict[str, list[tuple[float, float]]] = {}  # batches of different sizes take turns
        for start, part in zip(begun, own, strict=False):
            for kind, at, value in part["losses"]:
                kinds.setdefault(kind.split("/")[0], []).append((start + at, value))
        for (kind, points), colour in zip(sorted(kinds.items()), LINES.values(), strict=False):
            seconds, values = zip(*points, strict=True)
            lasting = [median(values[max(0, i - 2) : i + 3]) for i in range(len(values))]
            axis.plot(seconds, values, color=colour, linewidth=0.6, alpha=0.4)
            axis.plot(seconds, lasting, color=colour, linewidth=1.5, label=kind[len(name) + 1 :])
        if len(kinds) > 1:
            axis.legend(fontsize=6, frameon=False, labelcolor=INK, ncols=2)
        axis.set_yscale("log")
        axis.yaxis.set_minor_formatter("")
        if name == "flow":  # the first two calls are the first stage
            axis.axvline(begun[2], color=FAINT, linewidth=0.5)
        steps = sum(part["steps"] for part in own)
        axis.set_title(f"{title}, {steps:,} steps", fontsize=9, color=INK)
        axis.set_xlabel("seconds on one H200", fontsize=8, color=FAINT)
        _quiet(axis)
    return figure


def heads_figure(told: dict[str, Any]) -> Figure:
    """Near and far: time across, the picture up, size by how spread out the attention is."""
    from matplotlib.figure import Figure

    found = told["rows"]
    figure = Figure(figsize=(9.5, 3.4), layout="constrained")
    steps = sorted({row["step"] for row in found})
    axes = figure.subplots(1, len(steps), sharex=True, sharey=True)
    for axis, step in zip(axes, steps, strict=True):
        for row in (row for row in found if row["step"] == step):
            t, h, w = row["reach"]
            at = t, max(h, w)
            axis.scatter(*at, s=15 + 330 * row["entropy"] ** 4, color=KINDS[row["kind"]], alpha=0.6)
            axis.annotate(str(row["layer"]), at, fontsize=6, ha="center", va="center", color=INK)
        axis.axhline(0.5, color=FAINT, linewidth=0.5)
        axis.axvline(0.5, color=FAINT, linewidth=0.5)
        axis.set_title(f"step {step + 1} of {told['steps']}", fontsize=9, color=INK)
        axis.set_xlabel("how far it looks in time", fontsize=8, color=FAINT)
        _quiet(axis)
    axes[0].set_ylabel("… in the picture", fontsize=8, color=FAINT)
    return figure


WITH_PROBES = "entropy:probes=64"  # rd has them unasked


def totals(told: dict[str, Any]) -> Figure:
    """PSNR over all work, planning included: a line for each method, on its better schedules."""
    from matplotlib.figure import Figure

    from benchmarks.quality_tables import CONTROLS, Results, best

    results = Results(told)
    shown: dict[str, Any] = {}
    figure = Figure(figsize=(4.4 * len(results.steps) + 1.6, 3.6), layout="constrained")
    axes = figure.subplots(1, len(results.steps), sharey=True, squeeze=False)[0]
    for axis, steps in zip(axes, results.steps, strict=True):
        lines: dict[str, list[Row]] = {}
        for total in results.totals(steps):
            for method in (*results.contenders, WITH_PROBES):
                if (row := results.better(method, total, steps)) is not None:
                    lines.setdefault(method, []).append(row)
            esa = best(results.some(method="entropy", schedule="esa", total=total, steps=steps))
            if esa is not None:
                lines.setdefault("entropy, ESA's schedule", []).append(esa)
        drawn: dict[str, int] = {}  # lines of one colour differ in their strokes
        for label, rows in lines.items():
            name = label.split(":")[0].split(",")[0]
            stroke = ("-", "--", ":", "-.")[drawn.setdefault(name, 0) % 4]
            drawn[name] += 1
            work = [row["achieved"] + row["planning"] for row in rows]
            axis.plot(
                work, [row["psnr"] for row in rows], color=LINES.get(name, INK), label=label,
                linestyle=stroke, linewidth=1.0 if name in CONTROLS else 1.6, marker="o",
                markersize=3,
            )  # fmt: skip
            shown.setdefault(label, axis.lines[-1])
        axis.set_title(f"{steps} steps", fontsize=9, color=INK)
        axis.set_xlabel("total + planning, share of dense attention", fontsize=8, color=FAINT)
        axis.grid(color="#e6e9ef", linewidth=0.6)
        _quiet(axis)
    axes[0].set_ylabel("PSNR against dense, dB", fontsize=8, color=FAINT)
    figure.legend(
        list(shown.values()), list(shown), loc="outside right upper", fontsize=7, frameon=False,
        labelcolor=INK, handlelength=3.5,
    )  # fmt: skip
    return figure


def small(picture: Path, name: str) -> None:
    """A contact sheet as a lossy picture, a tenth of its size."""
    from PIL import Image

    Image.open(picture).convert("RGB").save(ASSETS / f"{name}.webp", quality=72, method=6)


def film(video: Path) -> None:
    """A film that plays where it stands."""
    from PIL import Image

    from jali.clips.clip import read_clip

    clip = read_clip(video)
    frames = [Image.fromarray(frame.numpy()) for frame in clip.frames]
    frames[0].save(
        ASSETS / "nano.webp", save_all=True, append_images=frames[1:], loop=0, quality=55, method=6,
        duration=round(1000 / clip.fps),
    )  # fmt: skip


def world() -> None:
    """Two films in a row, five moments of each."""
    import torch
    from PIL import Image

    from training.world.film import film, unit
    from training.world.scene import sample_scenes

    scenes = sample_scenes(12, 2)
    scenes.ground[:11] = torch.arange(11)
    scenes = scenes[torch.tensor([1, 2, 3, 4, 6, 7, 8, 10])]
    moments = [torch.full((len(scenes),), start) for start in (0, 8, 16, 24, 32)]
    frames = [film(scenes, 1, 128, 128, start=start, pace=unit(33)) for start in moments]
    clips = ((torch.cat(frames, 2) + 1) * 127.5).round().byte().permute(0, 2, 3, 4, 1)
    framed = torch.nn.functional.pad(clips, (0, 0, 2, 2, 2, 2), value=255)
    rows = [torch.cat((*one, *two), 1) for one, two in zip(framed[::2], framed[1::2], strict=True)]
    picture = Image.fromarray(torch.cat(rows).numpy())
    picture.save(ASSETS / "nano-world.webp", quality=88, method=6)


def _quiet(axis: Axes) -> None:
    axis.tick_params(length=2, labelsize=7, labelcolor=FAINT)
    for spine in axis.spines.values():
        spine.set_edgecolor("#c9cfda")
        spine.set_linewidth(0.6)


def arenas() -> None:
    """PSNR over work of every arena that was measured."""
    import matplotlib

    from benchmarks.arena_tables import picture_of, read_all
    from jali.evaluation.arena.write import plot

    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "arena"}):
        for board in read_all(RESULTS):
            plot(board, HERE / picture_of(board))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = ("losses", "heads", "sheet", "film", "world", "totals", "arena")
    parser.add_argument("what", choices=known)
    parser.add_argument("given", nargs="*")
    asked = parser.parse_args()
    if asked.what == "losses":
        losses().savefig(ASSETS / "nano-losses.png", dpi=110)
    elif asked.what == "sheet":
        small(Path(asked.given[0]), asked.given[1])
    elif asked.what == "film":
        film(Path(asked.given[0]))
    elif asked.what == "world":
        world()
    elif asked.what == "totals":
        import matplotlib

        told = json.loads((RESULTS / "quality-totals.json").read_text("utf-8"))
        # Letters stay letters, and the same numbers give the same file.
        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "nano"}):
            totals(told).savefig(ASSETS / "nano-totals.svg", metadata={"Date": None})
    elif asked.what == "arena":
        arenas()
    else:
        told = json.loads((RESULTS / "nano-heads.json").read_text("utf-8"))
        heads_figure(told).savefig(ASSETS / "nano-heads.png", dpi=110)


if __name__ == "__main__":
    main()
