"""Calls of nano's layers in dense clips: what the benchmarks of single layers look at."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.nano_quality import weights_digest
from jali import Site, TokenGrid, load_pipeline, nano
from jali.evaluation.bench.machine import machine
from jali.evaluation.inspection import Capture, capture
from jali.generation.settings import Settings
from training.scene import prompts

SIZE = {"height": 192, "width": 320, "num_frames": 37}
GRID, STEPS, LAYERS = TokenGrid.video(10, 24, 40), 12, 8
BLOCK = 128


def arguments(doc: str | None) -> argparse.Namespace:
    """Of a benchmark that looks at some layers and steps."""

    def numbers(text: str) -> list[int]:
        return [int(number) for number in text.split(",")]

    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--captures", type=Path, help="a folder that keeps q, k and v")
    parser.add_argument("--prompts", type=int, default=2)
    parser.add_argument("--steps", type=numbers, default=[2, 5, 8])
    parser.add_argument("--layers", type=numbers, default=[1, 4, 7])
    return parser.parse_args()


def about(asked: argparse.Namespace) -> dict[str, Any]:
    """What a file of results says of its calls."""
    return {
        "machine": machine(torch.device("cpu")), "size": SIZE, "tokens": GRID.tokens,
        "steps": asked.steps, "of_steps": STEPS, "layers": asked.layers, "of_layers": LAYERS,
        "weights": weights_digest(nano.folder()), "prompts": list(prompts(asked.prompts)),
    }  # fmt: skip


def asked_calls(asked: argparse.Namespace) -> Iterator[Capture]:
    """Those of the asked steps and layers."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.captures or Path(scratch)
        for call in captured(folder, asked.prompts, tuple(asked.steps)):
            if call.site.step in asked.steps and call.site.layer in asked.layers:
                yield call


def captured(folder: Path, count: int, steps: tuple[int, ...]) -> Iterator[Capture]:
    """The calls of some held-out prompts, from the folder where they lie there already."""
    pipe = None
    for i, text in enumerate(prompts(count)):
        file = folder / f"prompt{i}.pt"
        if not file.exists():
            pipe = pipe or load_pipeline("nano", device="cpu", dtype=torch.float32)
            asked = Settings("nano", method="dense", steps=STEPS, guidance=4.0, seed=i, **SIZE)
            calls = capture(pipe, asked.resolve(), text, range(LAYERS), steps)
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(
                [
                    {
                        "step": c.site.step, "layer": c.site.layer, "q": c.q, "k": c.k, "v": c.v,
                        "scale": c.scale,
                    }
                    for c in calls
                ],
                file,
            )  # fmt: skip
        for kept in torch.load(file, mmap=True):
            site = Site(kept["step"], STEPS, kept["layer"], LAYERS)
            yield Capture(site, GRID, kept["q"], kept["k"], kept["v"], None, kept["scale"])
