"""Clips on disk, read a few frames at a time: videos, folders of images, tensors.

Every kind of clip becomes the same thing: a size, and batches of uint8 frames in reading order. A
clip of any length therefore costs the memory of one batch.
"""

from __future__ import annotations

import contextlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from jali.clips.checksum import damaged
from jali.error import InputError

VIDEOS = (".mkv", ".avi", ".mov", ".mp4", ".m4v", ".webm", ".gif")
IMAGES = (".png", ".bmp", ".tif", ".tiff", ".webp", ".jpg", ".jpeg")
TENSORS = (".safetensors", ".npy", ".pt", ".pth")
KEYS = ("frames", "video", "videos")
# Codecs that give back every value, provided that they hold RGB: 4:2:0 has lost colour before.
_EXACT_CODECS = {"ffv1", "rawvideo", "utvideo", "huffyuv", "ffvhuff", "png", "bmp", "tiff"}
_RGB = {"rgb24", "bgr24", "gbrp", "bgr0", "rgb0", "0rgb", "0bgr", "rgba", "bgra", "argb", "abgr"}
# Values a little outside of 0..1 are rounding; values far outside are another scale.
_SLACK = 0.01


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive frames, uint8 [f, H, W, 3], and which of them held NaN or infinity, bool [f]."""

    frames: Tensor
    nonfinite: Tensor


class Source(ABC):
    """A clip that can be read from the start any number of times."""

    path: Path
    height: int
    width: int
    frames: int | None  # None where only decoding can tell
    fps: float | None  # None where the file does not say
    lossy: bool

    @abstractmethod
    def batches(self, size: int) -> Iterator[Batch]:
        """Every frame once, in order, at most `size` at a time."""


def open_source(path: str | Path) -> Source:
    """The clip at `path`: a video, an image, a folder of images, or a file with one tensor."""
    path = Path(path)
    if not path.exists():
        raise InputError(f"there is no clip at {path}")
    if path.is_dir():
        return ImageSource(path)
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty")
    kind = path.suffix.lower()
    for kinds, source in ((TENSORS, TensorSource), (VIDEOS, VideoSource), (IMAGES, ImageSource)):
        if kind in kinds:
            return source(path)
    raise InputError(
        f"{path} is no clip that can be read: videos ({', '.join(VIDEOS)}), images "
        f"({', '.join(IMAGES)}), folders of images and tensors ({', '.join(TENSORS)}) can"
    )


def images_in(folder: Path) -> list[Path]:
    """The images of a folder in the order of their numbers (frame2 before frame10)."""
    found = [p for p in folder.iterdir() if p.suffix.lower() in IMAGES and p.name[0] != "."]
    return sorted(found, key=lambda p: [_key(part) for part in re.split(r"(\d+)", p.stem)])


def _key(part: str) -> tuple[int, int, str]:
    return (0, int(part), "") if part.isdecimal() else (1, 0, part)


def video_library() -> ModuleType:
    """PyAV, or the sentence that says how to get it."""
    try:
        import av
    except ImportError:
        raise InputError(
            "reading and writing videos needs PyAV: pip install 'jali[quality]'"
        ) from None
    return av


@contextlib.contextmanager
def _decoding(path: Path, what: str) -> Iterator[ModuleType]:
    """PyAV; what it and the system object to is one sentence."""
    av = video_library()
    try:
        yield av
    except (av.error.FFmpegError, OSError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"{path} cannot be read as {what}: {reason}") from None


class VideoSource(Source):
    """A video file, decoded to RGB by PyAV. Anything the decoder objects to is an error."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as (container, stream):
            context = stream.codec_context
            self.height, self.width = context.height, context.width
            self.frames = stream.frames or None
            rate = stream.average_rate
            self.fps = float(rate) if rate else None
            # Where there is sound too, the length of the file may be the length of the sound.
            alone = len(container.streams) == 1 and path.suffix.lower() != ".gif"
            self._seconds = container.duration / 1e6 if alone and container.duration else None
            # What the decoder gives before it becomes RGB.
            self.pixels = (context.pix_fmt, context.colorspace, context.color_range)
            self.lossy = context.name not in _EXACT_CODECS or context.pix_fmt not in _RGB
            if not self.height or not self.width:
                raise InputError(f"{path} is damaged: its video has no size")

    @contextlib.contextmanager
    def _open(self) -> Iterator[tuple[Any, Any]]:
        # "file:" keeps a colon in a name from being read as the name of a protocol.
        with (
            _decoding(self.path, "a video") as av,
            av.open(f"file:{self.path}") as container,
        ):
            if not container.streams.video:
                raise InputError(f"{self.path} holds no video")
            stream = container.streams.video[0]
            stream.codec_context.options = {"err_detect": "explode"}
            yield container, stream

    def batches(self, size: int) -> Iterator[Batch]:
        gathered: list[Tensor] = []
        count, end = 0, 0.0
        with self._open() as (container, stream):
            for frame in self._decode(container, stream):
                if (frame.height, frame.width) != (self.height, self.width):
                    raise InputError(
                        f"{self.path} changes its size at frame {count}: {frame.width}×"
                        f"{frame.height} after {self.width}×{self.height}"
                    )
                if frame.is_corrupt:
                    raise InputError(f"{self.path} is damaged at frame {count}")
                gathered.append(torch.from_numpy(frame.to_ndarray(format="rgb24")))
                count += 1
                if frame.time is not None:
                    end = frame.time + float((frame.duration or 0) * (frame.time_base or 0))
                if len(gathered) == size:
                    yield _finite(gathered)
                    gathered = []
        self._check_end(count, end)
        if gathered:
            yield _finite(gathered)

    def _decode(self, container: Any, stream: Any) -> Iterator[Any]:
        checked = stream.codec_context.name == "ffv1"
        for packet in container.demux(stream):
            if checked and packet.size and damaged(bytes(packet)):
                raise InputError(f"{self.path} is damaged: a checksum in it is wrong")
            yield from packet.decode()

    def _check_end(self, count: int, end: float) -> None:
        """A file that was cut short decodes without a complaint, up to the cut."""
        if not count:
            raise InputError(f"{self.path} holds no frames")
        if self._seconds is None or self.fps is None or not end:
            return
        missing = (self._seconds - end) * self.fps
        if missing > 2:
            raise InputError(
                f"{self.path} is cut short: its header says {self._seconds:.2f} s, "
                f"but its frames end at {end:.2f} s"
            )


class ImageSource(Source):
    """A folder of images, one frame each; or a single image, a clip of one frame."""

    fps = None

    def __init__(self, path: Path) -> None:
        self.path = path
        self._files = images_in(path) if path.is_dir() else [path]
        if not self._files:
            raise InputError(f"the folder {path} holds no images ({', '.join(IMAGES)})")
        self.height, self.width = self._read(self._files[0]).shape[:2]
        self.frames = len(self._files)
        self.lossy = any(p.suffix.lower() in (".jpg", ".jpeg", ".webp") for p in self._files)

    def _read(self, file: Path) -> Tensor:
        # An opened file, since in a file's name "%d" would stand for a sequence of images.
        with (
            _decoding(file, "an image") as av,
            file.open("rb") as opened,
            av.open(opened) as container,
        ):
            frame = next(container.decode(video=0), None)
        if frame is None:
            raise InputError(f"{file} cannot be read as an image")
        return torch.from_numpy(frame.to_ndarray(format="rgb24"))

    def batches(self, size: int) -> Iterator[Batch]:
        for start in range(0, len(self._files), size):
            frames = []
            for file in self._files[start : start + size]:
                frame = self._read(file)
                if frame.shape[:2] != (self.height, self.width):
                    raise InputError(
                        f"{file} is {frame.shape[1]}×{frame.shape[0]}, but the images before it "
                        f"are {self.width}×{self.height}"
                    )
                frames.append(frame)
            yield _finite(frames)


class TensorSource(Source):
    """One tensor in a file, mapped rather than loaded: uint8, or floats in 0..1.

    Frames first or channels first; the axis of size 3 tells. A leading batch of one is dropped.
    """

    lossy = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self.fps, shape, self._take = _open_tensor(path)
        self._axes, self._lead = _find_axes(shape, path), len(shape) - 4
        self.frames, self.height, self.width = (shape[self._lead + a] for a in self._axes[:3])
        if not self.frames:
            raise InputError(f"{path} holds no frames")

    def batches(self, size: int) -> Iterator[Batch]:
        for start in range(0, self.frames or 0, size):
            window: list[Any] = [0] * self._lead + [slice(None)] * 4
            window[self._lead + self._axes[0]] = slice(start, start + size)
            yield self._to_batch(self._take(tuple(window)).permute(self._axes), start)

    def _to_batch(self, frames: Tensor, start: int) -> Batch:
        if frames.dtype == torch.uint8:
            return Batch(frames.contiguous(), torch.zeros(len(frames), dtype=torch.bool))
        if not frames.is_floating_point():
            raise InputError(
                f"{self.path} holds {str(frames.dtype).removeprefix('torch.')}; "
                "frames are uint8, or floats in 0..1"
            )
        values = frames.float()
        finite = values.isfinite()
        values = values.where(finite, 0.0)
        low, high = values.amin().item(), values.amax().item()
        if low < -_SLACK or high > 1 + _SLACK:
            raise InputError(
                f"{self.path} holds values from {low:.3g} to {high:.3g} near frame {start}; floats "
                "must lie in 0..1 (from -1..1 they get there by x / 2 + 0.5)"
            )
        return Batch(to_uint8(values), ~finite.flatten(1).all(1))


def to_uint8(frames: Tensor) -> Tensor:
    """Floats in 0..1 as uint8, rounded to the nearest level; what lies outside is clamped.

    >>> to_uint8(torch.tensor([0.0, 0.5, 1.0])).tolist()
    [0, 128, 255]
    """
    if not frames.is_floating_point():
        raise TypeError(f"to_uint8 takes floats in 0..1, got {frames.dtype}")
    return frames.float().clamp(0, 1).mul(255).round().to(torch.uint8)


def _finite(frames: list[Tensor]) -> Batch:
    return Batch(torch.stack(frames), torch.zeros(len(frames), dtype=torch.bool))


_Take = Callable[[tuple[Any, ...]], Tensor]


def _open_tensor(path: Path) -> tuple[float | None, tuple[int, ...], _Take]:
    """(frames per second if written down, shape, a function that reads a window)."""
    openers = {".safetensors": _open_safetensors, ".npy": _open_npy}
    try:
        return openers.get(path.suffix.lower(), _open_pt)(path)
    except InputError:
        raise
    except Exception as error:  # each library has errors of its own for a damaged file
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise InputError(f"{path} cannot be read as a tensor: {reason[:200]}") from None


def _open_safetensors(path: Path) -> tuple[float | None, tuple[int, ...], _Take]:
    from safetensors import safe_open

    file: Any = safe_open(path, framework="pt")
    window = file.get_slice(_key_of(list(file.keys()), path))
    written = (file.metadata() or {}).get("fps")
    return (float(written) if written else None), tuple(window.get_shape()), window.__getitem__


def _open_npy(path: Path) -> tuple[float | None, tuple[int, ...], _Take]:
    import numpy

    array = numpy.load(path, mmap_mode="r", allow_pickle=False)
    return None, array.shape, lambda window: torch.from_numpy(numpy.array(array[window]))


def _open_pt(path: Path) -> tuple[float | None, tuple[int, ...], _Take]:
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    fps = None
    if isinstance(loaded, dict):
        written = loaded.get("fps")
        fps = float(written) if isinstance(written, int | float) else None
        tensors = {key: value for key, value in loaded.items() if isinstance(value, Tensor)}
        loaded = tensors[_key_of(list(tensors), path)]
    if not isinstance(loaded, Tensor):
        raise InputError(f"{path} holds a {type(loaded).__name__} instead of a tensor of frames")
    return fps, tuple(loaded.shape), loaded.__getitem__


def _key_of(keys: list[str], path: Path) -> str:
    if len(keys) == 1:
        return keys[0]
    named = [key for key in KEYS if key in keys]
    if len(named) != 1:
        raise InputError(
            f"{path} must hold one tensor, or one of the name {', '.join(KEYS)}; "
            f"it holds {', '.join(sorted(map(str, keys))[:8]) or 'none'}"
        )
    return named[0]


def _find_axes(shape: tuple[int, ...], path: Path) -> tuple[int, ...]:
    """Which of the last four axes are frames, height, width and channels."""
    told = f"{path} has shape {list(shape)}"
    if len(shape) not in (4, 5) or (len(shape) == 5 and shape[0] != 1):
        raise InputError(f"{told}; a clip has shape [frames, H, W, 3]")
    by_channel = {3: (0, 1, 2, 3), 1: (0, 2, 3, 1), 0: (1, 2, 3, 0)}
    found = [axis for axis in by_channel if shape[-4:][axis] == 3]
    if not found:
        raise InputError(
            f"{told} without an axis of three channels; a clip has shape [frames, H, W, 3]"
        )
    if found == [1, 0]:
        raise InputError(
            f"{told}, whose channels could be either of two axes; save it as [frames, H, W, 3]"
        )
    return by_channel[found[0]]
