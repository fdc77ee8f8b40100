"""`jali export`: tensors and lossless clips as mp4, for people to look at."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli.exits import input_errors, job_errors, refuse
from jali.cli.options import Json, check_folder
from jali.cli.output import print_json

if TYPE_CHECKING:
    from jali.evaluation.quality.pairs import FoundClip


def export(
    folder: Annotated[
        Path, typer.Argument(help="Run folder, folder of clips, or one clip.", metavar="DIR")
    ],
    fps: Annotated[
        float | None, typer.Option(help="Frames per second; none given: what the clip says, or 24.")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where the mp4 files go; none given: beside the clips.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace mp4 files that exist.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Turn saved tensors, lossless videos and folders of images into mp4 files.

    Examples:

      jali export results/dense

      jali export results/dense --fps 16 --output-dir videos --overwrite
    """
    if fps is not None and not 0 < fps <= 1000:
        refuse(f"--fps must be above 0 and at most 1000, got {fps:g}")
    with input_errors():
        if not folder.expanduser().exists():
            raise ValueError(f"{folder} does not exist")
        check_folder(output_dir)
    from jali.evaluation.quality.pairs import find_clips
    from jali.files import make_folder, remove_abandoned

    written: list[str] = []
    skipped: dict[str, str] = {}
    with job_errors():
        if output_dir is not None:
            make_folder(output_dir)
        for entry in find_clips(folder):
            target = (output_dir or entry.path.parent) / f"{entry.name}.mp4"
            why_not = None
            remove_abandoned(target)
            if target.exists() and target.samefile(entry.path):
                why_not = "is the only file of this clip"
            elif target.exists() and not overwrite:
                why_not = "exists (--overwrite replaces it)"
            if why_not:
                skipped[str(target)] = why_not
            else:
                _export(entry, target, fps)
                written.append(str(target))
            if not as_json:
                typer.echo(f"{target}: {why_not}" if why_not else str(target))
    if as_json:
        print_json({"written": written, "skipped": skipped}, indent=1)


def _export(entry: FoundClip, target: Path, fps: float | None) -> None:
    from collections.abc import Iterator

    from torch import Tensor

    from jali.clips.clip import FPS, write_mp4
    from jali.clips.source import open_source

    source = open_source(entry.path)
    nonfinite = 0

    def frames() -> Iterator[Tensor]:
        nonlocal nonfinite
        for batch in source.batches(8):
            nonfinite += int(batch.nonfinite.sum())
            yield batch.frames

    write_mp4(target, frames(), fps or entry.fps or source.fps or FPS)
    if nonfinite:
        typer.echo(f"jali: {entry.path}: {nonfinite} frames held NaN, drawn black there", err=True)
