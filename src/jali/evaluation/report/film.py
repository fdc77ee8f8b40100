"""Clips as a browser plays them: the file itself where it can be, encoded again where it cannot.

Every frame is decoded once, so that a damaged file is found here rather than in front of people.
"""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from jali.clips.clip import FPS, encode_mp4
from jali.clips.source import open_source, video_library
from jali.error import InputError

# What browsers decode, by the kind of file that may hold it.
PLAYED = {
    ".mp4": ("video/mp4", ("h264", "av1")),
    ".webm": ("video/webm", ("vp8", "vp9", "av1")),
}
_BATCH = 16


@dataclass(frozen=True, slots=True)
class Film:
    """An encoded clip, and the size and number of its frames as decoded."""

    data: bytes
    kind: str
    frames: int
    height: int
    width: int
    fps: float

    @property
    def uri(self) -> str:
        return f"data:{self.kind};base64,{base64.b64encode(self.data).decode()}"


def read_film(path: Path, fps: float | None = None) -> Film:
    """The clip at `path`, every frame of it decoded once. `fps` counts where the file is silent."""
    source = open_source(path)
    rate = source.fps or fps or FPS
    kind, count = _media_type(path), 0

    def frames() -> Iterator[Tensor]:
        nonlocal count
        for batch in source.batches(_BATCH):
            count += len(batch.frames)
            yield batch.frames

    if kind is None:
        data = encode_mp4(frames(), rate)
        return Film(data, "video/mp4", count, source.height, source.width, rate)
    deque(frames(), maxlen=0)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    return Film(data, kind, count, source.height, source.width, rate)


def _media_type(path: Path) -> str | None:
    """Of a file that browsers play as it is."""
    if path.suffix.lower() not in PLAYED:
        return None
    kind, codecs = PLAYED[path.suffix.lower()]
    with video_library().open(f"file:{path}") as container:
        context = container.streams.video[0].codec_context
        fits = context.codec.canonical_name in codecs and context.pix_fmt == "yuv420p"
        return kind if fits else None
