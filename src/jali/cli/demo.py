"""`jali demo`: one clip, dense and sparse, on the model that comes with the package."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import INTERRUPTED, input_errors, job_errors

if TYPE_CHECKING:
    from rich.table import Table

    from jali.evaluation.demo import Comparison
    from jali.evaluation.demo.outcome import Outcome
    from jali.generation import Settings, Tick

EXAMPLES = (
    "jali demo",
    'jali demo --prompt "a blue star spins over a white background" --quick',
    "jali demo --method psa --budget 0.2 --output-dir runs/psa",
    "jali demo --tensors --json > table.json",
)
FOLDER = Path("outputs/demo")


def demo(
    prompt: Annotated[
        str | None,
        typer.Option(help="What to show.", show_default="a red ball that moves"),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="A small clip: 2,304 tokens instead of 9,600.")
    ] = False,
    method: Annotated[
        str | None,
        typer.Option(help="entropy, psa, rf_v2, ada_bsa, random, local.", show_default="entropy"),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(help="Asked share of dense attention's work.", show_default="0.3"),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Of denoising.", show_default="8")] = None,
    seed: Annotated[int, typer.Option(help="Decides the noise that both start from.")] = 0,
    path: Annotated[
        Path | None, typer.Option(help="A folder with other weights of nano.", show_default=False)
    ] = None,
    tensors: Annotated[
        bool, typer.Option("--tensors", help="No model: every method on one made-up layer.")
    ] = False,
    output_dir: Annotated[
        Path, typer.Option(help="Where it goes; only an earlier demo is replaced.")
    ] = FOLDER,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as JSON, and nothing else.")
    ] = False,
) -> None:
    """Generate a clip twice, dense and sparse, and show both: times, cost, films, a page."""
    # Threads that sleep while they wait leave a busy machine its cores; torch reads it once.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    model_only = {"--prompt": prompt, "--method": method, "--steps": steps, "--path": path}
    given = [flag for flag, value in model_only.items() if value is not None]
    with _whole(), input_errors():
        from jali.evaluation.demo.clips import why_not
        from jali.evaluation.demo.folder import check

        if tensors and given:
            raise ValueError(f"{given[0]} is about the model, which --tensors does without")
        check(output_dir)
        reason = None if tensors else why_not(None if path is None else str(path))
    if reason is not None:
        lost = f", without {', '.join(given)}" if given else ""
        typer.echo(f"jali: {reason}; here is the demo on tensors instead{lost}", err=True)
    with _whole():
        if tensors or reason is not None:
            _tensors(budget, seed, quick, output_dir, as_json)
        else:
            with input_errors():
                settings, text = _asked(prompt, quick, method, budget, steps, seed, path)
            _model(settings, text, output_dir, as_json)


@contextlib.contextmanager
def _whole() -> Iterator[None]:
    """A demo is all there or not at all, so an interrupted one has nothing to keep."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("jali: interrupted; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None


# The model


def _asked(
    prompt: str | None,
    quick: bool,
    method: str | None,
    budget: float | None,
    steps: int | None,
    seed: int,
    path: Path | None,
) -> tuple[Settings, str]:
    from jali.evaluation.demo import clips as usual

    text = usual.PROMPT if prompt is None else prompt.strip()
    if not text:
        raise ValueError("--prompt is empty")
    settings = usual.settings_of(
        usual.QUICK if quick else usual.FULL,
        usual.METHOD if method is None else method,
        usual.BUDGET if budget is None else budget,
        usual.STEPS if steps is None else steps,
        seed,
        None if path is None else str(path),
    )
    return settings, text


def _model(settings: Settings, prompt: str, folder: Path, as_json: bool) -> None:
    from jali.cli.quiet import quiet_libraries
    from jali.evaluation.demo.clips import generate_both, unknown_words
    from jali.evaluation.demo.folder import staged, write_facts
    from jali.evaluation.demo.outcome import show

    quiet_libraries()
    unknown = unknown_words(prompt)
    if unknown:
        typer.echo(f"jali: {unknown}", err=True)
    busy = _busy()
    if busy:
        typer.echo(f"jali: {busy}", err=True)
    with job_errors(), staged(folder) as part:
        with _shown(as_json) as (follow, tell):
            tell(f"loading {settings.model}")
            dense, sparse = generate_both(settings, prompt, part, follow)
            outcome = show(dense, sparse, part, tell)
        facts = write_facts(part, outcome.to_dict())
    if as_json:
        typer.echo(json.dumps(facts, ensure_ascii=False))
    else:
        _report(outcome, folder)


def _busy() -> str | None:
    """Whether others keep the cores busy; a speed-up is then half luck."""
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores / 2:
        return None
    return f"others use this machine (load {load:.1f} on {cores} cores): take the times with care"


@contextlib.contextmanager
def _shown(
    quiet: bool,
) -> Iterator[tuple[Callable[[str, Tick], None], Callable[[str], None]]]:
    """On stderr: a bar that follows the steps of both runs, or in a log a line for every part."""
    if quiet:
        yield (lambda *_: None), (lambda _: None)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("", total=None)
        last = ""

        def tell(words: str, **where: Any) -> None:
            nonlocal last
            bar.update(task, description=words, **where)
            if not console.is_terminal and words != last:
                console.print(words, highlight=False, markup=False)
            last = words

        def follow(run: str, tick: Tick) -> None:
            done = tick.step if run == "dense" else tick.steps + tick.step
            words = f"{run}: step {min(tick.step + 1, tick.steps)} of {tick.steps}"
            if tick.step == tick.steps:
                words = f"{run}: decoding"
            elif not console.is_terminal:
                words = f"{run}: {tick.steps} steps"
            tell(words, total=2 * tick.steps, completed=done)

        yield follow, tell


def _report(outcome: Outcome, folder: Path) -> None:
    from rich.console import Console

    from jali.evaluation.demo.outcome import FILM, PAGE, STRIP

    console = Console()
    console.print(_table(outcome))
    films = [f"{run.folder.name}/{run.clips[0].video}" for run in (outcome.dense, outcome.sparse)]
    beside = ", ".join([FILM, STRIP, *films])
    console.print(f"beside it: {beside}", highlight=False, markup=False, style="dim")
    console.print(f"Open {folder / PAGE}", highlight=False, markup=False, soft_wrap=True)


def _table(outcome: Outcome) -> Table:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    clip = outcome.clips[1]
    table = Table(
        title=f"“{escape(clip.prompt)}”, {clip.width}×{clip.height}×{clip.frames}",
        title_justify="left",
        caption="cost: share of dense attention's work, where sparse and in all; whole: with text "
        "and decoder",
        caption_justify="left",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
    )
    table.add_column("", no_wrap=True)
    for heading in ("asked", "cost", "in all", "model s", "×", "whole s", "×", "PSNR", "SSIM"):
        table.add_column(heading, justify="right", no_wrap=True)
    dense, sparse = outcome.clips
    table.add_row("dense", "", "", "", _number(dense.seconds_transformer, ".1f"), "",
                  _number(dense.seconds, ".1f"), "", "", "")  # fmt: skip
    table.add_row(
        outcome.name,
        _number(sparse.budget, ".2f"),
        _number(sparse.sparse_cost, ".3f"),
        _number(sparse.cost, ".3f"),
        _number(sparse.seconds_transformer, ".1f"),
        _number(outcome.speed_up_transformer, ".2f"),
        _number(sparse.seconds, ".1f"),
        _number(outcome.speed_up, ".2f"),
        "same" if outcome.psnr is None else f"{outcome.psnr:.1f}",
        _number(outcome.ssim, ".3f"),
    )
    return table


def _number(value: float | None, how: str) -> str:
    return "" if value is None else format(value, how)


# Tensors


def _tensors(budget: float | None, seed: int, quick: bool, folder: Path, as_json: bool) -> None:
    from jali.evaluation.demo import compare, make_heads
    from jali.evaluation.demo import tensors as usual
    from jali.evaluation.demo.folder import staged, write_facts

    share = usual.BUDGET if budget is None else budget
    with input_errors():
        if not 0 < share <= 1:
            raise ValueError(f"budget must be above 0 and at most 1, got {share}")
        if seed < 0:
            raise ValueError(f"seed must be at least 0, got {seed}")
    with job_errors(), staged(folder) as part:
        heads = make_heads(usual.QUICK if quick else usual.FULL, seed=seed)
        if not as_json:
            _say(f"{heads.grid} = {heads.grid.tokens:,} tokens, heads: {', '.join(heads.kinds)}")
        found = compare(heads, share, repeats=1 if quick else 3)
        drawn = usual.draw(part, heads, found)
        facts = write_facts(part, usual.facts_of(heads, found, share, seed))
    if as_json:
        typer.echo(json.dumps(facts, indent=2))
        return
    _print_tensors(found)
    _say(found.plans["entropy"].show(head=0, width=56))
    if drawn:
        _say(f"beside it: demo.json, {', '.join(drawn[1:])}\nOpen {folder / usual.PAGE}")
    else:
        _say(f"Written: {folder / 'demo.json'} (pictures need pip install 'jali[report]')")


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(text, highlight=False, markup=False)


def _print_tensors(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    from jali.evaluation.demo.page import CONTROLS, HEADINGS, cells

    table = Table(
        title=f"dense attention on this machine: {found.dense_seconds * 1e3:,.0f} ms",
        title_justify="left",
        caption="error = ‖out − dense‖ / ‖dense‖; dim rows are controls that look at nothing",
        caption_justify="left",
    )
    for i, name in enumerate(HEADINGS):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in found.rows:
        table.add_row(*cells(row), style="dim" if row.method in CONTROLS else "")
    Console().print(table)
