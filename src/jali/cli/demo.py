"""`jali demo`: the tensor-level path, every method side by side."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer

if TYPE_CHECKING:
    from jali.demo import Comparison, Scene
    from jali.plan import BlockPlan

FULL = (10, 24, 40)
QUICK = (6, 20, 40)


def demo(
    budget: Annotated[
        float, typer.Option(help="Share of dense attention's work to ask for, above 0 up to 1.")
    ] = 0.25,
    seed: Annotated[int, typer.Option(help="Decides the made-up tensors.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="Half the tokens, timed once.")] = False,
    output_dir: Annotated[
        Path, typer.Option(help="Where pictures, table.json and index.html go.")
    ] = Path("outputs/demo"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the table as JSON, and nothing else.")
    ] = False,
) -> None:
    """Compare every method with dense attention on one made-up layer of a video model."""
    from jali.demo import compare, make_scene

    if not 0 < budget <= 1:
        _refuse(f"--budget must be above 0 and at most 1, got {budget}")
    if seed < 0:
        _refuse(f"--seed must be at least 0, got {seed}")
    try:
        output_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _refuse(f"--output-dir {output_dir} cannot be made: {error.strerror}")
    scene = make_scene(QUICK if quick else FULL, seed=seed)
    if not as_json:
        _say(f"{scene.grid} = {scene.grid.tokens:,} tokens, heads: {', '.join(scene.kinds)}")
    found = compare(scene, budget, repeats=1 if quick else 3)
    table = _facts(scene, found, budget, seed)
    (output_dir / "table.json").write_text(json.dumps(table, indent=2) + "\n")
    drawn = _draw(output_dir, scene, found)
    if as_json:
        typer.echo(json.dumps(table, indent=2))
        return
    _print_table(found)
    _say(found.plans["entropy"].show(head=0, width=56))
    if drawn:
        _say(f"Open {output_dir / 'index.html'}; beside it: {', '.join(drawn)}")
    else:
        _say(f"Written: {output_dir / 'table.json'} (pictures need pip install 'jali[report]')")


def _refuse(sentence: str) -> NoReturn:
    typer.echo(f"jali: {sentence}", err=True)
    raise typer.Exit(2)


def _say(text: str) -> None:
    from rich.console import Console

    Console().print(text, highlight=False, markup=False)


def _print_table(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table

    from jali.demo.page import CONTROLS, HEADINGS, cells

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


def _facts(scene: Scene, found: Comparison, budget: float, seed: int) -> dict[str, Any]:
    """Everything the table says, and what it was measured on."""
    import torch

    from jali import __version__

    return {
        "jali": __version__,
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "grid": str(scene.grid),
        "tokens": scene.grid.tokens,
        "heads": list(scene.kinds),
        "head_dim": scene.q.shape[-1],
        "budget": budget,
        "seed": seed,
        "dense_seconds": found.dense_seconds,
        "rows": [dataclasses.asdict(row) for row in found.rows],
    }


def _draw(folder: Path, scene: Scene, found: Comparison) -> list[str]:
    """The pictures and the page; nothing where matplotlib is not installed."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return []
    from jali.demo import page, picture

    names = [*_plan_pictures(folder, found.plans), "heads.png", "footprint.png"]
    maps = picture.maps_figure(found.plans, scene.kinds)
    (folder / "heads.png").write_bytes(page.png(maps))
    pyramid = found.plans["psa"]
    middle = pyramid.layout.M // 2
    seen = picture.heads_figure(pyramid, range(len(scene.kinds)), scene.kinds, middle)
    (folder / "footprint.png").write_bytes(page.png(seen))
    captions = {
        "What every head keeps, by method: darker is read more finely": maps,
        "What one query block reads under psa, on the frames (its own tokens outlined)": seen,
    }
    (folder / "index.html").write_text(page.render(scene, found, captions), encoding="utf-8")
    return ["table.json", *names]


def _plan_pictures(folder: Path, plans: dict[str, BlockPlan]) -> list[str]:
    names = []
    for method, plan in plans.items():
        names.append(f"plan-{method}.png")
        plan.figure().savefig(folder / names[-1], dpi=110, bbox_inches="tight")
    return names
