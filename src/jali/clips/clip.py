"""A clip in memory, and clips written to disk: mp4 for people, ffv1 for metrics."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali.clips.source import open_source, to_uint8, video_library
from jali.error import InputError
from jali.files import WriteError, whole_file

__all__ = ["Clip", "encode_mp4", "read_clip", "to_uint8", "write_lossless", "write_mp4"]

# Where neither the file nor the caller says.
FPS = 24.0
# H.273: the matrix, primaries and transfer curve of BT.709, and "limited range".
_BT709, _LIMITED = 1, 1


@dataclass(frozen=True, slots=True)
class Clip:
    """uint8 frames [F, H, W, 3]; `nonfinite` lists frames that held NaN or infinity (now 0)."""

    frames: Tensor
    fps: float
    nonfinite: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        _check_frames(self.frames)
        _check_fps(self.fps)


def read_clip(path: str | Path, fps: float = FPS) -> Clip:
    """The whole clip at `path`. `fps` counts where the file does not say."""
    source = open_source(path)
    batches = list(source.batches(16))
    nonfinite = torch.cat([batch.nonfinite for batch in batches])
    frames = torch.cat([batch.frames for batch in batches])
    return Clip(frames, source.fps or fps, tuple(nonfinite.nonzero().flatten().tolist()))


def write_mp4(path: str | Path, frames: Tensor | Iterable[Tensor], fps: float) -> None:
    """H.264 in 4:2:0, which every browser plays. Lossy: never compute metrics from it.

    `frames` is uint8 [F, H, W, 3], or batches of that. An odd side gets its last line twice, since
    4:2:0 has no odd sides.
    """
    _write(Path(path), frames, fps, _MP4)


def encode_mp4(frames: Tensor | Iterable[Tensor], fps: float) -> bytes:
    """An mp4 in memory, for pages that carry their films. The same frames give the same bytes."""
    _check_fps(fps)
    batches = [frames] if isinstance(frames, Tensor) else frames
    file = io.BytesIO()
    with video_library().open(file, "w", format=_MP4.container) as container:
        _encode(container, batches, fps, _REPEATABLE, Path("an mp4 in memory"))
    return file.getvalue()


def write_lossless(path: str | Path, frames: Tensor | Iterable[Tensor], fps: float) -> None:
    """FFV1 in 8-bit RGB, in Matroska: `read_clip` gives back exactly the same frames.

    `frames` is uint8 [F, H, W, 3], or batches of that.
    """
    _write(Path(path), frames, fps, _LOSSLESS)


@dataclass(frozen=True, slots=True)
class _Recipe:
    container: str
    codec: str
    pixels: str
    options: dict[str, str]
    for_people: bool


_MP4 = _Recipe("mp4", "libx264", "yuv420p", {"crf": "16", "preset": "medium"}, for_people=True)
# x264 weighs blocks by what later frames take from them; that differs between runs in some builds.
_REPEATABLE = replace(_MP4, options={**_MP4.options, "x264-params": "mbtree=0"})
_LOSSLESS = _Recipe(
    "matroska", "ffv1", "bgr0",
    {"level": "3", "slices": "4", "slicecrc": "1", "g": "1"}, for_people=False,
)  # fmt: skip


def _write(path: Path, frames: Tensor | Iterable[Tensor], fps: float, recipe: _Recipe) -> None:
    _check_fps(fps)
    av = video_library()
    batches = [frames] if isinstance(frames, Tensor) else frames
    flags = {"movflags": "+faststart"} if recipe.container == "mp4" else {}
    with whole_file(path) as temporary:
        try:
            target = f"file:{temporary}"
            with av.open(target, "w", format=recipe.container, options=flags) as container:
                _encode(container, batches, fps, recipe, path)
        except av.error.FFmpegError as error:  # the system's own errors are named by whole_file
            raise WriteError(f"{path} cannot be written: {error.strerror or error}") from None


def _encode(
    container: Any, batches: Iterable[Tensor], fps: float, recipe: _Recipe, path: Path
) -> None:
    av = video_library()
    stream: Any = None
    for batch in batches:
        _check_frames(batch)
        batch = _even(batch) if recipe.for_people else batch
        if stream is None:
            rate = Fraction(fps).limit_denominator(1001)
            stream = container.add_stream(recipe.codec, rate, options=recipe.options)
            stream.height, stream.width = batch.shape[1:3]
            stream.pix_fmt = recipe.pixels
            if recipe.for_people:  # players guess the matrix by the size of the picture otherwise
                context = stream.codec_context
                context.colorspace = context.color_primaries = context.color_trc = _BT709
                context.color_range = _LIMITED
        if (stream.height, stream.width) != tuple(batch.shape[1:3]):
            raise InputError(f"frames of {path} differ in size")
        for image in batch.cpu().numpy():
            frame = av.VideoFrame.from_ndarray(image, format="rgb24")
            if recipe.for_people:
                frame = frame.reformat(format=recipe.pixels, dst_colorspace=_BT709)
            container.mux(stream.encode(frame))
    if stream is None:
        raise InputError(f"there are no frames to write to {path}")
    container.mux(stream.encode(None))


def _even(frames: Tensor) -> Tensor:
    height, width = frames.shape[1:3]
    if height % 2:
        frames = torch.cat([frames, frames[:, -1:]], dim=1)
    if width % 2:
        frames = torch.cat([frames, frames[:, :, -1:]], dim=2)
    return frames


def _check_frames(frames: Tensor) -> None:
    if frames.dtype != torch.uint8 or frames.ndim != 4 or frames.shape[3] != 3:
        raise InputError(
            f"frames are uint8 [F, H, W, 3], got {str(frames.dtype).removeprefix('torch.')} "
            f"{list(frames.shape)} (to_uint8 turns floats in 0..1 into that)"
        )
    if 0 in frames.shape:
        raise InputError(f"a clip has at least one frame with pixels, got {list(frames.shape)}")


def _check_fps(fps: float) -> None:
    if not 0 < fps <= 1000:
        raise InputError(f"fps must be above 0 and at most 1000, got {fps}")
