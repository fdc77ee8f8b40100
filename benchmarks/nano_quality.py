"""What each method costs in quality, on nano, at equal achieved cost, controls beside them.

    python -m benchmarks.nano_quality --output benchmarks/results/quality-nano.json

Every row: the same prompts and seeds as the dense run, PSNR / SSIM / LPIPS of the decoded frames
against it. Budgets are searched so that what the sparse calls really cost is the asked number.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali import __version__, load_pipeline, make_method, sparse_processor_mode
from jali.evaluation.quality.metric import lpips, psnr, ssim
from jali.files import write_json
from jali.methods import Method
from training.autoencoder import decode_whole
from training.scene import prompts

METHODS = ("entropy", "cached", "psa", "rf_v2", "ada_bsa", "random", "local")
COSTS = (0.7, 0.5, 0.3, 0.2)
SCHEDULES = {"all": (0, False), "scheduled": (0.2, True)}  # warm-up share, layer 0 dense
SIZE = {"height": 192, "width": 320, "num_frames": 37}


def say(*words: object) -> None:
    print(*words, flush=True)


class Studio:
    """nano on a device: latents for prompts, and frames for latents."""

    def __init__(self, pipe: Any, sentences: tuple[str, ...], steps: int, guidance: float) -> None:
        self.pipe, self.sentences, self.steps, self.guidance = pipe, sentences, steps, guidance

    def latents(self, count: int | None = None, steps: int | None = None) -> Tensor:
        some = list(self.sentences[:count])
        dice = [torch.Generator("cpu").manual_seed(i) for i in range(len(some))]
        out = self.pipe(
            some, **SIZE, num_inference_steps=steps or self.steps, generator=dice,
            guidance_scale=self.guidance, output_type="latent",
        )  # fmt: skip
        return out.frames  # type: ignore[no-any-return]

    @torch.no_grad()
    def frames(self, latents: Tensor) -> Tensor:
        """uint8 [n, F, H, W, 3]."""
        vae = self.pipe.vae
        shape = (1, -1, 1, 1, 1)
        mean = torch.tensor(vae.config.latents_mean, device=latents.device).view(shape)
        std = torch.tensor(vae.config.latents_std, device=latents.device).view(shape)
        clips = []
        for one in latents.float().split(2):
            clips.append(decode_whole(vae, (one * std + mean).to(vae.dtype)).float())
        video = torch.cat(clips).clamp(-1, 1) * 0.5 + 0.5
        return (video.permute(0, 2, 3, 4, 1) * 255).round().byte()


def compare(sparse: Tensor, dense: Tensor) -> dict[str, Any]:
    """Means over clips, with every clip's own values."""
    rows: dict[str, list[float]] = {"psnr": [], "ssim": [], "lpips": []}
    for a, b in zip(sparse, dense, strict=True):
        # The clip's PSNR by its mean frame PSNR; frames that are the same would make it infinite.
        rows["psnr"].append(float(psnr(a, b).clamp(max=100).mean()))
        rows["ssim"].append(float(ssim(a, b).mean()))
        rows["lpips"].append(float(lpips(a, b, net="alex").mean()))
    means = {name: statistics.fmean(values) for name, values in rows.items()}
    return means | {"clips": rows}


@contextmanager
def sparse(studio: Studio, method: Any, schedule: str, **more: Any) -> Iterator[Any]:
    warmup, first = SCHEDULES[schedule]
    with sparse_processor_mode(
        studio.pipe, method=method, warmup_frac=warmup, dense_first_layer=first, **more
    ) as run:
        yield run


def achieved(studio: Studio, method: Method) -> float:
    """What the sparse calls of a short run cost."""
    with sparse(studio, method, "all") as run:
        studio.latents(count=4, steps=4)
        return run.stats().sparse_cost or 1.0


def at_cost(studio: Studio, name: str, cost: float) -> tuple[Method, float]:
    """The method whose calls really cost this much: three tries of regula falsi."""
    asked, got = [], []
    ask = cost
    for _ in range(3):
        method = make_method(name).with_budget(ask)
        asked.append(ask)
        got.append(achieved(studio, method))
        if abs(got[-1] - cost) < 0.004:
            break
        if len(asked) > 1 and abs(got[-1] - got[-2]) > 1e-6:
            slope = (asked[-1] - asked[-2]) / (got[-1] - got[-2])
        else:
            slope = 1.0
        ask = min(1.0, max(0.01, asked[-1] + slope * (cost - got[-1])))
    best = min(range(len(asked)), key=lambda i: abs(got[i] - cost))
    return make_method(name).with_budget(asked[best]), asked[best]


def machine() -> dict[str, Any]:
    import diffusers
    import triton

    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor()
    return {
        "device": name, "jali": __version__, "torch": torch.__version__, "triton":
        triton.__version__, "diffusers": diffusers.__version__, "python": platform.python_version(),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--path", help="another folder than the shipped one")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--guidance", type=float, default=4.0)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--costs", default=",".join(map(str, COSTS)))
    parser.add_argument("--schedules", default=",".join(SCHEDULES))
    parser.add_argument("--book", type=Path, help="of the method `cached`; made if it is not there")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    asked = parser.parse_args()
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    pipe = load_pipeline("nano", path=asked.path, device=asked.device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    studio = Studio(pipe, prompts(asked.prompts), asked.steps, asked.guidance)
    start = time.monotonic()
    dense = studio.frames(studio.latents())
    result: dict[str, Any] = {
        "machine": machine(), "size": SIZE, "tokens": 9600, "steps": asked.steps,
        "guidance": asked.guidance, "prompts": list(studio.sentences), "rows": [],
    }  # fmt: skip
    # Two dense runs differ by what kernels round: the most that any method could reach.
    with sparse_processor_mode(pipe, method=make_method("entropy"), warmup_frac=10**6):
        again = compare(studio.frames(studio.latents()), dense)
    result["dense_by_jali"] = again
    say(f"dense by jali's kernels: {again['psnr']:.2f} dB {time.monotonic() - start:.0f} s")

    def keep(row: dict[str, Any]) -> None:
        result["rows"].append(row)
        write_json(asked.output, result, sort_keys=False)
        say(
            f"{row['method']:8} {row['schedule']:9} cost {row['cost']:.2f} achieved"
            f" {row['achieved']:.3f} {row['psnr']:.2f} dB {row['ssim']:.4f} {row['lpips']:.4f}"
            f"  {time.monotonic() - start:.0f} s"
        )

    costs = [float(cost) for cost in asked.costs.split(",")]
    if "cached" in asked.methods.split(","):
        book = calibrated(studio, asked.book or asked.output.with_suffix(".safetensors"), costs)
        say(f"calibrated: {time.monotonic() - start:.0f} s")
    for cost in costs:
        for name in asked.methods.split(","):
            if name == "cached":
                cached_rows(studio, book, cost, asked.schedules.split(","), dense, keep)
                continue
            method, budget = at_cost(studio, name, cost)
            for schedule in asked.schedules.split(","):
                with sparse(studio, method, schedule) as run:
                    latents = studio.latents()
                    stats = run.stats()
                keep(
                    {
                        "method": name, "schedule": schedule, "cost": cost,
                        "budget": budget, "achieved": stats.sparse_cost, "whole_run": stats.cost,
                        "backend": sorted({r.backend for r in stats.rows if r.reason is None}),
                    }
                    | compare(studio.frames(latents), dense)
                )  # fmt: skip


def calibrated(studio: Studio, book: Path, costs: list[float]) -> Path:
    """The book at hand, or one made of two prompts that are not asked for here."""
    from jali.maskbook.calibration import calibrate

    if not book.exists():
        calibrate(
            studio.pipe, prompts(2, seed=1), book, model="nano", steps=studio.steps,
            guidance=studio.guidance, budgets=costs, seed=1000, **SIZE,
        )  # fmt: skip
    return book


def cached_rows(
    studio: Studio, book: Path, cost: float, schedules: list[str], dense: Tensor, keep: Any
) -> None:
    from jali import cached_processor_mode

    for schedule in schedules:
        warmup, first = SCHEDULES[schedule]
        with cached_processor_mode(
            studio.pipe, book, budget=cost, warmup_frac=warmup, dense_first_layer=first
        ) as run:
            latents = studio.latents()
            stats = run.stats()
        keep(
            {
                "method": "cached", "schedule": schedule, "cost": cost,
                "budget": cost, "achieved": stats.sparse_cost, "whole_run": stats.cost,
                "backend": sorted({r.backend for r in stats.rows if r.reason is None}),
            }
            | compare(studio.frames(latents), dense)
        )  # fmt: skip


if __name__ == "__main__":
    main()
