"""Which clip belongs to which: two runs, two folders or two files, matched by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jali.clips.source import TENSORS, VIDEOS, images_in, open_source
from jali.error import InputError, shorten, show
from jali.files import path_inside, read_json

MANIFEST = "manifest.json"
# Where one name comes in several kinds, the kind that lost least counts.
BEST_FIRST = (*TENSORS, *VIDEOS, "")


@dataclass(frozen=True, slots=True)
class FoundClip:
    """A clip with a name. `frames` and `fps` are what a manifest says of it."""

    name: str
    path: Path
    frames: int | None = None
    fps: float | None = None

    def check_frames(self, count: int) -> None:
        """Refuse a file that has not as many frames as its manifest says."""
        if self.frames and self.frames != count:
            raise InputError(f"{self.path} has {count} frames, but its manifest says {self.frames}")


@dataclass(frozen=True, slots=True)
class Pairs:
    """Clips with a partner, in the order of the reference, and the names of those without."""

    reference: Path
    generated: Path
    matched: tuple[tuple[FoundClip, FoundClip], ...]
    only_reference: tuple[str, ...]
    only_generated: tuple[str, ...]

    def check_complete(self) -> None:
        """Refuse clips without a partner, naming some of them."""
        parts = [
            f"{len(names)} only in {where} ({', '.join(names[:3])}{', …' if names[3:] else ''})"
            for names, where in (
                (self.only_reference, self.reference),
                (self.only_generated, self.generated),
            )
            if names
        ]
        if parts:
            raise InputError(
                f"clips without a partner of the same name: {'; '.join(parts)} "
                "(--partial compares the others)"
            )


def match(reference: Path, generated: Path) -> Pairs:
    """Pair two sets of clips by name; two single clips pair whatever their names are."""
    left, right = find_clips(reference), find_clips(generated)
    if is_single(reference) and is_single(generated):
        return Pairs(reference, generated, ((left[0], right[0]),), (), ())
    partners = {entry.name: entry for entry in right}
    names = {entry.name for entry in left}
    return Pairs(
        reference,
        generated,
        tuple((entry, partners[entry.name]) for entry in left if entry.name in partners),
        tuple(entry.name for entry in left if entry.name not in partners),
        tuple(entry.name for entry in right if entry.name not in names),
    )


def is_single(path: Path) -> bool:
    """Whether a path is one clip by itself: a file, or a folder of images."""
    if path.is_dir():
        return not (path / MANIFEST).exists() and bool(images_in(path))
    return path.name != MANIFEST


def find_clips(path: Path) -> list[FoundClip]:
    """The clips of a run folder, of any folder, or the one clip that `path` is."""
    if not path.exists():
        raise InputError(f"{path} does not exist")
    if path.name == MANIFEST:
        path = path.parent
    if is_single(path):
        return [FoundClip(path.stem if path.is_file() else path.name, path)]
    if (path / MANIFEST).exists():
        return _of_manifest(path)
    return _of_folder(path)


def clip_files(folder: Path, kinds: Sequence[str]) -> dict[str, Path]:
    """The clips of a folder by name, each as the file whose ending comes first in `kinds`; an empty
    ending stands for a folder of images."""
    found: dict[str, tuple[int, Path]] = {}
    for child in sorted(folder.iterdir()):
        images = child.is_dir()
        kind = "" if images else child.suffix.lower()
        if child.name[0] == "." or kind not in kinds or (images and not images_in(child)):
            continue
        name, rank = child.name if images else child.stem, kinds.index(kind)
        if name not in found or rank < found[name][0]:
            found[name] = (rank, child)
    return {name: child for name, (_, child) in found.items()}


def _of_folder(folder: Path) -> list[FoundClip]:
    found = clip_files(folder, BEST_FIRST)
    if not found:
        runs = [child.name for child in sorted(folder.iterdir()) if (child / MANIFEST).exists()]
        hint = f"; it holds the runs {', '.join(runs)}: name one of them" if runs else ""
        raise InputError(f"the folder {folder} holds no clips{hint}")
    return [FoundClip(name, child) for name, child in found.items()]


def _of_manifest(folder: Path) -> list[FoundClip]:
    file = folder / MANIFEST
    manifest = read_json(file)
    if manifest.get("kind") != "jali-run":
        raise InputError(f'{file} is no manifest of a run: its "kind" is not "jali-run"')
    clips = manifest.get("clips")
    if not isinstance(clips, list) or not clips:
        raise InputError(f"the run {folder} has no clips yet")
    return [_of_clip(clip, folder) for clip in clips]


def _of_clip(clip: Any, folder: Path) -> FoundClip:
    if not isinstance(clip, dict) or not isinstance(clip.get("name"), str):
        raise InputError(f"{folder / MANIFEST} names a clip without a name: {show(clip)}")
    file = clip.get("lossless") or clip.get("video")
    if not isinstance(file, str):
        raise InputError(f"{folder / MANIFEST} names no file for the clip {shorten(clip['name'])}")
    try:
        path_inside(folder, clip["name"])  # it will name a file too
        path = path_inside(folder, file)
    except ValueError as error:
        raise InputError(f"{folder / MANIFEST} is damaged: {error}") from None
    if not path.exists():
        raise InputError(f"{folder / MANIFEST} names {file}, which is not there")
    frames, fps = clip.get("frames"), clip.get("fps")
    return FoundClip(
        clip["name"],
        path,
        frames if isinstance(frames, int) else None,
        float(fps) if isinstance(fps, int | float) and fps else None,
    )


def check_sizes(pairs: Iterable[tuple[FoundClip, FoundClip]]) -> None:
    """Open every file before anything is computed: a wrong size should not show after an hour."""
    for one, other in pairs:
        a, b = open_source(one.path), open_source(other.path)
        if (a.width, a.height) != (b.width, b.height):
            raise InputError(
                f"{one.name}: the clips differ in size, {a.width}×{a.height} ({one.path}) "
                f"and {b.width}×{b.height} ({other.path})"
            )
        for entry, source in ((one, a), (other, b)):
            if source.frames:
                entry.check_frames(source.frames)
        if a.frames and b.frames and a.frames != b.frames:
            raise lengths_differ(one, a.frames, other, b.frames)


def lengths_differ(one: FoundClip, frames: int, other: FoundClip, others: int) -> InputError:
    """The error of two clips that cannot be compared frame by frame."""
    return InputError(
        f"{one.name}: the clips differ in length, {frames} frames ({one.path}) "
        f"and {others} ({other.path})"
    )
