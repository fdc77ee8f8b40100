"""Calibrated block importance on disk: opened at once, read where it is needed."""

from __future__ import annotations

import hashlib
import os
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali.maskbook import quantization
from jali.maskbook.bits import plan_of
from jali.maskbook.container import BookError, Bytes, Container, read_container, replacing
from jali.maskbook.derive import keep_bits
from jali.maskbook.header import MEAN, Header, canonical, read_header
from jali.planning.budget import Budget, check_share
from jali.planning.plan import BlockPlan
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import BlockLayout, Blocks, block_layout

if TYPE_CHECKING:
    from jali.maskbook.replay import Replay

KIND = "jali-maskbook"


class MaskBook:
    """Which blocks every layer reads in every step, for one model, grid and number of steps.

    Opening checks the header, the shape of the file and its small tables; the bits and the
    importance of a step are checked against their checksums when they are first read.
    """

    def __init__(self, container: Container, header: Header, path: Path | None) -> None:
        self._container = container
        self.header = header
        self.path = path
        self._verified: set[tuple[str, int, int]] = set()
        self._derived: dict[float, tuple[Bytes, NDArray[np.float32]]] = {}
        self._replays: dict[torch.device, Replay] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> MaskBook:
        """A book by its file. A pickle, another format or a damaged file is refused in words."""
        container = read_container(path)
        if container.words.get("format") != KIND:
            raise BookError(
                f"{path} is a safetensors file, but not a book of jali (its format is "
                f"{container.words.get('format', 'not named')!r:.60})"
            )
        header = read_header(container.words.get("book", ""), str(path))
        wanted = {entry.name: entry for entry in header.tensors()}
        if dict(container.entries) != wanted:
            names = [n for n in {**wanted, **container.entries}
                     if wanted.get(n) != container.entries.get(n)]  # fmt: skip
            raise BookError(
                f"{path}: the tensors {', '.join(names)[:200]} are not as its header says"
            )
        if container.words.get("digest") != digest_of(container, header):
            raise BookError(f"{path} is damaged: its header or a table does not match its digest")
        return cls(container, header, Path(path))

    # What it holds

    @property
    def steps(self) -> int:
        return self.header.steps

    @property
    def layers(self) -> int:
        return self.header.layers

    @property
    def grid(self) -> TokenGrid:
        return self.header.grid

    @property
    def budgets(self) -> tuple[float, ...]:
        """The budgets that were asked at calibration."""
        return self.header.budgets

    @property
    def digest(self) -> str:
        """Of its header and tables, which hold the checksums of all the rest."""
        return str(self._container.words.get("digest", ""))

    @property
    def bytes(self) -> int:
        return len(self._container.mapped)

    def layout(self, device: torch.device | str = "cpu") -> BlockLayout:
        h = self.header
        return block_layout(h.grid, None, h.order, h.blocks, None, device)

    def branch_index(self, branch: str) -> int:
        """Where a guidance branch lies in the tensors."""
        if self.header.branches == (MEAN,):
            return 0
        if branch not in self.header.branches:
            raise ValueError(
                f"the book keeps the branches {', '.join(self.header.branches)} apart, and this "
                f"call is of branch {branch!r}; calibrate with branches='mean'"
            )
        return self.header.branches.index(branch)

    def importance(self, step: int, layer: int, branch: str = MEAN) -> Tensor:
        """The averaged importance of one layer in one step. fp32 [H, M, N] on the host."""
        self._need_importance("its importance cannot be read")
        self._check_place(step, layer)
        self._verify("importance", step, layer)
        at = self.branch_index(branch)
        codes = _tensor(self._container.tensor("importance")[step, layer, at])
        peaks = _tensor(self._container.tensor("peaks")[step, layer, at])
        return quantization.dequantize(codes, peaks)

    def bits(self, budget: float, step: int) -> Bytes:
        """The bits of a step, checked. uint8 [layers, branches, H, M, ⌈N / 8⌉], mapped."""
        if budget in self._derived:
            return self._derived[budget][0][step]
        name = f"bits.{self._index(budget)}"
        for layer in range(self.layers):
            self._verify(name, step, layer)
        found: Bytes = self._container.tensor(name)[step]
        return found

    def costs(self, budget: float) -> NDArray[np.float32]:
        """The achieved cost of every head. fp32 [steps, layers, branches, H]."""
        if budget in self._derived:
            return self._derived[budget][1]
        return np.asarray(self._container.tensor(f"costs.{self._index(budget)}"))

    def cost(self, budget: float) -> float:
        """The achieved cost, over everything."""
        return float(self.costs(budget).mean(dtype=np.float64))

    def plan(
        self, budget: float, step: int, layer: int, branch: str = MEAN,
        device: torch.device | str = "cpu",
    ) -> BlockPlan:  # fmt: skip
        """The plan of one layer in one step."""
        self._check_place(step, layer)
        self.derive(budget)
        chosen = _tensor(self.bits(budget, step)[layer, self.branch_index(branch)])
        return plan_of(chosen.to(device), self.layout(device))

    # What it can be turned into

    def derive(self, budget: float, device: torch.device | str = "cpu") -> None:
        """Make the bits of a budget ready: nothing to do for those asked at calibration, else they
        are made from the importance, once."""
        check_share("budget", budget)
        budget = float(budget)
        if budget in self.budgets or budget in self._derived:
            return
        asked = ", ".join(map(str, self.budgets))
        self._need_importance(f"a budget of {budget} cannot be derived; it has {asked}")
        h = self.header
        shape = (h.steps, h.layers, *h.slab[:3])
        bits = np.empty((*shape, -(-h.N // 8)), dtype=np.uint8)
        costs = np.empty((h.steps, h.layers, *h.slab[:2]), dtype=np.float32)
        layout = self.layout(device)
        for step in range(h.steps):
            for layer in range(h.layers):
                for at, branch in enumerate(h.branches):
                    scores = self.importance(step, layer, branch).to(device)
                    kept, cost = keep_bits(scores, layout, Budget(budget), h.sharpness)
                    bits[step, layer, at] = kept.cpu().numpy()
                    costs[step, layer, at] = cost.cpu().numpy()
        self._derived[budget] = bits, costs

    def resample(
        self,
        grid: TokenGrid | Sequence[int] | None = None,
        steps: int | Sequence[float] | None = None,
        *,
        blocks: Blocks | None = None,
        output: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
    ) -> MaskBook:
        """A book for another grid, another number of steps (or their noise levels), other blocks.

        Importance is re-binned over the tokens and interpolated along the noise level; see
        `jali.maskbook.resample`. Without `output` the new book has no name and goes when closed.
        """
        from jali.maskbook.resample import resample

        return resample(self, grid, steps, blocks, output, device)

    def merge(
        self,
        other: MaskBook,
        *,
        output: str | os.PathLike[str] | None = None,
        device: torch.device | str = "cpu",
    ) -> MaskBook:
        """One book of the prompts of both, each weighing the same."""
        from jali.maskbook.merge import merge

        return merge(self, other, output, device)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Copy the file, all of it or nothing."""
        with replacing(path) as file:
            file.write(self._container.mapped.data)
        return Path(path)

    def verify(self) -> None:
        """Read everything and check it against its checksums; a damaged place is named."""
        h = self.header
        for step in range(h.steps):
            for layer in range(h.layers):
                for name in h.checked:
                    self._verify(name, step, layer)

    def replay(self, device: torch.device) -> Replay:
        """The bits of the current step on a device, and the next ones on their way."""
        from jali.maskbook.replay import Replay

        if str(device) == "cuda":  # the current one, by its number as tensors have it
            device = torch.device("cuda", torch.cuda.current_device())
        if device not in self._replays:
            self._replays[device] = Replay(self, device)
        return self._replays[device]

    def close(self) -> None:
        """Give up what was prepared on devices. The book stays readable."""
        while self._replays:
            self._replays.popitem()[1].close()

    def __repr__(self) -> str:
        h = self.header
        return (
            f"<MaskBook {h.model or ''} {h.grid}, {h.steps} steps × {h.layers} layers × "
            f"{h.heads} heads, blocks {h.blocks}, budgets {', '.join(map(str, h.budgets))}>"
        )

    # Checks

    def _index(self, budget: float) -> int:
        if budget not in self.budgets:
            raise KeyError(f"budget {budget} is not derived yet; call derive({budget}) first")
        return self.budgets.index(budget)

    def _check_place(self, step: int, layer: int) -> None:
        if not 0 <= step < self.steps or not 0 <= layer < self.layers:
            raise IndexError(
                f"step {step}, layer {layer} of a book of {self.steps} steps and {self.layers} "
                f"layers"
            )

    def _need_importance(self, then: str) -> None:
        if not self.header.importance:
            raise ValueError(
                f"{self.path or 'this book'} was made without importance, so {then}. Calibrate "
                f"again without --no-importance (it makes the file about eight times larger)"
            )

    def _verify(self, name: str, step: int, layer: int) -> None:
        """Check one layer of one step, once."""
        key = (name, step, layer)
        if key in self._verified:
            return
        parts = [self._container.tensor(name)[step, layer]]
        if name == "importance":
            parts.append(self._container.tensor("peaks")[step, layer])
        wanted = int(self._container.tensor("checks")[self.header.checked.index(name), step, layer])
        if checksum(*parts) != wanted:
            raise BookError(
                f"{self.path or 'this book'} is damaged: the {name.split('.')[0]} of step {step}, "
                f"layer {layer} do not match their checksum; copy the file again, or calibrate anew"
            )
        # A checksum only finds accidents. These two hold for every book, whoever made it.
        if name == "importance":
            peaks = parts[1]
            if not np.isfinite(peaks).all() or (peaks < 0).any():
                raise BookError(
                    f"{self.path}: importance of step {step}, layer {layer} is no share"
                )
        else:
            bits = parts[0]
            if (bits == 0).all(-1).any():
                raise BookError(
                    f"{self.path}: step {step}, layer {layer} has a row without a block"
                )
            spare = 8 * bits.shape[-1] - self.header.N
            if spare and (bits[..., -1] >> (8 - spare)).any():
                raise BookError(f"{self.path}: step {step}, layer {layer} reads behind the keys")
        self._verified.add(key)


def checksum(*parts: NDArray[Any]) -> int:
    """CRC-32 over arrays, one behind the other."""
    value = 0
    for part in parts:
        value = zlib.crc32(np.ascontiguousarray(part).reshape(-1).view(np.uint8).data, value)
    return value


def digest_of(container: Container, header: Header) -> str:
    """SHA-256 over the header, the places of the tensors, and the small tables."""
    tables = [f"costs.{i}" for i in range(len(header.budgets))] + ["checks"]
    if "filler" in container.entries:
        tables.append("filler")
    places = {name: entry.plain() for name, entry in container.entries.items()}
    return digest(header, places, [container.tensor(name) for name in tables])


def digest(header: Header, places: Any, tables: list[NDArray[Any]]) -> str:
    found = hashlib.sha256(header.text().encode())
    found.update(canonical(places).encode())
    for table in tables:
        found.update(np.ascontiguousarray(table).tobytes())
    return found.hexdigest()


def _tensor(array: NDArray[Any]) -> Tensor:
    """A copy in ordinary memory: the mapped file must not be written to."""
    return torch.from_numpy(np.array(array))
