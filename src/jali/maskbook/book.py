"""Calibrated block importance on disk: opened at once, read where it is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from jali import files
from jali.maskbook.bits import keep_bits, plan_of, width
from jali.maskbook.container import (
    BookError,
    Bytes,
    Container,
    FilePath,
    book_digest,
    checksum,
    open_container,
)
from jali.maskbook.header import MEAN, Header, read_header
from jali.maskbook.quantization import dequantize
from jali.planning.budget import Budget
from jali.planning.plan import BlockPlan
from jali.planning.site import Site
from jali.tokens.grid import TokenGrid
from jali.tokens.layout import BlockLayout, Blocks, block_layout
from jali.value import check_share

if TYPE_CHECKING:
    from jali.maskbook.replay import Replay
    from jali.methods.method import Query
    from jali.planning.tradeoff import Sum

KIND = "jali-maskbook"
Floats = NDArray[np.float32]


class MaskBook:
    """Which blocks every layer reads in every step, for one model, grid and number of steps.

    `jali.calibrate` makes one, `MaskBook.open` reads one, `jali.cached_processor_mode` replays one.
    (One of rd is an `ErrorBook`: it holds errors instead of choices, and serves any budget and
    number of steps.) Opening checks the header, the shape of the file and its small tables; the
    bits and the importance of a step are checked against their checksums when first read.

    Attributes:
        header: everything it says of itself: model, grid, blocks, noise levels, prompts, costs.
        path: its file; None for a book without a name.

    Example:
        >>> book = MaskBook.open("wan.safetensors")  # doctest: +SKIP
        >>> book.cost(0.5), book.plan(0.5, step=3, layer=7).cost  # doctest: +SKIP
        (0.4998, 0.4711)
    """

    def __init__(
        self, container: Container, header: Header, tables: dict[str, Any], path: Path | None
    ) -> None:
        self.header = header
        self.path = path
        self._container = container
        self._tables = tables
        self._verified: set[tuple[str, int, int]] = set()
        self._derived: dict[tuple[float, int], tuple[Bytes, Floats]] = {}  # by budget and step
        self._costs: dict[float, Floats] = {}
        self._replays: dict[torch.device, Replay] = {}

    @classmethod
    def open(cls, path: FilePath) -> MaskBook:
        """A book by its file, in milliseconds whatever its size.

        Raises:
            FileNotFoundError: there is no file.
            BookError: it is a pickle, another format, or damaged; the sentence says which.
        """
        path = Path(path)
        container = open_container(path)
        metadata, found = container.metadata, container.tensors
        if metadata.get("format") != KIND:
            raise BookError(
                f"{path} is a safetensors file, but not a book of jali (its format is "
                f"{metadata.get('format', 'not named')!r:.60})"
            )
        text = metadata.get("book", "")
        header = read_header(text, str(path))
        wanted = header.tensors()
        if found != wanted:
            name = next(n for n in {**wanted, **found} if wanted.get(n) != found.get(n))
            raise BookError(
                f"{path}: tensor {name!r:.60} is {found.get(name, 'missing')!s:.120}, and not as "
                f"its header says: {wanted.get(name, 'missing')}"
            )
        tables = {name: container.read(name) for name in header.tables}
        if metadata.get("digest") != book_digest(text, wanted, tables.values()):
            raise BookError(f"{path} is damaged: its header or a table does not match its digest")
        for name, table in tables.items():  # a digest finds accidents, not forgeries
            if name.startswith("costs.") and not ((table >= 0) & (table < 1.001)).all():
                raise BookError(f"{path}: {name} holds costs that are not shares in 0..1")
            if name == "tops" and not ((table >= -127) & (table <= 127)).all():
                raise BookError(f"{path}: tops holds errors that are no finite numbers")
        if header.errors is not None:
            from jali.maskbook.error_book import ErrorBook

            return ErrorBook(container, header, tables, path)
        return MaskBook(container, header, tables, path)

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
    def derives(self) -> bool:
        """Whether it can be replayed at any budget, not only at those asked at calibration."""
        return self.header.importance

    @property
    def fits_any_steps(self) -> bool:
        """Whether a run may have another number of steps than the calibration."""
        return False

    @property
    def ratios(self) -> tuple[int, ...]:
        """Those that its plans may contain."""
        return (1,)

    @property
    def digest(self) -> str:
        """Of its header and tables, which hold the checksums of all the rest."""
        return self._container.metadata["digest"]

    @property
    def bytes(self) -> int:
        """The size of its file."""
        return len(self._container.raw)

    def layout(self, device: torch.device | str = "cpu") -> BlockLayout:
        """How its grid is cut into blocks."""
        h = self.header
        return block_layout(h.grid, None, h.order, h.blocks, None, device)

    def branch_index(self, branch: str) -> int:
        """Where a guidance branch lies in the tensors; ValueError where it is not kept apart."""
        if self.header.branches == (MEAN,):
            return 0
        if branch not in self.header.branches:
            raise ValueError(
                f"the book keeps the branches {', '.join(self.header.branches)} apart, and this "
                f"call is of branch {branch!r}; calibrate with branches='mean'"
            )
        return self.header.branches.index(branch)

    def importance(self, step: int, layer: int, branch: str = MEAN) -> Tensor:
        """The averaged importance of one layer in one step. fp32 [H, M, N] on the host.

        Raises:
            IndexError: the book has no such step or layer.
            ValueError: it was made without importance, or does not keep this branch apart.
            BookError: the file is damaged there.
        """
        return self.importance_slab(step, layer)[self.branch_index(branch)]

    def slab(self, step: int, layer: int) -> Tensor:
        """The means that the book was made of. fp32 [branches, H, M, N] on the host."""
        return self.importance_slab(step, layer)

    def importance_slab(self, step: int, layer: int) -> Tensor:
        """The importance of all branches. fp32 [branches, H, M, N] on the host."""
        self.need_importance("its importance cannot be read")
        self._check_place(step, layer)
        codes, peaks = (
            torch.from_numpy(np.array(x)) for x in self._read("importance", step, layer)
        )
        return dequantize(codes, peaks)

    def bits(self, budget: float, step: int) -> Bytes:
        """The bits of a step, checked. uint8 [layers, branches, H, M, ⌈N / 8⌉], mapped."""
        if (budget, step) in self._derived:
            return self._derived[budget, step][0]
        name = f"bits.{self._index(budget)}"
        self._check_place(step, 0)
        for layer in range(self.layers):
            self._read(name, step, layer)
        return self._container.read(name, step)

    def costs(self, budget: float) -> Floats:
        """The achieved cost of every head. fp32 [steps, layers, branches, H]."""
        if budget not in self.budgets:
            return np.stack([self.step_costs(budget, step) for step in range(self.steps)])
        if budget not in self._costs:
            found: Floats = self._tables[f"costs.{self._index(budget)}"]
            h = self.header
            short = h.grid.tokens % h.blocks.q or h.grid.tokens % h.blocks.k
            if short and not np.allclose(self._count(budget, 0, 0), found[0, 0], atol=1e-5):
                # A book of a version that counted a short last block as a whole one.
                found = np.empty_like(found)
                for step, layer in np.ndindex(found.shape[:2]):
                    found[step, layer] = self._count(budget, step, layer)
            self._costs[budget] = found
        return self._costs[budget]

    def step_costs(self, budget: float, step: int) -> Floats:
        """The same of one step. fp32 [layers, branches, H]."""
        if (budget, step) in self._derived:
            return self._derived[budget, step][1]
        self._index(budget)
        return np.asarray(self.costs(budget)[step])

    def _count(self, budget: float, step: int, layer: int) -> Floats:
        """What the bits of a layer in one step cost. fp32 [branches, H]."""
        self._check_place(step, layer)
        (bits,) = self._read(f"bits.{self._index(budget)}", step, layer)
        kept = np.unpackbits(bits, axis=-1, count=self.header.N, bitorder="little")
        layout = self.layout()
        read = kept @ layout.block_sizes.numpy() @ layout.row_sizes.numpy()
        return np.asarray(read / layout.q.tokens**2, dtype=np.float32)

    def cost(self, budget: float) -> float:
        """The achieved cost, over everything."""
        return float(self.costs(budget).mean(dtype=np.float64))

    def plan(
        self, budget: float, step: int, layer: int, branch: str = MEAN,
        device: torch.device | str = "cpu",
    ) -> BlockPlan:  # fmt: skip
        """The plan of one layer in one step. A budget that is not ready is derived first."""
        self._check_place(step, layer)
        self.derive(budget)
        chosen = np.array(self.bits(budget, step)[layer, self.branch_index(branch)])
        return plan_of(torch.from_numpy(chosen).to(device), self.layout(device))

    def replayed(
        self,
        query: Query,
        budget: float,
        heads: slice | Tensor,
        sum_over_ranks: Sum | None = None,  # noqa: ARG002
    ) -> BlockPlan:
        """The plan of a call that the book fits, for some of its heads."""
        site, device = query.site, query.q.device
        self.derive(budget, device, (site.step,))
        branch = self.branch_index(site.branch)
        bits = self.replay(device).bits(budget, site.step, site.layer, branch)
        return plan_of(bits[heads], query.layout)

    def period(self, site: Site) -> int:
        """Which steps share what is kept: each has its own bits."""
        return site.step

    def get_ready(self, asked: Sequence[tuple[int, int, float]], device: torch.device) -> None:
        """Derive what a run will ask for (step, layer and budget of its sparse calls) and the book
        does not hold, and send for its first step."""
        for budget, step in dict.fromkeys((budget, step) for step, _, budget in asked):
            self.derive(budget, device, (step,))
        # Of layers with budgets of their own the first one's: the others are fetched as they come.
        first = {step: (budget, step) for step, _, budget in reversed(asked)}
        self.replay(device).expect([first[step] for step in sorted(first)])

    # What it can be turned into

    def derive(
        self,
        budget: float,
        device: torch.device | str = "cpu",
        steps: Iterable[int] | None = None,
    ) -> None:
        """Make the bits of a budget ready: nothing to do for those asked at calibration, else they
        are made from the importance on `device`, once, and kept in memory; of all steps, or of
        some.

        Raises ValueError where the book was made without importance or `budget` is no share.
        """
        check_share("budget", budget)
        budget = float(budget)
        places = range(self.steps) if steps is None else steps
        places = [step for step in places if (budget, step) not in self._derived]
        if budget in self.budgets or not places:
            return
        ready = ", ".join(map(str, self.budgets))
        self.need_importance(f"a budget of {budget} cannot be derived; it has {ready}")
        h, layout = self.header, self.layout(device)
        for step in places:
            bits = np.empty((h.layers, *h.slab[:3], width(h.N)), dtype=np.uint8)
            costs = np.empty((h.layers, *h.slab[:2]), dtype=np.float32)
            for layer in range(h.layers):
                for at, scores in enumerate(self.importance_slab(step, layer).to(device)):
                    kept, cost = keep_bits(scores, layout, Budget(budget), h.sharpness)
                    bits[layer, at], costs[layer, at] = kept.cpu().numpy(), cost.cpu().numpy()
            self._derived[budget, step] = bits, costs

    def resample(
        self,
        grid: TokenGrid | Sequence[int] | None = None,
        steps: int | Sequence[float] | None = None,
        *,
        blocks: Blocks | None = None,
        output: FilePath | None = None,
        device: torch.device | str = "cpu",
    ) -> MaskBook:
        """A book for another grid, another number of steps (or their noise levels), other blocks.

        Importance is re-binned over the tokens and interpolated along the noise level; see
        `jali.maskbook.resample`. Without `output` the new book has no name and goes when closed.

        Raises ValueError where nothing is asked for, the book was made without importance, or the
        grid has other segments.

        Example:
            >>> book.resample((21, 45, 80), steps=20, output="new.safetensors")  # doctest: +SKIP
        """
        from jali.maskbook.resample import resample

        return resample(self, grid, steps, blocks, output, device)

    def merge(
        self, other: MaskBook, *, output: FilePath | None = None,
        device: torch.device | str = "cpu",
    ) -> MaskBook:  # fmt: skip
        """One book of the prompts of both, each weighing the same.

        Raises ValueError for books of two models, layouts or schedules, naming both values; for a
        prompt that is in both; and for a book without importance.
        """
        from jali.maskbook.merge import merge

        return merge(self, other, output, device)

    def save(self, path: FilePath) -> Path:
        """Copy the file, all of it or nothing. Returns the path."""
        path = Path(path)
        files.make_folder(path.parent)
        with files.whole_file(path) as temporary:
            temporary.write_bytes(self._container.raw.data)
        return path

    def verify(self) -> None:
        """Read everything and check it against its checksums; BookError names a damaged place."""
        for step, layer in np.ndindex(self.header.outer):
            for name in self.header.checked:
                self._read(name, step, layer)

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

    def need_importance(self, then: str) -> None:
        """Refuse what only importance makes possible, where it was left out."""
        if not self.header.importance:
            raise ValueError(
                f"{self._name} was made without importance, so {then}. Calibrate again without "
                f"--no-importance (it makes the file about eight times larger)"
            )

    def __repr__(self) -> str:
        h = self.header
        return (
            f"<MaskBook {h.model or ''} {h.grid}, {h.steps} steps × {h.layers} layers × "
            f"{h.heads} heads, blocks {h.blocks}, budgets {', '.join(map(str, h.budgets))}>"
        )

    # Checks

    @property
    def _name(self) -> str:
        return str(self.path or "this book")

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

    def _read(self, name: str, step: int, layer: int) -> list[NDArray[Any]]:
        """The parts of a tensor for one layer in one step, checked the first time."""
        names = ("importance", "peaks") if name == "importance" else (name,)
        parts = [self._container.read(part, step, layer) for part in names]
        if (name, step, layer) in self._verified:
            return parts
        place = f"{'step' if self.header.errors is None else 'part'} {step}, layer {layer}"
        if checksum(*parts) != self._tables["checks"][self.header.checked.index(name), step, layer]:
            raise BookError(
                f"{self._name} is damaged: the {name.split('.')[0]} of {place} do not match their "
                f"checksum; copy the file again, or calibrate anew"
            )
        self._check_numbers(name, parts, place)
        self._verified.add((name, step, layer))
        return parts

    def _check_numbers(self, name: str, parts: list[NDArray[Any]], place: str) -> None:
        """A checksum only finds accidents. These hold for every book, whoever made it."""
        used = self.header.N % 8  # bits of a row's last byte; 0 where all are
        if name == "importance":
            if not np.isfinite(parts[1]).all() or (parts[1] < 0).any():
                raise BookError(f"{self._name}: importance of {place} is no share")
        elif (parts[0] == 0).all(-1).any():
            raise BookError(f"{self._name}: {place} has a row without a block")
        elif used and (parts[0][..., -1] >> used).any():
            raise BookError(f"{self._name}: {place} reads behind the keys")
