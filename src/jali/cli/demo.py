"""`jali demo`: one clip, dense and sparse, on the model that comes with the package."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.completion import methods
from jali.cli.exits import INTERRUPTED, input_errors, job_errors
from jali.cli.options import Json
from jali.cli.options import check_folder as check_no_file
from jali.cli.output import make_table, number, print_json, progress_bar, say

if TYPE_CHECKING:
    from rich.table import Table

    from jali.evaluation.demo import MethodComparison
    from jali.evaluation.report import Comparison
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
        typer.Option(help="One of {own_methods}.", show_default="rd", autocompletion=methods),
    ] = None,
    budget: Annotated[
        float | None,
        typer.Option(
            help="Asked share of dense attention's work, after dense first steps.",
            show_default="0.3 of all work, most of it early",
        ),
    ] = None,
    recipe: Annotated[
        Path | None, typer.Option(help="What `jali tune` found for nano.", show_default=False)
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Of denoising, 1 to 50.", show_default="8")
    ] = None,
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
    as_json: Json = False,
) -> None:
    """Generate a clip twice, dense and sparse, and show both: times, cost, films, a page."""
    # Threads that sleep while they wait leave a busy machine its cores; torch reads it once.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    model_only = {"--prompt": prompt, "--method": method, "--steps": steps, "--path": path}
    model_only["--recipe"] = recipe
    given = [flag for flag, value in model_only.items() if value is not None]
    try:
        with input_errors():
            from jali.generation.prompts import as_typed, check_prompt
            from jali.generation.settings import Settings

            if tensors and given:
                raise ValueError(f"{given[0]} is about the model, which --tensors does without")
            text = None if prompt is None else as_typed(prompt.strip())
            if text is not None:
                check_prompt(text, "--prompt")
            if method in ("dense", "cached"):
                why = "is compared with dense" if method == "dense" else "has no book here"
                raise ValueError(f"--method {why}, so it is another one, got {method!r}")
            if steps is not None and not 1 <= steps <= 50:
                raise ValueError(f"--steps must be 1 to 50, got {steps}")
            own: Any = {"method": method, "budget": budget, "steps": steps, "path": path}
            own["recipe"] = recipe
            Settings("nano", seed=seed, **own).check()  # whichever demo it will be
            check_no_file(output_dir)
            from jali.evaluation.demo import clips
            from jali.evaluation.demo.folder import check_folder

            text = text or clips.PROMPT
            check_folder(output_dir)
            reason = None if tensors else clips.why_not(None if path is None else str(path))
            settings = None
            if not tensors and reason is None:
                settings = clips.demo_settings(
                    quick, method, budget, steps, recipe, seed=seed, path=path
                )
        if settings is not None:
            _show_clips(settings, text, output_dir, as_json)
            return
        if reason is not None:
            lost = f", without {', '.join(given)}" if given else ""
            typer.echo(f"jali: {reason}; here is the demo on tensors instead{lost}", err=True)
        _show_tensors(budget, seed, quick, output_dir, as_json)
    except KeyboardInterrupt:  # a demo is all there or not at all: there is nothing to keep
        typer.echo("jali: interrupted; nothing was written", err=True)
        raise typer.Exit(INTERRUPTED) from None


# The model


def _show_clips(settings: Settings, prompt: str, folder: Path, as_json: bool) -> None:
    from jali.cli.quiet import quiet_libraries
    from jali.evaluation.demo import clips
    from jali.evaluation.demo.folder import replace_demo, write_facts
    from jali.evaluation.report import read_comparison

    quiet_libraries()
    for remark in (clips.unknown_words(prompt), _busy()):
        if remark:
            typer.echo(f"jali: {remark}", err=True)
    with job_errors(), replace_demo(folder) as part:
        with progress_bar(as_json, log=True) as tell:

            def on_step(run: str, tick: Tick) -> None:
                what = "decoding" if tick.step == tick.steps else f"{tick.steps} steps"
                done = tick.step + (0 if run == "dense" else tick.steps)
                tell(f"{run}: {what}", done, 2 * tick.steps)

            tell(f"loading {settings.model}")
            runs = clips.generate_both(settings, prompt, part, on_step)
            tell("measuring")
            found = read_comparison([run.folder for run in runs], metrics=clips.METRICS)
            tell("writing films and page")
            clips.write_files(part, runs, found)
        facts = write_facts(part, clips.facts_of(runs, found))
    if as_json:
        print_json(facts)
        return
    say(_clip_table(found, settings))
    films = [facts[run]["video"] for run in ("dense", "sparse")]
    say(f"beside it: {', '.join([clips.FILM, clips.STRIP, *films])}", style="dim")
    own = "jali tune --model nano --target-psnr 35 --output nano.yaml (or --speedup 1.5)"
    say(f"your own target: {own}", style="dim", soft_wrap=True)
    say(f"Open {folder / clips.PAGE}", soft_wrap=True)


def _busy() -> str | None:
    """Whether others keep the cores busy; a speed-up is then half luck."""
    if not hasattr(os, "getloadavg"):
        return None
    load, cores = os.getloadavg()[0], os.cpu_count() or 1
    if load <= cores / 2:
        return None
    return f"others use this machine (load {load:.1f} on {cores} cores): take the times with care"


def _clip_table(found: Comparison, settings: Settings) -> Table:
    from rich.markup import escape

    (clip,) = found.clips
    film = found.films[clip][0]
    dense, sparse = found.rows()

    def mean(value: Any, how: str) -> str:
        return number(value and value.mean, how)

    psnr = mean(sparse.metrics["psnr"], ".1f")
    columns = [
        ("", dense.name, settings.label),
        ("asked", "", number(settings.total or settings.budget, ".2f")),
        ("cost", "", mean(sparse.sparse_cost, ".3f")),
        ("in all", "", mean(sparse.cost, ".3f")),
        ("calls\ns", *(mean(row.seconds_transformer, ".1f") for row in (dense, sparse))),
        ("calls\n×", "", mean(sparse.speed_up_transformer, ".2f")),
        ("clip\ns", *(mean(row.seconds, ".1f") for row in (dense, sparse))),
        ("clip\n×", "", mean(sparse.speed_up, ".2f")),
        ("PSNR", "", "same" if psnr == "inf" else psnr),
        ("SSIM", "", mean(sparse.metrics["ssim"], ".3f")),
    ]
    headings, *rows = zip(*columns, strict=True)
    return make_table(
        headings,
        rows,
        title=f"“{escape(found.prompt(clip))}”, {film.width}×{film.height}×{film.frames}",
        caption="cost: share of dense attention's work, where sparse and in all; measured after a "
        "warm-up: all transformer calls, and the whole clip with text and decoder; × over dense",
    )


# Tensors


def _show_tensors(
    budget: float | None, seed: int, quick: bool, folder: Path, as_json: bool
) -> None:
    from jali.evaluation.demo import compare_methods, make_heads, tensors
    from jali.evaluation.demo.folder import replace_demo, write_facts

    with job_errors(), replace_demo(folder) as part:
        heads = make_heads(tensors.QUICK if quick else tensors.FULL, seed=seed)
        if not as_json:
            say(f"{heads.grid} = {heads.grid.tokens:,} tokens, heads: {', '.join(heads.kinds)}")
        share = tensors.BUDGET if budget is None else budget
        found = compare_methods(heads, share, repeats=1 if quick else 3)
        drawn = tensors.draw(part, found)
        facts = write_facts(part, {**found.to_dict(), "seed": seed})
    if as_json:
        print_json(facts, indent=2)
        return
    say(_method_table(found))
    say(found.plans["entropy"].show(head=0, width=56))
    if drawn:
        say(f"beside it: demo.json, {', '.join(drawn[1:])}\nOpen {folder / tensors.PAGE}")
    else:
        say(f"Written: {folder / 'demo.json'} (pictures need pip install 'jali[report]')")


def _method_table(found: MethodComparison) -> Table:
    from jali.evaluation.demo.tensors import HEADINGS
    from jali.name import CONTROLS

    return make_table(
        HEADINGS,
        [row.cells() for row in found.rows],
        dim=lambda row: row[0] in CONTROLS,
        title=f"dense attention on this machine: {found.dense_seconds * 1e3:,.0f} ms",
        caption="error = ‖out − dense‖ / ‖dense‖; dim rows are controls that look at nothing",
    )
