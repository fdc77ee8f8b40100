"""Small run folders with real videos and costs that look like those of an attention layer."""

from __future__ import annotations

import base64
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from jali.clips.clip import write_lossless, write_mp4
from jali.generation.manifest import ClipRecord, RunFolder
from jali.generation.settings import Settings

PROMPTS = (
    "A red ball rolls across a striped floor",
    "A green square turns slowly above dark water",
    "Two small lights drift apart in the evening",
)


@dataclass(frozen=True)
class Size:
    """Pixels, frames and the token grid they become."""

    height: int = 96
    width: int = 160
    frames: int = 13
    fps: int = 12
    layers: int = 8
    steps: int = 10
    heads: int = 4

    @property
    def grid(self) -> tuple[int, int, int]:
        return (1 + (self.frames - 1) // 4, self.height // 8, self.width // 8)


SMALL = Size()
SHOWN = Size(height=192, width=320, frames=37)


def clip_name(index: int) -> str:
    return f"{index:04d}-" + "-".join(PROMPTS[index].lower().split()[:4])


def film(index: int, size: Size, noise: float = 0.0) -> np.ndarray:
    """Frames uint8 [F, H, W, 3]: a shape that moves over a background that pans."""
    y, x = np.mgrid[0 : size.height, 0 : size.width].astype(np.float32)
    y, x = y / size.height, x / size.width
    random = np.random.default_rng(index)
    frames = []
    for i in range(size.frames):
        t = i / max(size.frames - 1, 1)
        if index == 0:
            stripes = 0.5 + 0.5 * np.sin(40 * (x + 0.15 * t) + 14 * y)
            back = np.stack([0.30 + 0.22 * stripes, 0.26 + 0.2 * stripes, 0.34 + 0.1 * y], -1)
            lit = _disc(x, y, 0.15 + 0.7 * t, 0.6 - 0.12 * abs(math.sin(6 * t)), 0.14)
            shape, colour = lit, np.array([0.86, 0.22, 0.18])
        elif index == 1:
            waves = 0.5 + 0.5 * np.sin(60 * y + 4 * np.sin(9 * x + 6 * t))
            back = np.stack([0.05 + 0.03 * waves, 0.13 + 0.10 * waves, 0.24 + 0.12 * waves], -1)
            shape, colour = _square(x, y, 0.5, 0.45, 0.2, 1.6 * t), np.array([0.32, 0.75, 0.42])
        else:
            glow = np.exp(-6 * ((x - 0.5) ** 2 + (y - 0.95) ** 2))
            back = np.stack([0.16 + 0.5 * glow, 0.12 + 0.28 * glow, 0.26 + 0.16 * glow], -1)
            pair = _disc(x, y, 0.45 - 0.3 * t, 0.4, 0.06) + _disc(x, y, 0.55 + 0.3 * t, 0.34, 0.05)
            shape, colour = pair, np.array([1.0, 0.9, 0.66])
        picture = back * (1 - shape[..., None]) + colour * shape[..., None]
        if noise:
            # What a sparse run does to a clip: edges move a little, more so later in the clip.
            shift = noise * (0.4 + t) * (1 + 0.5 * math.sin(9 * t + index))
            edge = np.abs(np.gradient(picture.mean(-1), axis=1))[..., None]
            grain = random.normal(0, 1, (size.height // 8, size.width // 8, 3))
            grain = np.kron(grain, np.ones((8, 8, 1)))[: size.height, : size.width]
            picture = picture + shift * (0.35 * grain + 26 * edge * np.sin(24 * y)[..., None])
        frames.append((picture.clip(0, 1) * 255).round().astype(np.uint8))
    return np.stack(frames)


def _disc(x: np.ndarray, y: np.ndarray, cx: float, cy: float, radius: float) -> np.ndarray:
    far = np.hypot((x - cx) * 5 / 3, y - cy)
    return np.clip((radius - far) * 60, 0, 1)


def _square(x: np.ndarray, y: np.ndarray, cx: float, cy: float, half: float, turn: float) -> Any:
    u, v = (x - cx) * 5 / 3, y - cy
    a = np.abs(u * math.cos(turn) + v * math.sin(turn))
    b = np.abs(v * math.cos(turn) - u * math.sin(turn))
    return np.clip((half - np.maximum(a, b)) * 60, 0, 1)


def sites(index: int, size: Size, budget: float | None, seed: int = 0) -> dict[str, Any]:
    """Costs per call as an entropy method spends them; a dense run spends 1 everywhere."""
    random = np.random.default_rng(seed * 97 + index)
    habit = random.uniform(0.35, 1.75, (size.layers, size.heads))
    rows = []
    for step in range(size.steps):
        for layer in range(size.layers):
            for branch in ("cond", "uncond"):
                reason = None
                if budget is None:
                    reason = "dense run"
                elif step < 0.2 * size.steps:
                    reason = "first steps"
                elif layer == 0:
                    reason = "layer 0"
                heads = [1.0] * size.heads
                if reason is None:
                    assert budget is not None
                    swing = 1 + 0.35 * math.sin(layer * 0.9) - 0.3 * step / size.steps
                    spread = habit[layer] * swing * random.uniform(0.9, 1.1, size.heads)
                    spread *= 1.06 if branch == "uncond" else 1.0
                    heads = [round(float(v), 4) for v in np.clip(budget * spread, 0.05, 1)]
                rows.append(
                    {
                        "transformer": "transformer",
                        "layer": layer,
                        "step": step,
                        "branch": branch,
                        "cost": round(float(np.mean(heads)), 4),
                        "heads": heads,
                        "backend": "torch",
                        "reason": reason,
                    }
                )
    plans = [] if budget is None else [plan(index, size, *site) for site in ((4, 5, 0), (6, 8, 2))]
    return {
        "version": 1,
        "grid": list(size.grid),
        "layers": size.layers,
        "steps": size.steps,
        "heads": size.heads,
        "rows": rows,
        "plans": plans,
    }


def plan(index: int, size: Size, layer: int, step: int, head: int) -> dict[str, Any]:
    """What a query block on the moving shape reads: its surroundings, and where it was before."""
    T, H, W = size.grid
    frame, row, column = T // 2, int(H * 0.55), W // 2
    levels = np.zeros((T, H, W), np.uint8)
    for t in range(T):
        middle = 0.15 + 0.7 * t / max(T - 1, 1) if index == 0 else 0.5
        y, x = np.mgrid[0:H, 0:W]
        far = np.hypot((x / W - middle) * 5 / 3, y / H - 0.55) + 0.03 * abs(t - frame)
        levels[t][far < 0.46] = 8
        levels[t][far < 0.36] = 4
        levels[t][far < 0.27] = 2
        levels[t][far < 0.2] = 1
    if head == 2:
        levels = np.where(levels == 1, 1, 0).astype(np.uint8)
        levels[:, row - 2 : row + 2] = 1
    first = (frame * H + row) * W + column - 4
    own = [[first + i * W, 8] for i in range(2)]
    for start, count in own:
        levels.reshape(-1)[start : start + count] = 1
    return {
        "layer": layer,
        "step": step,
        "branch": "cond",
        "grid": [T, H, W],
        "head": head,
        "query_block": 37,
        "query_tokens": own,
        "levels": base64.b64encode(levels.tobytes()).decode(),
    }


def metrics(folder: Path, reference: Path, size: Size, noise: float, clips: int) -> dict[str, Any]:
    """A metrics.json: PSNR from the frames themselves, SSIM and LPIPS made up from it."""
    pairs = []
    for index in range(clips):
        a, b = (film(index, size, strength).astype(np.float64) for strength in (0, noise))
        error = ((a - b) ** 2).mean((1, 2, 3)) / 255**2
        psnr = -10 * np.log10(np.maximum(error, 1e-10))
        curves = {
            "psnr": psnr,
            "ssim": 1 - 0.9 * np.exp(-psnr / 11),
            "lpips": 0.9 * np.exp(-psnr / 9),
        }
        file = f"{clip_name(index)}.mp4"
        pairs.append(
            {
                "name": clip_name(index),
                "frames": size.frames,
                "identical": False,
                "checks": {"black": 0, "frozen": 0, "nan": 0},
                "reference_checks": {"black": 0, "frozen": 0, "nan": 0},
                "reference": {"file": str(reference / file), "lossy": True},
                "generated": {"file": str(folder / file), "lossy": True},
                **{
                    name: {
                        "mean": float(values.mean()),
                        "per_frame": [round(float(v), 5) for v in values],
                    }
                    for name, values in curves.items()
                },
            }
        )
    return {
        "kind": "jali-metrics",
        "version": 1,
        "metrics": ["psnr", "ssim", "lpips"],
        "pairs": pairs,
        "summary": {},
        "unmatched": {"reference": [], "generated": []},
        "unavailable": {"vmaf": "no ffmpeg with libvmaf"},
    }


def make_run(
    folder: Path,
    size: Size = SMALL,
    *,
    method: str = "dense",
    budget: float | None = None,
    noise: float = 0.0,
    pace: float = 10.0,
    clips: int = 2,
    reference: Path | None = None,
    cold: tuple[int, ...] = (),
    **other: Any,
) -> Path:
    """A complete run folder; `pace` is about the seconds of one clip, `other` more settings.

    With a `reference` the folder has metrics too.
    """
    folder.mkdir(parents=True)
    entries = []
    for index in range(clips):
        name = clip_name(index)
        frames = torch.from_numpy(film(index, size, noise))
        write_mp4(folder / f"{name}.mp4", frames, size.fps)
        write_lossless(folder / f"{name}.mkv", frames, size.fps)
        spent = sites(index, size, budget, seed=len(method))
        (folder / f"{name}.sites.json").write_text(json.dumps(spent))
        costs = [row["cost"] for row in spent["rows"]]
        sparse = [row["cost"] for row in spent["rows"] if row["reason"] is None]
        entries.append(
            ClipRecord(
                name=name,
                prompt=PROMPTS[index],
                seed=index,
                fps=size.fps,
                frames=size.frames,
                height=size.height,
                width=size.width,
                video=f"{name}.mp4",
                lossless=f"{name}.mkv",
                sites=f"{name}.sites.json",
                seconds=round(pace * (1 + 0.03 * index), 3),
                seconds_transformer=round(pace * (0.86 + 0.03 * index), 3),
                cost=round(sum(costs) / len(costs), 4),
                sparse_cost=round(sum(sparse) / len(sparse), 4) if sparse else None,
                budget=budget,
                calls=len(costs),
                sparse_calls=len(sparse),
                dense_reasons={},
                summary=f"{method}: asked {budget}",
                cold=index in cold,
            )
        )
    settings = {
        "model": "nano",
        "method": method,
        "budget": budget,
        "steps": size.steps,
        "guidance": 5.0,
        "height": size.height,
        "width": size.width,
        "num_frames": size.frames,
        "dtype": "float32",
        "device": "cpu",
    }
    RunFolder(
        folder,
        Settings(**{**settings, **other}),
        tuple(entries),
        complete=True,
        machine={"device": "an example machine", "cpu": "an example machine", "threads": 2},
        versions={"python": "3.11.2", "torch": "2.13.0", "diffusers": "0.42.1"},
        jali="0.1.0",
    ).write()
    if reference is not None:
        found = metrics(folder, reference, size, noise, clips)
        (folder / "metrics.json").write_text(json.dumps(found))
    return folder


def make_three(root: Path, size: Size = SMALL, clips: int = 2) -> list[Path]:
    """A dense run and two sparse ones."""
    dense = make_run(root / "dense", size, clips=clips, pace=12.4)
    shared = {"size": size, "clips": clips, "reference": dense}
    entropy = {"method": "entropy", "budget": 0.3, "noise": 0.035, "pace": 7.3}
    psa = {"method": "psa", "budget": 0.15, "noise": 0.06, "pace": 5.9}
    return [
        dense,
        make_run(root / "entropy", **entropy, **shared),
        make_run(root / "psa", **psa, **shared),
    ]
