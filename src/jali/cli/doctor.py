"""`jali doctor`: what this machine can do, why it cannot do the rest, and what to expect of it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.completion import words
from jali.cli.exits import fail, input_errors, job_errors
from jali.cli.options import Json
from jali.cli.output import make_table, print_json, progress_bar, say
from jali.cli.quiet import quiet_libraries
from jali.device import check_device

if TYPE_CHECKING:
    from rich.table import Table

EXAMPLES = ("jali doctor", "jali doctor --run", "jali doctor --device cpu --json")
HEAD_DIMS = (32, 64, 80, 96, 128, 192, 256)
BUDGETS = (0.5, 0.3)
TOKENS = 32_760  # for questions whose answer does not depend on it
PROOF: dict[str, Any] = {"budget": 0.3, "height": 128, "width": 128, "num_frames": 33, "steps": 6}


def doctor(
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda or cpu; cuda where there is one.", autocompletion=words("cuda", "cpu")
        ),
    ] = None,
    run: Annotated[
        bool, typer.Option("--run", help="Prove it: a short clip of nano, dense and sparse.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Say what runs here, why the rest does not, and how much faster each model would get."""
    with hush_warnings():
        with input_errors():
            if device is not None:
                check_device(device)
            found = diagnose(device)
        if not as_json:
            _show(found)
        if run:
            with job_errors():
                found["run"] = _prove(found["device"]["type"], quiet=as_json)
            if not as_json:
                _show_proof(found["run"])
        if as_json:
            print_json(found)
        if run and found["run"]["problem"]:
            fail(found["run"]["problem"])


@contextlib.contextmanager
def hush_warnings() -> Iterator[None]:
    """Warnings stay unsaid for a while: all of them are in the tables."""
    log = logging.getLogger("jali")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def diagnose(device: str | None = None) -> dict[str, Any]:
    """Everything the tables say."""
    import torch

    from jali import __version__
    from jali.generation.machine import machine, versions
    from jali.integration.models.checkpoint import choose_device, choose_dtype

    where = choose_device(device)
    dtype = choose_dtype(None, where)
    facts: dict[str, Any] = {"type": where.type, **machine(where.type)}
    if where.type == "cuda":
        properties = torch.cuda.get_device_properties(where)
        facts |= {
            "memory_gib": round(properties.total_memory / 2**30),
            "capability": f"{properties.major}.{properties.minor}",
            "cuda": torch.version.cuda,
        }
    return {
        "jali": __version__,
        "versions": versions(),
        "device": facts,
        "dtype": str(dtype).removeprefix("torch."),
        "backends": _backends(where, dtype),
        "models": _models(where, dtype),
    }


def _backends(device: Any, dtype: Any) -> list[dict[str, Any]]:
    """Every backend, fastest first: at which head dims it runs, and why not at all."""
    from jali.backends import BACKENDS, Task

    def why(backend: Any, dim: int, ratios: tuple[int, ...] = (1,)) -> list[str]:
        reasons: list[str] = backend.why_not(
            Task(device, dtype, dim, 12, 12, TOKENS, TOKENS, ratios)
        )
        return reasons

    rows = []
    for name, backend in BACKENDS.items():
        plain = [dim for dim in HEAD_DIMS if not why(backend, dim)]
        pooled = [dim for dim in HEAD_DIMS if not why(backend, dim, (1, 2, 4, 8))]
        reasons = [] if plain or pooled else why(backend, 128)
        rows.append(
            {
                "name": name,
                "runs": bool(plain or pooled),
                "head_dims": plain or pooled,
                "plans": "all" if plain and pooled else "full blocks" if plain else "pyramids",
                "why_not": reasons,
            }
        )
    return rows


def _models(device: Any, dtype: Any) -> list[dict[str, Any]]:
    """What a generation at each model's default size would gain, by the measured cost model."""
    from jali.backends import Task, choose
    from jali.integration.config import WARMUP
    from jali.integration.forecast import model_speedup
    from jali.integration.models.registry import MODELS

    rows = []
    for card in MODELS.values():
        tokens, layers = card.tokens, sum(card.layers)
        task = Task(device, dtype, card.head_dim, card.heads, card.heads, tokens, tokens)
        backend = choose("auto", task).name
        gains = {
            f"{budget:g}": model_speedup(
                heads=card.heads,
                head_dim=card.head_dim,
                tokens=tokens,
                batch=card.batch,
                cost=budget,
                sparse_share=(1 - WARMUP) * (layers - 1) / layers,
                layers=layers,
                weights=int(card.weights),
                device=device,
                backend=backend,
            )
            for budget in BUDGETS
        }
        rows.append(
            {
                "name": card.name,
                "size": [card.height, card.width, card.frames],
                "tokens": tokens,
                "heads": card.heads,
                "head_dim": card.head_dim,
                "backend": backend,
                "predicted_speedup": {k: v and round(v, 3) for k, v in gains.items()},
            }
        )
    return rows


# The proof


def _prove(device: str, quiet: bool) -> dict[str, Any]:
    """Nano, dense and sparse, in memory: times, cost, and whether the frames are frames."""
    import time

    from jali.generation import Settings
    from jali.generation.produce import attention, frames_of, load, warm_up
    from jali.generation.prompts import default_prompts
    from jali.generation.settings import dense_twin

    quiet_libraries()
    settings, steps = Settings("nano", device=device, **PROOF).resolve(), PROOF["steps"]
    prompt = default_prompts("nano")[0]
    found: dict[str, Any] = {
        "model": "nano",
        "prompt": prompt,
        "budget": PROOF["budget"],
        "problem": "",
    }
    pipe, frames = load(settings), {}
    runs = {"dense": dense_twin(settings), "sparse": settings}
    with progress_bar(quiet) as tell:
        tell("nano: warming up")
        warm_up(pipe, runs.values(), prompt)
        for number, (name, own) in enumerate(runs.items()):

            def on_step(step: int, number: int = number, name: str = name) -> None:
                tell(f"nano, {name}", number * steps + step, 2 * steps)

            with attention(pipe, own) as handle:
                start = time.perf_counter()
                frames[name] = frames_of(pipe, own, prompt, 0, on_step)
                found[f"{name}_seconds"] = round(time.perf_counter() - start, 3)
                stats = handle.stats()
            found[f"{name}_transformer_seconds"] = stats.seconds and round(stats.seconds, 3)
            found[f"{name}_cost"] = round(stats.cost, 4)
            found[f"{name}_summary"] = stats.line()
    dense, sparse = frames["dense"], frames["sparse"]
    if not (dense.isfinite().all() and sparse.isfinite().all()):
        found["problem"] = "nano's frames are not finite"
    elif float(dense.std()) < 1e-3 or float(sparse.std()) < 1e-3:
        found["problem"] = "nano's frames are all of one colour"
    elif found["sparse_cost"] >= 1:
        found["problem"] = "no attention call of nano was sparse"
    error = (dense - sparse).square().mean().clamp_min(1e-12)
    found["psnr"] = round(float(-10 * error.log10()), 2)
    return found


# For people


def _show(found: dict[str, Any]) -> None:
    from rich.console import Console

    console = Console()
    device, versions = found["device"], found["versions"]
    gpu = f", {device['memory_gib']} GiB, sm {device['capability']}" if "cuda" in device else ""
    console.print(f"[bold]{device['device']}[/]{gpu}, {device['threads']} threads", highlight=False)
    packages = [f"{name} {value or 'not installed'}" for name, value in versions.items()]
    say(f"jali {found['jali']}, " + ", ".join(packages), style="dim")
    console.print(_backend_table(found["backends"], found["dtype"]))
    console.print(_model_table(found["models"]))
    if not any(g for row in found["models"] for g in row["predicted_speedup"].values()):
        say("–: not measured on this device, so nothing is predicted", style="dim")


def _backend_table(backends: list[dict[str, Any]], dtype: str) -> Table:
    from rich.markup import escape

    def cells(row: dict[str, Any]) -> tuple[str, ...]:
        why_not = escape("; ".join(row["why_not"]))
        if not row["runs"]:
            return row["name"], "no", "", "", why_not
        dims = row["head_dims"]
        return row["name"], "yes", f"{dims[0]}–{dims[-1]}", row["plans"], why_not

    return make_table(
        ("", "runs", "head dims", "plans", "why not"),
        map(cells, backends),
        dim=lambda row: row[1] == "no",
        left=4,
        wrap_last=True,
        title=f"Backends, {dtype}",
    )


def _model_table(models: list[dict[str, Any]]) -> Table:
    return make_table(
        ("model", "size", "tokens", "backend", *(f"{budget:g}" for budget in BUDGETS)),
        [
            (
                row["name"],
                "×".join(map(str, row["size"])),
                f"{row['tokens']:,}",
                row["backend"],
                *(f"{gain:.2f}×" if gain else "–" for gain in row["predicted_speedup"].values()),
            )
            for row in models
        ],
        title="Speed-up of all transformer calls of a clip, forecast by the cost model, by budget",
        caption="predicted, not measured; at the default size; entropy, first fifth of the steps "
        "and layer 0 dense",
    )


def _show_proof(run: dict[str, Any]) -> None:
    say(f"nano, “{run['prompt']}”")
    for name in ("dense", "sparse"):
        say(f"  {name:7}{run[f'{name}_seconds']:7.2f} s a clip, {run[f'{name}_summary']}")
    say(f"  sparse against dense: PSNR {run['psnr']:.1f} dB")
