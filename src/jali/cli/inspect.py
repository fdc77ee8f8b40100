"""`jali inspect`: which method suits a model, from its own q and k."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import input_errors, job_errors
from jali.cli.options import MACHINE, SIZES, Json, with_settings
from jali.generation.settings import Settings

if TYPE_CHECKING:
    from jali.evaluation.inspection import JudgedCall

EXAMPLES = (
    "jali inspect --model nano",
    "jali inspect --model wan-t2v-1.3b --cost 0.3 --at-layers 3,15,27 --at-steps 10,25",
    "jali inspect --model nano --methods entropy,psa,random --json",
)
TABLE, PICTURE = "inspection.json", "inspection.png"


@with_settings("model", *SIZES, "arguments", "lora", *MACHINE)
def inspect(
    settings: Settings,
    cost: Annotated[
        float, typer.Option(help="Share of dense attention's work that every method may do.")
    ] = 0.25,
    methods: Annotated[str, typer.Option(help="Comma-separated.", show_default="all of them")] = "",
    at_layers: Annotated[
        str, typer.Option(help="Comma-separated.", show_default="three over the depth")
    ] = "",
    at_steps: Annotated[str, typer.Option(help="Comma-separated.", show_default="the middle")] = "",
    prompt: Annotated[
        str | None, typer.Option(help="What is generated.", show_default="the first shipped one")
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="Where table and picture go.", show_default=False)
    ] = None,
    as_json: Json = False,
) -> None:
    """Show which method suits a model: what each keeps of its attention at equal cost."""
    from jali.cli.generate import chosen_prompts
    from jali.evaluation.inspection import capture, judge
    from jali.generation.produce import check_sizes, load
    from jali.methods import METHODS, near

    with input_errors():
        if not 0 < cost < 1:
            raise ValueError(f"--cost must be above 0 and below 1, got {cost}")
        names = [name.strip() for name in methods.split(",") if name.strip()]
        for name in names:
            if name not in METHODS or name == "dense":
                known = [known for known in METHODS if known != "dense"]
                raise ValueError(f"unknown method {name!r}{near(name, known)}")
        layers, at = _numbers(at_layers, "--at-layers"), _numbers(at_steps, "--at-steps")
        settings = replace(settings, method="dense").resolve()
        text = chosen_prompts(settings.model, None if prompt is None else [prompt], None, 1)[0]
        folder = output_dir or Path("outputs") / f"inspect-{settings.model}"
        if folder.exists() and not folder.is_dir():
            raise ValueError(f"--output-dir {folder} is a file")
    from rich.console import Console

    from jali.cli.quiet import quiet_libraries

    quiet_libraries()
    with job_errors(), Console(stderr=True).status("loading", spinner="line") as status:
        pipe = load(settings)
        check_sizes(pipe, settings)
        status.update("generating, densely")
        captures = capture(pipe, settings, text, layers, at)
        found = []
        for judged in judge(captures, cost, names):
            found.append(judged)
            status.update(f"{len(found)} of {len(captures)} calls judged")
        told = _facts(found, settings, text)
        files = _write(folder, told, found, settings)
    if as_json:
        typer.echo(json.dumps(told, ensure_ascii=False))
    else:
        _show(found, folder, files)


def _numbers(given: str, flag: str) -> list[int] | None:
    try:
        found = [int(part) for part in given.split(",") if part.strip()]
    except ValueError:
        raise ValueError(f"{flag} are whole numbers, comma-separated, got {given!r}") from None
    return found or None


def _facts(found: list[JudgedCall], settings: Settings, prompt: str) -> dict[str, Any]:
    from jali.evaluation.inspection import ranking
    from jali.generation.machine import machine, versions

    return {
        "kind": "jali-inspection",
        "version": 1,
        "settings": settings.to_dict(),
        "prompt": prompt,
        "cost": found[0].cost,
        "machine": machine(str(settings.device)),
        "versions": versions(),
        "ranking": [{"method": m, "error": e, "mass": p} for m, e, p in ranking(found)],
        "calls": [
            {
                "layer": judged.capture.site.layer,
                "step": judged.capture.site.step,
                "branch": judged.capture.site.branch,
                "grid": str(judged.capture.grid),
                "tokens": judged.capture.grid.tokens,
                "reach": judged.spread,
                "bound": judged.bound,
                "methods": [asdict(score) for score in judged.scores],
            }
            for judged in found
        ],
    }


def _write(
    folder: Path, told: dict[str, Any], found: list[JudgedCall], settings: Settings
) -> list[str]:
    """The table always; the picture where matplotlib is installed."""
    from jali.generation.manifest import replaced

    folder.mkdir(parents=True, exist_ok=True)
    with replaced(folder / TABLE) as temporary:
        temporary.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        typer.echo("jali: no picture without matplotlib: pip install 'jali[report]'", err=True)
        return [TABLE]
    from jali.evaluation.inspection.picture import figure

    with replaced(folder / PICTURE) as temporary:
        figure(found, settings.model).savefig(temporary, format="png", dpi=150)
    return [TABLE, PICTURE]


def _show(found: list[JudgedCall], folder: Path, files: list[str]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from jali.evaluation.inspection import ranking
    from jali.evaluation.inspection.judge import CONTROLS, too_costly

    console = Console()
    order, dear = [name for name, _, _ in ranking(found)], too_costly(found)
    for judged in found:
        site, spread = judged.capture.site, sorted(judged.spread)
        table = Table(
            title=f"layer {site.layer}, step {site.step}: heads look at {spread[0]:.0%} to "
            f"{spread[-1]:.0%} of the keys; no full blocks at cost {judged.cost:g} hold more than "
            f"{judged.bound:.1%}",
            title_justify="left",
            box=box.SIMPLE,
            padding=(0, 1, 0, 0),
        )
        table.add_column("", no_wrap=True)
        for heading in ("asked", "cost", "mass", "in full", "error", "worst head"):
            table.add_column(heading, justify="right", no_wrap=True)
        for score in sorted(judged.scores, key=lambda own: order.index(own.method)):
            table.add_row(
                score.method + (" (costs more)" if score.method in dear else ""),
                f"{score.budget:.3f}",
                f"{score.cost:.3f}",
                f"{score.mass:.1%}",
                f"{score.mass_full:.1%}",
                f"{score.error:.1%}",
                f"{max(error for _, _, error in score.heads):.1%}",
                style="dim" if score.method in CONTROLS or score.method in dear else "",
            )
        console.print(table)
    console.print(
        "mass: share of the exact attention in what it reads; error: ‖out − dense‖ / ‖dense‖, "
        "dense in fp32; dim: controls that look at nothing, and what cannot be had at this cost",
        style="dim", highlight=False,
    )  # fmt: skip
    real = [row for row in ranking(found) if row[0] not in CONTROLS and row[0] not in dear]
    if real:
        name, error, mass = real[0]
        console.print(
            f"nearest to dense here: {name}, error {error:.1%} with {mass:.0%} of the attention",
            highlight=False,
        )
    console.print(f"{folder}: {', '.join(files)}", highlight=False, markup=False)
