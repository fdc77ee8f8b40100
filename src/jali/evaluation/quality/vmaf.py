"""VMAF, by an ffmpeg with libvmaf inside: the one of imageio-ffmpeg, or the machine's own."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jali.clips.clip import FPS, write_lossless
from jali.clips.source import Source, VideoSource
from jali.error import InputError, JobError

SMALLEST_SIDE = 32


@dataclass(frozen=True, slots=True)
class Ffmpeg:
    """An ffmpeg that has the filter."""

    path: Path
    version: str


def find_ffmpeg() -> Ffmpeg:
    """The first ffmpeg with libvmaf, or the reason why there is none."""
    tried = _candidates()
    for path in tried:
        # One that is there may be not to be run: another machine's, or without permission.
        with contextlib.suppress(OSError):
            listed = subprocess.run([path, "-filters"], capture_output=True, text=True)
            if listed.returncode == 0 and " libvmaf " in listed.stdout:
                words = listed.stderr.split(maxsplit=3)
                return Ffmpeg(path, words[2] if len(words) > 2 else "unknown")
    if tried:
        raise InputError(f"no ffmpeg with libvmaf ({' and '.join(map(str, tried))} have none)")
    raise InputError("no ffmpeg with libvmaf: pip install 'jali[quality]' brings one")


def _candidates() -> list[Path]:
    found = []
    with contextlib.suppress(ImportError, RuntimeError):  # not there, or there without a program
        from imageio_ffmpeg import get_ffmpeg_exe

        found.append(get_ffmpeg_exe())
    found.append(shutil.which("ffmpeg"))
    return [Path(path) for path in dict.fromkeys(found) if path]


def vmaf(ffmpeg: Ffmpeg, reference: Source, generated: Source, threads: int = 1) -> list[float]:
    """One value per frame, 0 to 100, by the model that libvmaf has built in (v0.6.1)."""
    with tempfile.TemporaryDirectory(prefix="jali-vmaf-") as folder:
        files = _as_videos(reference, generated, Path(folder))
        # Frames pair by their number, whatever their times are.
        even = "settb=1/25,setpts=N,format=yuv420p"
        graph = (
            f"[0:v]{even}[generated];[1:v]{even}[reference];[generated][reference]"
            f"libvmaf=log_fmt=json:log_path=vmaf.json:n_threads={threads}"
        )
        done = subprocess.run(
            [ffmpeg.path, "-v", "error", "-nostdin", "-i", f"file:{files[1]}",
             "-i", f"file:{files[0]}", "-lavfi", graph, "-f", "null", "-"],
            cwd=folder, capture_output=True, text=True,
        )  # fmt: skip
        log = Path(folder) / "vmaf.json"
        if done.returncode or not log.exists():
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise JobError(f"ffmpeg could not compute VMAF of {generated.path}: {reason}")
        return [frame["metrics"]["vmaf"] for frame in json.loads(log.read_text())["frames"]]


def _as_videos(reference: Source, generated: Source, folder: Path) -> list[Path]:
    """Files for ffmpeg. Two of the same kind go as they are; otherwise both go as RGB, so that the
    way from RGB to luma is the same for both."""
    if (
        isinstance(reference, VideoSource)
        and isinstance(generated, VideoSource)
        and reference.pixels == generated.pixels
    ):
        return [reference.path.resolve(), generated.path.resolve()]
    files = [folder / "reference.mkv", folder / "generated.mkv"]
    for source, file in zip((reference, generated), files, strict=True):
        write_lossless(file, (batch.frames for batch in source.batches(8)), source.fps or FPS)
    return files
