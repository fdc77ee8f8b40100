"""Quality of a calibrated book on unseen prompts, as it is and resampled, beside online entropy.

    PYTHONPATH=src python benchmarks/dev/book_quality.py [--model nano] [--prompts 8] [--budget 0.3]

The book is made of 2 prompts at one size and number of steps. Every row is PSNR and SSIM of unseen
prompts against the dense run of the same size, steps and seed: online entropy, the book (at its own
size; resampled to a larger one; to twice the steps; to both), and blocks drawn by lot. All
have the same schedule, and each row says what it cost. Writes $OUT/nano-book.json, anew after
every row.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali import cached_processor_mode, generate_video, load_pipeline, sparse_processor_mode
from jali.evaluation.bench.machine import machine
from jali.evaluation.quality.metric import psnr, ssim
from jali.files import write_json
from jali.generation.prompts import default_prompts
from jali.maskbook import MaskBook
from jali.maskbook.calibration import calibrate
from jali.tokens.layout import Blocks

SMALL = {"height": 128, "width": 128, "num_frames": 33}
Size = dict[str, int]
START = time.monotonic()


def say(text: str) -> None:
    print(f"{time.monotonic() - START:6.1f} s  {text}", flush=True)


def clips(
    pipe: Any, model: str, texts: tuple[str, ...], size: Size, steps: int, mode: Any
) -> tuple[list[Tensor], float, float]:
    """Frames uint8 [F, H, W, 3] of each prompt, the mean cost of sparse calls, and of all calls."""
    made, sparse, whole = [], [], []
    with mode as handle:
        for i, text in enumerate(texts):
            out = generate_video(pipe, text, model, steps=steps, seed=1000 + i, **size)
            made.append((out * 255).round().to(torch.uint8))
            if handle is not None:
                stats = handle.stats()
                sparse.append(stats.sparse_cost or 1.0)
                whole.append(stats.cost)
    return made, statistics.mean(sparse or [1.0]), statistics.mean(whole or [1.0])


def compared(dense: list[Tensor], made: list[Tensor]) -> dict[str, float]:
    rows = {"psnr": [], "ssim": []}  # type: dict[str, list[float]]
    for a, b in zip(dense, made, strict=True):
        rows["psnr"].append(float(psnr(a, b).mean()))
        rows["ssim"].append(float(ssim(a, b).mean()))
    return {name: statistics.mean(values) for name, values in rows.items()}


def grid_of(pipe: Any, size: Size) -> tuple[int, int, int]:
    """The tokens of a size, as the transformer counts them."""
    patch = pipe.transformer.config.patch_size
    frames = (size["num_frames"] - 1) // pipe.vae_scale_factor_temporal + 1
    pixels = pipe.vae_scale_factor_spatial
    return frames, size["height"] // pixels // patch[1], size["width"] // pixels // patch[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="nano")
    parser.add_argument("--path", help="another folder than the shipped one")
    parser.add_argument("--prompts", type=int, default=8, help="unseen ones")
    parser.add_argument("--budget", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--large", default="192x320x37", help="the other size")
    parser.add_argument("--places", default="0,1,2,3", help="own, larger, more steps, both")
    parser.add_argument("--name", default="nano-book")
    parser.add_argument("--block", type=int, default=64, help="queries and keys, for all methods")
    args = parser.parse_args()
    model, steps, budget = args.model, args.steps, args.budget
    large = dict(zip(SMALL, map(int, args.large.split("x")), strict=True))
    cut = {"q_block": args.block, "k_block": args.block}
    pipe = load_pipeline(model, path=args.path)
    pipe.set_progress_bar_config(disable=True)
    texts = default_prompts(model)
    seen, unseen = texts[:2], texts[2 : 2 + args.prompts]
    device = next(pipe.transformer.parameters()).device
    result: dict[str, Any] = {
        "what": "quality of a calibrated book on unseen prompts", "model": model,
        "machine": machine(device), "budget": budget, "calibrated_on": len(seen),
        "prompts": len(unseen), "block": args.block, "rows": [],
    }  # fmt: skip
    target = Path(os.environ.get("OUT", ".")) / f"{args.name}.json"
    with tempfile.TemporaryDirectory() as folder:
        book = calibrate(
            pipe, seen, Path(folder) / "book.safetensors", model=model, steps=steps,
            blocks=Blocks(args.block, args.block), budgets=[budget], **SMALL,
        )  # fmt: skip
        say(f"{book}, {book.bytes / 1e6:.1f} MB")
        places: list[tuple[str, Size, int, MaskBook]] = [
            ("its own size and steps", SMALL, steps, book),
            ("a larger size", large, steps, book.resample(grid_of(pipe, large))),
            ("twice the steps", SMALL, 2 * steps, book.resample(steps=2 * steps)),
            ("both", large, 2 * steps, book.resample(grid_of(pipe, large), 2 * steps)),
        ]
        for where, size, count, own in (places[int(i)] for i in args.places.split(",")):
            dense, _, _ = clips(pipe, model, unseen, size, count, nullcontext(None))
            say(f"dense at {where}")
            modes = {
                "cached": cached_processor_mode(pipe, own, budget),
                "entropy": sparse_processor_mode(pipe, budget, **cut),
                "random": sparse_processor_mode(pipe, budget, method="random", **cut),
            }
            for method, mode in modes.items():
                made, sparse, whole = clips(pipe, model, unseen, size, count, mode)
                row = {
                    "where": where, "method": method, "grid": str(own.grid), "steps": count,
                    "resampled": bool(own.header.history), "sparse_cost": sparse, "cost": whole,
                    **compared(dense, made),
                }  # fmt: skip
                result["rows"].append(row)
                say(f"{row}")
                write_json(target, result, sort_keys=False)
    say(f"written {target}")


if __name__ == "__main__":
    main()
