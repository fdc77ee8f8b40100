"""Quality per total work, on nano: methods and schedules at equal achieved totals.

    python -m benchmarks.nano_quality --output benchmarks/results/quality-totals.json
    python -m benchmarks.nano_quality --output FILE "rd:samples=8 exponential .4,.3 12"

Every row is a run of the same prompts and noise as the dense run of as many steps, and PSNR, SSIM
and LPIPS of its frames against that. The total is the share of *all* self-attention work, dense
steps and layers included; what is asked is corrected until that is what was done. Rows are written
as they are made, and those that the file has are not made again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import jali
from benchmarks.row_spec import CACHED, RowSpec, make, read_plan, read_rows
from jali import load_pipeline, make_method, sparse_processor_mode
from jali.error import InputError
from jali.evaluation.arena.match import matched
from jali.evaluation.arena.score import Scorer
from jali.evaluation.quality.perceptual import Perceptual
from jali.files import check_place, digest, file_digest, read_json, write_json
from jali.integration.stats import CallSums
from jali.maskbook import MaskBook
from jali.maskbook.cached import Cached
from jali.maskbook.mode import check_model, get_ready
from jali.methods import Method
from jali.nano import folder
from training.autoencoder import decode_whole
from training.evidence import ASPECTS, COUNTS, WORLDS, scores

START = time.monotonic()
WORLD = "second"  # the one that the shipped weights were shown
METHODS = (
    "rd", "entropy", "entropy:tail=True", "psa", "ada_bsa", "rf_v2", "random", "local",
)  # fmt: skip
SCHEDULES = ("exponential", "esa", "linear")
TOTALS = (0.4, 0.54, 0.3, 0.5, 0.2, 0.6)
STEPS = (12, 30)
DECODED = 4  # clips at once
SAME = ("device", "dtype", "weights", "world", "size", "guidance", "prompts")


def say(*words: object) -> None:
    print(*words, flush=True)


@dataclass(frozen=True, slots=True)
class Made:
    """Clips of one run, as latents, and what it took."""

    latents: Tensor
    seconds: float
    peak: int | None  # bytes of the device
    sums: CallSums
    backends: tuple[str, ...]

    @property
    def cost(self) -> float:
        return self.sums.done / self.sums.work if self.sums.work else 1.0

    @property
    def planning(self) -> float:
        return self.sums.planned / self.sums.work if self.sums.work else 0.0


@dataclass(frozen=True, slots=True)
class Studio:
    """nano on a device: latents for the prompts, and frames for latents."""

    pipe: Any
    sentences: tuple[str, ...]
    size: dict[str, int]
    guidance: float
    batch: int
    device: str

    @property
    def layers(self) -> int:
        return len(self.pipe.transformer.blocks)

    def make(self, steps: int, method: Method | None = None) -> Made:
        """All prompts, each with its own noise; densely by diffusers without a method."""
        latents, sums, backends, seconds = [], CallSums(), set(), 0.0
        if self.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        with contextlib.ExitStack() as stack:
            run = None
            if method is not None:
                run = stack.enter_context(sparse_processor_mode(self.pipe, method=method))
            for first in range(0, len(self.sentences), self.batch):
                start = self._now()
                latents.append(self._some(first, steps))
                seconds += self._now() - start
                if run is not None:
                    stats = run.stats()
                    sums += stats.sums
                    backends |= {row.backend for row in stats.rows if row.reason is None}
        peak = torch.cuda.max_memory_allocated() if self.device == "cuda" else None
        return Made(torch.cat(latents), seconds, peak, sums, tuple(sorted(backends)))

    def _some(self, first: int, steps: int) -> Tensor:
        some = list(self.sentences[first : first + self.batch])
        dice = [torch.Generator("cpu").manual_seed(first + i) for i in range(len(some))]
        out = self.pipe(
            some, **self.size, num_inference_steps=steps, generator=dice,
            guidance_scale=self.guidance, output_type="latent",
        )  # fmt: skip
        return out.frames

    def _now(self) -> float:
        if self.device == "cuda":
            torch.cuda.synchronize()
        return time.monotonic()

    @torch.no_grad()
    def frames(self, latents: Tensor) -> Tensor:
        """uint8 [n, F, H, W, 3], on the device."""
        vae = self.pipe.vae
        mean, std = (
            torch.tensor(values, device=latents.device).view(1, -1, 1, 1, 1)
            for values in (vae.config.latents_mean, vae.config.latents_std)
        )
        clips = [
            decode_whole(vae, (some * std + mean).to(vae.dtype)).float().clamp(-1, 1)
            for some in latents.float().split(DECODED)
        ]
        video = torch.cat(clips) * 0.5 + 0.5
        return (video.permute(0, 2, 3, 4, 1) * 255).round().byte()

    @property
    def tokens(self) -> int:
        """Of one clip."""
        patch, config = self.pipe.transformer.config.patch_size, self.pipe
        frames = (self.size["num_frames"] - 1) // config.vae_scale_factor_temporal + 1
        high, wide = (self.size[x] // config.vae_scale_factor_spatial for x in ("height", "width"))
        return int(frames // patch[0] * (high // patch[1]) * (wide // patch[2]))


@dataclass(frozen=True, slots=True)
class Metrics:
    """Clips against those of the dense run, and what they show; all where the clips lie."""

    sentences: tuple[str, ...]
    network: Perceptual | None

    def compare(self, sparse: Tensor, dense: Tensor) -> dict[str, Any]:
        """Means over clips, with every clip's own values. Frames [n, F, H, W, 3]."""
        clips = Scorer(self.network).compare(sparse, dense)
        means = {name: statistics.fmean(values) for name, values in clips.items()}
        return means | {"judge": self.judge(sparse), "clips": clips}

    def judge(self, clips: Tensor) -> dict[str, float]:
        """The shares of clips that show what was asked for."""
        found = scores(self.sentences, list(clips))
        return {name: found[name] for name in (*ASPECTS, *COUNTS)}


def at_total(
    studio: Studio, spec: RowSpec, method: Method
) -> tuple[Made, list[tuple[float, float]]]:
    """The run of a row nearest to its total, and what was asked and achieved."""

    def make(ask: float) -> Made:
        spread = spec.spread(method, ask, studio.layers)
        if isinstance(method, Cached):  # before the clock runs
            get_ready(method.book, spread, torch.device(studio.device))
        return studio.make(spec.steps, spread)

    return matched(spec.total, make)


class Benchmark:
    """A file of results, and the rows that are added to it."""

    def __init__(self, output: Path, studio: Studio, metrics: Metrics, about: dict[str, Any]):
        self.output, self.studio, self.metrics = output, studio, metrics
        self.result = about | {"dense": {}, "rows": []}
        if output.exists():
            self.result = read_json(output)
            check_same(output, self.result, about)
        self.result |= {"date": about["date"], "machine": about["machine"]}
        self._dense: dict[int, Tensor] = {}

    def has(self, spec: RowSpec) -> bool:
        return self._place(spec) is not None

    def _place(self, spec: RowSpec) -> int | None:
        rows = enumerate(self.result["rows"])
        return next((i for i, row in rows if spec.key.items() <= row.items()), None)

    def keep(self, spec: RowSpec, row: dict[str, Any]) -> None:
        place = self._place(spec)
        if place is None:
            self.result["rows"].append(row)
        else:
            self.result["rows"][place] = row
        self.write()

    def write(self) -> None:
        write_json(self.output, self.result, sort_keys=False)

    def dense(self, steps: int) -> Tensor:
        """Frames of the dense run, by diffusers alone."""
        if steps not in self._dense:
            made = self.studio.make(steps)
            frames = self._dense[steps] = self.studio.frames(made.latents)
            known = self.result["dense"].get(str(steps))
            if known is None:
                # Dense by other kernels differs by what they round: no method can come nearer.
                never = sparse_processor_mode(
                    self.studio.pipe, method=make_method("entropy"), warmup_frac=10**6
                )
                with never:
                    again = self.metrics.compare(
                        self.studio.frames(self.studio.make(steps).latents), frames
                    )
                known = {"seconds": made.seconds, "peak_bytes": made.peak}
                known |= {"judge": self.metrics.judge(frames), "by_jali": again}
            # The first run of a process loads and compiles.
            known["seconds"] = min(known["seconds"], made.seconds)
            self.result["dense"][str(steps)] = known
            self.write()
            say(f"dense, {steps} steps: {made.seconds:.1f} s", shown(known["judge"]))
        return self._dense[steps]

    def measure(self, spec: RowSpec, method: Method) -> dict[str, Any]:
        """One row: a run at the total, or why there is none."""
        row: dict[str, Any] = spec.key | {"code": self.result["machine"]["code"]}
        try:
            spec.spread(method, spec.total, self.studio.layers)
        except ValueError as error:
            return row | {"unreachable": str(error)}
        dense = self.dense(spec.steps)
        made, tries = at_total(self.studio, spec, method)
        start = time.monotonic()
        found = self.metrics.compare(self.studio.frames(made.latents), dense)
        return row | {
            "asked": tries[0][0], "achieved": made.cost, "planning": made.planning, "tries": tries,
            "seconds": made.seconds, "metric_seconds": time.monotonic() - start,
            "peak_bytes": made.peak, "backends": list(made.backends), **found,
        }  # fmt: skip


def shown(judged: dict[str, float]) -> str:
    return " ".join(f"{name} {share:.0%}" for name, share in judged.items())


def line(row: dict[str, Any]) -> str:
    """A row for the eye."""
    if "unreachable" in row:
        return f"unreachable: {row['unreachable']}"
    lpips = f" {row['lpips']:.4f}" if "lpips" in row else ""
    return (
        f"achieved {row['achieved']:.3f} (asked {row['asked']:.3f}, {len(row['tries'])} tries) "
        f"planning {row['planning']:.3f} {row['psnr']:.2f} dB {row['ssim']:.4f}{lpips} "
        f"{shown(row['judge'])}; {row['seconds']:.1f} s, metrics {row['metric_seconds']:.1f} s"
    )


def check_same(path: Path, there: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuse to add rows to a file of something else."""
    if not isinstance(there.get("rows"), list) or not isinstance(there.get("dense"), dict):
        raise InputError(f"{path} is no file of this benchmark: give another --output")
    for name in SAME:
        was, now = there.get(name), here[name]
        if was == now:
            continue
        if name == "prompts":
            was, now = f"{len(was or ())} of them", f"{len(now)}, or other ones"
        raise InputError(
            f"{path} was made with other {name}: {was} there, {now} here; give another --output"
        )


def machine(device: str) -> dict[str, Any]:
    import diffusers

    try:
        import triton

        compiler = triton.__version__
    except ImportError:
        compiler = None
    source = Path(jali.__file__).parent
    code = {str(f.relative_to(source)): file_digest(f) for f in sorted(source.rglob("*.py"))}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else platform.machine(),
        "jali": jali.__version__, "code": digest(code)[:12], "torch": torch.__version__,
        "triton": compiler, "diffusers": diffusers.__version__, "python": platform.python_version(),
    }  # fmt: skip


def weights_digest(path: Path) -> str:
    """Of all weights of a model folder, and of its noise levels."""
    files = sorted([*path.rglob("*.safetensors"), path / "scheduler" / "scheduler_config.json"])
    return digest({str(file.relative_to(path)): file_digest(file) for file in files})[:16]


def default_rows(book: Path | None) -> list[RowSpec]:
    methods = (*METHODS, CACHED) if book else METHODS
    order = itertools.product(STEPS, TOTALS, SCHEDULES, methods)
    return read_rows(f"{m} {s} {total} {steps}" for steps, total, s, m in order)


def opened(studio: Studio, path: Path, rows: Sequence[RowSpec]) -> MaskBook:
    """The book of the method `cached`, or why it is of another model or run."""
    book = MaskBook.open(path)
    check_model(book, {"transformer": studio.pipe.transformer})
    if not book.derives:
        raise InputError(f"{path} has no importance, from which the budgets of a curve are derived")
    for row in rows:
        if row.steps != book.steps and not book.fits_any_steps:
            raise InputError(
                f"{path} is a book of {book.steps} steps: it does not fit {str(row)!r}"
            )
    return book


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("rows", nargs="*", help="METHOD SCHEDULE TOTAL STEPS, see row_spec.py")
    made.add_argument("--from-file", type=Path, help="rows, one a line, in their order")
    made.add_argument("--output", type=Path, required=True)
    made.add_argument("--path", type=Path, help="another model folder than the shipped one")
    made.add_argument("--world", choices=WORLDS, default=WORLD, help="of the prompts")
    made.add_argument("--prompts", type=int, default=16)
    made.add_argument("--height", type=int, default=192)
    made.add_argument("--width", type=int, default=320)
    made.add_argument("--frames", type=int, default=37)
    made.add_argument("--guidance", type=float, default=4.0)
    made.add_argument("--batch", type=int, default=16, help="prompts at once")
    made.add_argument("--book", type=Path, help="of the method `cached`")
    made.add_argument("--rd-book", type=Path, help="of the method `cached:of=rd`")
    made.add_argument("--seconds", type=float, help="begin no row that would end later")
    made.add_argument("--again", action="store_true", help="make the rows that the file has anew")
    made.add_argument("--without-lpips", action="store_true", help="where its weights are missing")
    made.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    return made


def rows_of(asked: argparse.Namespace) -> list[RowSpec]:
    given = read_plan(asked.from_file) if asked.from_file else []
    given += read_rows(asked.rows)
    rows = list({str(row): row for row in given}.values()) or default_rows(asked.book)
    for row in rows:
        if row.name == CACHED and not (asked.rd_book if row.options else asked.book):
            raise InputError(
                f"{str(row)!r} replays a book: give {'--rd-book' if row.options else '--book'}"
            )
    return rows


def prepared(asked: argparse.Namespace) -> Benchmark:
    """Everything that may be refused, before anything slow."""
    for name in ("prompts", "batch", "height", "width", "frames"):
        if getattr(asked, name) < 1:
            raise InputError(f"--{name} must be above 0, got {getattr(asked, name)}")
    check_place(asked.output)
    sentences = WORLDS[asked.world].scene.prompts(asked.prompts)
    size = {"height": asked.height, "width": asked.width, "num_frames": asked.frames}
    dtype = torch.bfloat16 if asked.device == "cuda" else torch.float32
    about = {
        "machine": machine(asked.device), "date": time.strftime("%Y-%m-%d"),
        "dtype": str(dtype).removeprefix("torch."),
        "weights": weights_digest(asked.path or folder()), "world": asked.world, "size": size,
        "guidance": asked.guidance, "prompts": list(sentences), "batch": asked.batch,
    }  # fmt: skip
    about["device"] = about["machine"]["device"]
    if asked.output.exists():
        check_same(asked.output, read_json(asked.output), about)
    network = None if asked.without_lpips else Perceptual.load("alex", asked.device)
    pipe = load_pipeline("nano", path=asked.path, device=asked.device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    studio = Studio(pipe, sentences, size, asked.guidance, asked.batch, asked.device)
    about["tokens"] = studio.tokens
    return Benchmark(asked.output, studio, Metrics(sentences, network), about)


def in_time(rows: Sequence[RowSpec], seconds: float | None) -> Iterator[RowSpec]:
    """Rows, as long as one whose steps take as long as those of the last would end in time."""
    pace = 0.0  # seconds of a step
    for done, row in enumerate(rows):
        begun = time.monotonic()
        if seconds is not None and begun - START + pace * row.steps > seconds:
            say(f"{len(rows) - done} rows are left: {seconds:g} s are over, or would be")
            return
        yield row
        took = time.monotonic() - begun
        pace = took / row.steps if took > 0.1 else pace  # one that cannot be reached takes no time


def main(arguments: Sequence[str] | None = None) -> int:
    asked = parser().parse_args(arguments)
    try:
        rows = rows_of(asked)
        benchmark = prepared(asked)
        studio = benchmark.studio
        books = {
            name: opened(studio, path, replayed)
            for name, path in ((CACHED, asked.book), (f"{CACHED}:of='rd'", asked.rd_book))
            if (replayed := [row for row in rows if row.method == name])
        }
    except (ValueError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 2
    missing = [row for row in rows if asked.again or not benchmark.has(row)]
    say(f"{len(missing)} of {len(rows)} rows to make, {time.monotonic() - START:.0f} s to begin")
    failed = 0
    for number, spec in enumerate(in_time(missing, asked.seconds), 1):
        try:
            method = Cached(books[spec.method]) if spec.method in books else make(spec)
            row = benchmark.measure(spec, method)
        except Exception as error:  # the other rows do not depend on this one
            failed += 1
            sys.stderr.write(f"{spec}: {type(error).__name__}: {error}\n")
            continue
        benchmark.keep(spec, row)
        say(f"{number}/{len(missing)} {time.monotonic() - START:.0f} s  {spec}  {line(row)}")
    if failed:
        sys.stderr.write(f"{failed} rows failed and are not in {asked.output}\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
