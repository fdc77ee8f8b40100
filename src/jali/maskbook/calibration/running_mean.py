"""A running mean on disk that survives being killed.

Each prompt writes a file of its own, `mean + (x − mean) / n`, slab by slab as its steps go by,
while the mean of the prompts before it stays untouched. When the prompt is over the new file is
made durable, and one small file that says which mean counts is replaced by renaming. So a kill at
any moment loses the prompt in progress and nothing else, and whoever goes on computes the same
numbers in the same order.
"""

from __future__ import annotations

import contextlib
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jali import files
from jali.maskbook.container import reserve

STATE = "state.json"
FORMAT = 1

Floats = NDArray[np.float32]


class RunningMean:
    """The mean of fp32 arrays [steps, layers, ...] over prompts, in a folder.

    `done` prompts are in it; `facts` are kept with it, among them its "shape".
    """

    def __init__(self, folder: Path, done: int, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.done = done
        self.facts = dict(facts)
        self._old: Floats | None = None
        self._new: Floats | None = None
        self._written = np.zeros(self.shape[:2], dtype=bool)

    @classmethod
    def load(cls, folder: Path) -> RunningMean | None:
        """What was committed last; None where nothing was."""
        state = folder / STATE
        if not state.is_file():
            return None
        try:
            plain = files.read_json(state)
            if plain["format"] != FORMAT:
                raise ValueError(f"format {plain['format']}")
            found = cls(folder, int(plain["done"]), plain["facts"])
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"{state} cannot be read ({error}); delete {folder} to start over"
            ) from None
        path = found._path(found.done)
        size = path.stat().st_size if path.is_file() else -1
        if size != found._size:
            raise ValueError(
                f"{path} has {size} bytes instead of {found._size}; delete {folder} to start over"
            )
        found._old = found._map(found.done, "r")
        return found

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.facts["shape"])

    def begin(self) -> None:
        """Start a prompt. What an interrupted one left behind goes."""
        self._remove_means(but=self.done)
        with self._path(self.done + 1).open("wb") as file:
            # Asked for at once: a mapped file on a full disk would kill the process later on.
            reserve(file, self._size)
        self._new = self._map(self.done + 1, "r+")
        self._written[:] = False

    def put(self, step: int, layer: int, x: Floats) -> None:
        """The importance of this prompt at one step and layer."""
        assert self._new is not None
        if self._old is None:
            self._new[step, layer] = x
        else:
            old = self._old[step, layer]
            self._new[step, layer] = old + (x - old) / np.float32(self.done + 1)
        self._written[step, layer] = True

    def missing(self) -> list[tuple[int, int]]:
        """(step, layer) of whatever was not recorded in this prompt."""
        return [(int(step), int(layer)) for step, layer in np.argwhere(~self._written)]

    def commit(self, facts: Mapping[str, Any] | None = None) -> None:
        """The prompt is over: from here on its mean counts."""
        assert isinstance(self._new, np.memmap)
        self._new.flush()
        with self._path(self.done + 1).open("rb") as file:
            os.fsync(file.fileno())
        self.facts.update(facts or {})
        plain = {"format": FORMAT, "done": self.done + 1, "facts": self.facts}
        files.write_json(self.folder / STATE, plain)
        self.done += 1
        self._old, self._new = self._map(self.done, "r"), None
        self._remove_means(but=self.done)

    def slab(self, step: int, layer: int) -> Floats:
        """The committed mean."""
        assert self._old is not None
        return np.array(self._old[step, layer])

    def remove(self) -> None:
        """The book is written: the folder goes, its state first. A folder without one is rubbish,
        which the next calibration sweeps away."""
        self._old = self._new = None
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.folder / STATE)
        shutil.rmtree(self.folder)

    def _path(self, number: int) -> Path:
        return self.folder / f"mean-{number}.f32"

    @property
    def _size(self) -> int:
        return 4 * math.prod(self.shape)

    def _map(self, number: int, mode: str) -> Floats:
        return np.memmap(self._path(number), np.float32, mode, shape=self.shape)  # type: ignore[call-overload]

    def _remove_means(self, but: int) -> None:
        for path in self.folder.glob("mean-*.f32"):
            if path != self._path(but):
                path.unlink()
