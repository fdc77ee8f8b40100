"""What came of a demonstration: times, cost and nearness of both clips, and files to look at."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.clips.clip import read_clip
from jali.evaluation.demo.side_by_side import panels, write_film, write_strip
from jali.evaluation.report import read_comparison, render_page, write_page
from jali.generation import ClipRecord, RunFolder

PAGE, FILM, STRIP = "index.html", "side-by-side.mp4", "strip.png"
METRICS = ("psnr", "ssim")


@dataclass(frozen=True, slots=True)
class Outcome:
    """Two runs of one clip each, and their metrics; a PSNR of None is that of equal frames."""

    dense: RunFolder
    sparse: RunFolder
    psnr: float | None
    ssim: float

    @property
    def clips(self) -> tuple[ClipRecord, ClipRecord]:
        return self.dense.clips[0], self.sparse.clips[0]

    @property
    def speed_up(self) -> float:
        """Of the whole generation: text, transformer, decoder."""
        dense, sparse = self.clips
        return dense.seconds / sparse.seconds

    @property
    def speed_up_transformer(self) -> float | None:
        times = [clip.seconds_transformer for clip in self.clips]
        return None if times[0] is None or not times[1] else times[0] / times[1]

    @property
    def name(self) -> str:
        return name_of(self.sparse)

    def to_dict(self) -> dict[str, Any]:
        dense, sparse = self.clips
        return {
            "jali": self.sparse.jali,
            "prompt": sparse.prompt,
            "settings": self.sparse.settings.to_dict(),
            "machine": self.sparse.machine,
            "versions": self.sparse.versions,
            "dense": _facts(self.dense, dense),
            "sparse": _facts(self.sparse, sparse),
            "speed_up": round(self.speed_up, 4),
            "speed_up_transformer": _rounded(self.speed_up_transformer),
            "psnr": _rounded(self.psnr),
            "ssim": _rounded(self.ssim),
        }


def name_of(run: RunFolder) -> str:
    label, budget = run.settings.label, run.settings.budget
    return label if label == "dense" or budget is None else f"{label} {budget:g}"


def show(
    dense: RunFolder, sparse: RunFolder, folder: Path, tell: Callable[[str], None] = lambda _: None
) -> Outcome:
    """Measure the two clips, and write film, strip and page into the folder."""
    tell("measuring")
    comparison = read_comparison([dense.folder, sparse.folder], metrics=METRICS)
    found = comparison.rows()[1].metrics
    psnr = found["psnr"].value
    outcome = Outcome(dense, sparse, psnr if math.isfinite(psnr) else None, found["ssim"].value)
    tell("writing films and page")
    clips = [read_clip(run.path(run.clips[0].lossless)) for run in (dense, sparse)]
    titles = [f"{name_of(run)} · {run.clips[0].seconds:.1f} s" for run in (dense, sparse)]
    shown = panels(clips[0], clips[1], (titles[0], titles[1]))
    write_film(folder / FILM, shown, dense.clips[0].fps)
    write_strip(folder / STRIP, shown)
    write_page(folder / PAGE, render_page(comparison))
    return outcome


def _facts(run: RunFolder, clip: ClipRecord) -> dict[str, Any]:
    """What the table says of one of the two, and its film, from the folder that holds both."""
    return {
        "name": name_of(run),
        "budget": clip.budget,
        "cost": clip.cost,
        "sparse_cost": clip.sparse_cost,
        "seconds": clip.seconds,
        "seconds_transformer": clip.seconds_transformer,
        "summary": clip.summary,
        "video": f"{run.folder.name}/{clip.video}",
    }


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 4)
