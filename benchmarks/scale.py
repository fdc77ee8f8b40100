"""The table of docs/scale.md: what one experiment costs, from the cost model."""

from __future__ import annotations

from jali.experiments import Experiment
from jali.experiments.scale import forecast

# What docs/scale.md shows: one line for each model and size, at the defaults of `experiment run`.
SHOWN: tuple[tuple[str, int | None, int | None], ...] = (
    ("wan-t2v-1.3b", None, None), ("wan-t2v-1.3b", 720, 1280), ("wan-t2v-14b", None, None),
    ("wan-t2v-14b", 720, 1280), ("wan2.2-ti2v-5b", None, None), ("wan2.2-t2v-a14b", None, None),
    ("cogvideox-5b", None, None), ("cogvideox1.5-5b", None, None), ("hunyuan-video", None, None),
    ("hunyuan-video-1.5", None, None), ("ltx-video", None, None),
)  # fmt: skip


def table() -> str:
    """GPU time and disk of one experiment for each model, as Markdown."""
    lines = [
        "| model | size | tokens | one clip dense | one clip at 0.5 | calibrate | benchmark "
        "| quality | one job | book | scratch | clips |",
        "|---|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    for model, height, width in SHOWN:
        e = Experiment(tag="x", model=model, height=height, width=width).completed()
        s, found = e.settings, forecast(e)
        assert found is not None, model
        times = (
            found.dense_clip, found.sparse_clip, found.calibrate, found.benchmark, found.quality,
            found.seconds,
        )  # fmt: skip
        cells = [_duration(seconds) for seconds in times]
        sizes = map(_size, (found.book_bytes, found.scratch_bytes, found.clip_bytes))
        lines.append(
            f"| `{model}` | {s.height}×{s.width}×{s.num_frames} | {found.tokens:,} | "
            + " | ".join([*cells[:-1], f"**{cells[-1]}**", *sizes])
            + " |"
        )
    return "\n".join(lines)


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"


def _size(count: int) -> str:
    megabytes = count / 2**20
    gigabytes = megabytes / 1024
    if megabytes < 1000:
        return f"{megabytes:.0f} MB"
    return f"{gigabytes:.1f} GB" if gigabytes < 20 else f"{gigabytes:.0f} GB"
