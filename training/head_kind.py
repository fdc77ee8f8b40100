"""Kinds of heads: how spread out the attention of each is, and how far it looks in t, h, w.

    python -m training.head_kind --output FILE [--weights FOLDER] [--size 128 192 81]

looks at all heads of a model, two minutes on a CPU.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.planning.site import Site
from jali.tokens.grid import Box, TokenGrid

NEAR = 0.5  # of the distance that even attention would look
PROMPT = "a large red checkered ball moves right over an olive wooden background"


@dataclass(frozen=True, slots=True)
class Head:
    """One head at one site. `entropy` is 1 where all keys weigh the same; `distance` is the mean
    distance it looks along frames, height and width, as a share of what even attention looks."""

    site: Site
    head: int
    entropy: float
    distance: tuple[float, float, float]

    @property
    def kind(self) -> str:
        """local (near in everything), temporal (near in the picture, far in time), frame (near in
        time, far in the picture), or global."""
        in_time, in_picture = self.distance[0] < NEAR, max(self.distance[1:]) < NEAR
        if in_picture:
            return "local" if in_time else "temporal"
        return "frame" if in_time else "global"


def heads_of(q: Tensor, k: Tensor, grid: TokenGrid, site: Site, scale: float) -> list[Head]:
    """Every head of one call, q and k [1, H, S, D], by 512 of its video queries."""
    places, box = _places(grid)
    places = places.to(q.device)
    video = places[:, 0] >= 0
    at = video.nonzero()[:, 0]
    at = at[torch.linspace(0, len(at) - 1, min(512, len(at))).round().long().to(q.device)]
    apart = (places[at, None] - places[video]).abs()
    found, even = [], apart.mean((0, 1))
    for h in range(q.shape[1]):
        key = k[0, h * k.shape[1] // q.shape[1]].float()
        weight = ((q[0, h, at].float() @ key.T) * scale).softmax(-1)
        entropy = -(weight * weight.clamp_min(1e-30).log()).sum(-1).mean() / math.log(len(key))
        seen = weight[:, video]
        seen = seen / seen.sum(-1, keepdim=True).clamp_min(1e-30)
        far = (apart * seen[..., None]).sum(1).mean(0)
        distance = [
            float(f / e) if size > 1 else 0.0 for f, e, size in zip(far, even, box, strict=True)
        ]
        found.append(Head(site, h, float(entropy), (distance[0], distance[1], distance[2])))
    return found


def _places(grid: TokenGrid) -> tuple[Tensor, tuple[int, int, int]]:
    """(t, h, w) of every token of the largest box, −1 for all others, and that box."""
    boxes = [(start, segment) for start, segment in grid.spans() if isinstance(segment, Box)]
    if not boxes:
        raise ValueError(f"heads look along frames, height and width, and {grid} has no such grid")
    start, largest = max(boxes, key=lambda found: found[1].tokens)
    places = torch.full((grid.tokens, 3), -1.0)
    lines = [torch.arange(size, dtype=torch.float32) for size in largest.shape]
    places[start : start + largest.tokens] = torch.cartesian_prod(*lines)
    return places, largest.shape


def heads_in(
    path: str | None, size: tuple[int, int, int], prompt: str, steps: int, looked_at: Sequence[int]
) -> list[Head]:
    """Every head of nano, or of a model of its kind in a folder, in some steps of a dense
    generation of height × width × frames."""
    from jali import load_pipeline
    from jali.evaluation.inspection.capture import capture
    from jali.generation.settings import Settings

    height, width, frames = size
    asked = Settings(
        model="nano", path=path, height=height, width=width, num_frames=frames, steps=steps
    ).resolve()
    pipe = load_pipeline("nano", path=path)
    pipe.set_progress_bar_config(disable=True)
    layers = range(pipe.transformer.config.num_layers)
    calls = capture(pipe, asked, prompt, layers=layers, steps=looked_at)
    return [h for call in calls for h in heads_of(call.q, call.k, call.grid, call.site, call.scale)]


def row(head: Head) -> dict[str, Any]:
    """A head as it is kept."""
    return {
        "step": head.site.step, "layer": head.site.layer, "head": head.head,
        "entropy": round(head.entropy, 3), "reach": [round(r, 3) for r in head.distance],
        "kind": head.kind,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--weights", help="a model's folder, instead of nano's own")
    parser.add_argument(
        "--size", type=int, nargs=3, default=(192, 320, 37), metavar=("HEIGHT", "WIDTH", "FRAMES")
    )
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--look-at", type=int, nargs="+", default=(1, 5, 9), help="steps, from 0")
    asked = parser.parse_args()
    try:
        found = heads_in(asked.weights, tuple(asked.size), asked.prompt, asked.steps, asked.look_at)
    except (OSError, ValueError) as error:
        parser.error(str(error))
    text = ",\n".join(f"  {json.dumps(row(head))}" for head in found)
    about = {"prompt": asked.prompt, "size": list(asked.size), "steps": asked.steps}
    asked.output.write_text(f'{json.dumps(about)[:-1]}, "rows": [\n{text}\n]}}\n', "utf-8")


if __name__ == "__main__":
    main()
