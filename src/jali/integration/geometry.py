"""How the token grid of one transformer call follows from its arguments."""

from __future__ import annotations

import abc
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jali.tokens.grid import Box

Patch = tuple[int, int, int]


def patch_of(config: Any) -> Patch:
    """(frames, height, width) of a patch: one tuple, or `patch_size` with `patch_size_t`."""
    size = getattr(config, "patch_size", None) or 1
    if isinstance(size, Sequence):
        frames, height, width = size
        return frames, height, width
    return getattr(config, "patch_size_t", None) or 1, size, size


class Geometry(abc.ABC):
    """Reads the sizes of a call in two halves.

    `pick` takes plain numbers and tensors out of the arguments; it may run inside a compiled
    graph, so it looks at shapes only. `boxes` makes segments of them, outside of any graph.
    """

    @abc.abstractmethod
    def pick(self, given: Mapping[str, Any], patch: Patch) -> tuple[list[int], list[Tensor]]: ...

    def boxes(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Box, ...]:  # noqa: ARG002
        """Three numbers for every box."""
        return tuple(Box(*numbers[i : i + 3]) for i in range(0, len(numbers), 3))


@dataclass(frozen=True)
class LatentShape(Geometry):
    """`hidden_states` is the latent video itself; `axes` are its frames, height and width."""

    axes: tuple[int, int, int] = (2, 3, 4)

    def pick(self, given: Mapping[str, Any], patch: Patch) -> tuple[list[int], list[Tensor]]:
        shape = given["hidden_states"].shape
        return [shape[axis] // size for axis, size in zip(self.axes, patch, strict=True)], []


@dataclass(frozen=True)
class NamedSizes(Geometry):
    """The latent sizes are arguments of their own."""

    names: tuple[str, str, str] = ("num_frames", "height", "width")

    def pick(self, given: Mapping[str, Any], patch: Patch) -> tuple[list[int], list[Tensor]]:
        sizes = [given.get(name) for name in self.names]
        if any(size is None for size in sizes):
            return [], []
        return [size // by for size, by in zip(sizes, patch, strict=True)], []  # type: ignore[operator]


@dataclass(frozen=True)
class ImageIds(Geometry):
    """Every token says (image, row, column); a change of the first starts another image."""

    name: str = "img_ids"

    def pick(self, given: Mapping[str, Any], patch: Patch) -> tuple[list[int], list[Tensor]]:  # noqa: ARG002
        ids = given[self.name]
        return [], [ids if ids.dim() == 2 else ids[0]]

    def boxes(self, numbers: Sequence[int], tensors: Sequence[Tensor]) -> tuple[Box, ...]:  # noqa: ARG002
        ids = tensors[0].detach().cpu().long()
        starts = [0, *((ids[1:, 0] != ids[:-1, 0]).nonzero()[:, 0] + 1).tolist(), len(ids)]
        boxes = []
        for start, end in itertools.pairwise(starts):
            part = ids[start:end, 1:]
            height, width = (int(n) + 1 for n in (part.amax(0) - part.amin(0)))
            boxes.append(Box(1, height, width))
        return tuple(boxes)


@dataclass(frozen=True)
class ShapeList(Geometry):
    """A list of (frames, height, width) for the target and every reference, per sample."""

    name: str = "img_shapes"

    def pick(self, given: Mapping[str, Any], patch: Patch) -> tuple[list[int], list[Tensor]]:  # noqa: ARG002
        shapes = given[self.name]
        if not shapes:
            return [], []
        first = shapes[0]
        if isinstance(first[0], int):  # one sample, not nested
            return [n for shape in shapes for n in shape], []
        if any(other != first for other in shapes[1:]):
            return [], []  # samples of different geometry have no common grid
        return [n for shape in first for n in shape], []
