"""`jali book`: look into a MaskBook, and make others of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.exits import input_errors, job_errors, refuse
from jali.cli.options import Command, Json, check_file, read_budgets, read_list, with_settings
from jali.cli.output import print_json
from jali.files import PICKLES
from jali.generation.settings import Settings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from jali.maskbook import Header, MaskBook
    from jali.maskbook.header import Errors
    from jali.tokens.grid import TokenGrid

app = typer.Typer(
    no_args_is_help=True, help="Look into a MaskBook, resample it, merge two, import ESA's."
)

Book = Annotated[Path, typer.Argument(help="A .safetensors book.", show_default=False)]
Output = Annotated[Path, typer.Option(help="The new book.", show_default=False)]
SHADES = " ░▒▓█"
ROWS = 96  # of a picture in a terminal


@app.callback()
def book() -> None:
    """Look into a MaskBook, resample it, merge two, import ESA's."""


@app.command(
    "info",
    cls=Command,
    epilog="Examples:\n\njali book info wan.safetensors\n\njali book info wan.safetensors --verify",
)
def info(
    path: Book,
    verify: Annotated[
        bool, typer.Option("--verify", help="Read everything and check it too.")
    ] = False,
    as_json: Json = False,
) -> None:
    """What a book is for, how large it is, and what its budgets cost."""
    found = _open(path)
    if verify:
        with job_errors():
            found.verify()
    if as_json:
        print_json({**facts(found), "verified": verify})
        return
    print_facts(found)
    if verify:
        typer.echo("every checksum is right")


@app.command(
    "show",
    cls=Command,
    epilog="Examples:\n\njali book show wan.safetensors --budget 0.3\n\n"
    "jali book show wan.safetensors --layer 12 --output heads.png",
)
def show(
    path: Book,
    budget: Annotated[
        float | None, typer.Option(help="Which one; none: the middle one it holds.")
    ] = None,
    layer: Annotated[int | None, typer.Option(min=0, help="Only the heads of this layer.")] = None,
    output: Annotated[Path | None, typer.Option(help="Draw it to this file too.")] = None,
    as_json: Json = False,
) -> None:
    """Cost per layer and step, and a picture of heads over steps."""
    found = _open(path)
    with input_errors():
        if layer is not None and layer >= found.layers:
            refuse(f"--layer {layer} is not one of the book's {found.layers} layers")
        chosen = _budget(found) if budget is None else budget
        found.derive(chosen)
        costs = found.costs(chosen).mean(2)  # over branches: [steps, layers, H]
    if output is not None:
        with job_errors():
            _draw(found, chosen, costs, layer, output)
    if as_json:
        table = {
            "budget": chosen,
            "cost": found.cost(chosen),
            "layers_by_steps": costs.mean(2).T.round(6).tolist(),
            "heads_by_steps": _heads(costs, layer).round(6).tolist(),
        }
        print_json(table)
        return
    _show(found, chosen, costs, layer)
    if output is not None:
        typer.echo(f"drawn: {output}")


@app.command(
    "resample",
    cls=Command,
    epilog="Examples:\n\njali book resample wan.safetensors --steps 20 --output wan-20.safetensors"
    "\n\njali book resample wan.safetensors --grid 21x45x80 --output wan-720p.safetensors",
)
def resample(
    path: Book,
    output: Output,
    grid: Annotated[
        str | None, typer.Option(help="Latent frames x height x width in tokens, as 21x45x80.")
    ] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Another number of steps.")] = None,
    noise: Annotated[
        str | None, typer.Option(help="The noise level of every step, with commas.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Re-bin a book to another resolution, frame count or number of steps."""
    found = _open(path)
    with input_errors():
        if steps is not None and noise is not None:
            refuse("give --steps or --noise, not both: the levels say how many steps there are")
        target = None if grid is None else _grid(grid)
        levels = (
            steps if noise is None else read_list(noise, float, "--noise are numbers with commas")
        )
    with job_errors():
        made = found.resample(target, levels, output=output)
    report_book(made, as_json)


@app.command(
    "merge",
    cls=Command,
    epilog="Examples:\n\njali book merge a.safetensors b.safetensors --output both.safetensors",
)
def merge(path: Book, other: Book, output: Output, as_json: Json = False) -> None:
    """One book of the prompts of two."""
    found, second = _open(path), _open(other)
    with job_errors():
        made = found.merge(second, output=output)
    report_book(made, as_json)


@app.command(
    "import",
    cls=Command,
    epilog="Examples:\n\njali book import masks/wan-1.3b.pt --model wan-t2v-1.3b --output "
    "wan.safetensors\n\njali book import masks/wan-1.3b-720p.pt --model wan-t2v-1.3b --height 720 "
    "--width 1280 --output wan-720p.safetensors",
)
@with_settings("model", "height", "width", "num_frames", "path")
def import_(
    settings: Settings,
    old: Annotated[Path, typer.Argument(help="ESA's .pt file of masks.", show_default=False)],
    output: Output,
    budgets: Annotated[
        str, typer.Option(help="Ready-made budgets; others are derived when they are asked for.")
    ] = "0.7,0.5,0.3",
    q_block: Annotated[int, typer.Option(min=1, help="ESA's Q_BLOCK.")] = 256,
    k_block: Annotated[int, typer.Option(min=1, help="ESA's K_BLOCK.")] = 128,
    as_json: Json = False,
) -> None:
    """Make a book of ESA's masks: of the importance in them, read without running any code."""
    from jali.maskbook.esa import import_masks, read_importance
    from jali.maskbook.write import check_output

    with input_errors():
        check_file(output)
        check_output(output)
        ready = read_budgets(budgets, "--budgets")
        importance = read_importance(old)
        from jali.generation.produce import load
        from jali.tokens.layout import Blocks

        pipe = load(replace(settings, device="cpu"))
        made = import_masks(
            pipe, importance, output, budgets=ready, blocks=Blocks(q_block, k_block),
            source=old.name, **settings.pick("model", "height", "width", "num_frames"),
        )  # fmt: skip
    report_book(made, as_json)


def facts(book: MaskBook) -> dict[str, Any]:
    """What a book says about itself, as plain values."""
    h = book.header
    sizes = h.sizes()
    return {
        "path": None if book.path is None else str(book.path),
        "bytes": book.bytes,
        "model": h.model,
        "transformers": {name: f.kind for name, f in h.fingerprints.items()},
        "grid": str(h.grid),
        "tokens": h.grid.tokens,
        "blocks": [h.blocks.q, h.blocks.k],
        "layout": h.layout_digest,
        "layers": h.layers,
        "steps": h.steps,
        "heads": h.heads,
        "noise_kind": h.noise_kind,
        "noise": list(h.noise),
        "branches": list(h.branches),
        "scorer": h.scorer,
        "prompts": len(h.prompts),
        "budgets": list(h.budgets),
        "costs": [book.cost(budget) for budget in h.budgets],
        "bits_bytes": sum(n for name, n in sizes.items() if name.startswith("bits.")),
        "importance_bytes": sizes.get("importance", 0) + sizes.get("peaks", 0),
        "importance_error": h.importance_error,
        "format": h.format,
        "errors_bytes": sizes.get("errors", 0) + sizes.get("tops", 0),
        "levels": None if h.errors is None else list(h.errors.levels),
        "keep": None if h.errors is None else h.errors.keep,
        "history": list(h.history),
        "jali": h.jali,
        "digest": book.digest,
    }


def print_facts(book: MaskBook) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    h, known = book.header, facts(book)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    places = f"{h.steps} steps" if h.errors is None else f"{h.outer[0]} parts of a run"
    rows = {
        "book": f"{known['path']} ({decimal(book.bytes)})",
        "model": f"{h.model or 'not named'}: {', '.join(known['transformers'].values())}",
        "grid": f"{h.grid} = {h.grid.tokens:,} tokens, blocks {h.blocks}",
        "plans": f"{places} × {h.layers} layers × {h.heads} heads"
        + ("" if h.branches == ("mean",) else f" × {len(h.branches)} branches"),
        "noise": f"{h.noise_kind} {h.noise[0]:.4g} to {h.noise[-1]:.4g}"
        + (" (worked out, not seen)" if h.noise_assumed else ""),
        "recorded": f"{len(h.prompts)} prompts, {h.scorer}, branches: {', '.join(h.branches)}",
        **(_importance_rows(h, known) if h.errors is None else _error_rows(h.errors, known)),
        "made by": f"jali {h.jali}" + "".join(f"; {line}" for line in h.history),
    }
    for name, value in rows.items():
        table.add_row(name, value)
    Console(highlight=False, markup=False).print(table)


def _importance_rows(h: Header, known: dict[str, Any]) -> dict[str, str]:
    from rich.filesize import decimal

    return {
        "budgets": ", ".join(
            f"{asked:g} (cost {cost:.3f})"
            for asked, cost in zip(h.budgets, known["costs"], strict=True)
        )
        or "none ready; each is derived",
        "bits": decimal(known["bits_bytes"]),
        "importance": "left out"
        if not h.importance
        else f"{decimal(known['importance_bytes'])} in 8 bits, off by at most "
        f"{100 * (h.importance_error or 0):.1f} %",
    }


def _error_rows(errors: Errors, known: dict[str, Any]) -> dict[str, str]:
    from rich.filesize import decimal

    from jali.methods.rd import WORDS

    words = {level: word for word, level in WORDS.items()}
    levels = ", ".join(str(words.get(level, level)) for level in errors.levels)
    return {
        "budgets": "any, and any number of steps",
        "errors": f"{decimal(known['errors_bytes'])}, of the levels {levels}; a table serves "
        f"{errors.keep:.0%} of a run",
    }


def _show(book: MaskBook, budget: float, costs: NDArray[np.float32], layer: int | None) -> None:
    """The table of layers and steps, and heads in shades where they are few enough."""
    from rich.console import Console

    console, h = Console(highlight=False, markup=False), book.header
    title = f"budget {budget:g}, cost {book.cost(budget):.3f}"
    console.print(f"{title}: layers (down) over steps (across), cost in percent")
    console.print(_percent_table(costs.mean(2).T, console.width), soft_wrap=True)
    rows = _heads(costs, layer)
    if len(rows) > ROWS:
        console.print(f"\n{len(rows)} heads are too many lines: name a --layer, or an --output")
        return
    which = f"the {h.heads} heads of layer {layer}" if layer is not None else "all heads, by layer"
    low, high = float(rows.min()), float(rows.max())
    console.print(
        f"\n{which} (down) over {h.steps} steps (across): the darker the more, from "
        f"{low:.0%} to {high:.0%}"
    )
    for number, row in enumerate(rows):
        label = "" if layer is None and number % h.heads else _label(number, layer, h.heads)
        line = "".join(_shade(float(x), low, high) for x in row)
        console.print(f"{label:>9} {line}", soft_wrap=True)


def _open(path: Path) -> MaskBook:
    with input_errors():
        pickled = path.suffix.lower() in PICKLES  # which is said first: no book is one
        if not pickled and not path.expanduser().exists():
            raise ValueError(f"no book at {path}; make one with jali calibrate --output {path}")
        from jali.maskbook import MaskBook

        return MaskBook.open(path)


def report_book(book: MaskBook, as_json: bool) -> None:
    if as_json:
        print_json(facts(book))
    else:
        print_facts(book)


def _budget(book: MaskBook) -> float:
    return book.budgets[len(book.budgets) // 2] if book.budgets else 0.5


def _grid(given: str) -> TokenGrid | tuple[int, ...]:
    parts = given.lower().replace("×", "x").split("x")
    try:
        sizes = tuple(int(part) for part in parts)
    except ValueError:
        sizes = ()
    if len(sizes) != 3 or min(sizes) < 1:
        raise ValueError(f"--grid is frames x height x width in tokens, as 21x45x80, got {given!r}")
    return sizes


def _heads(costs: NDArray[np.float32], layer: int | None) -> NDArray[np.float32]:
    """[steps, layers, H] -> a row for every head, layer after layer. [rows, steps]."""
    if layer is not None:
        return costs[:, layer].T
    return costs.reshape(costs.shape[0], -1).T


def _label(number: int, layer: int | None, heads: int) -> str:
    return f"head {number}" if layer is not None else f"layer {number // heads}"


def _shade(cost: float, low: float, high: float) -> str:
    """Heads differ by a few percent: the shades go from the least to the most that is there."""
    part = (cost - low) / max(high - low, 1e-9)
    return SHADES[round(part * (len(SHADES) - 1))]


def _percent_table(rows: NDArray[np.float32], room: int) -> str:
    """[layers, steps] as lines of whole percents, of as many steps as there is room for."""
    width = len(str(len(rows) - 1))
    stride = -(-rows.shape[1] // max(1, (room - width - 1) // 4))
    steps = range(0, rows.shape[1], stride)
    head = " " * (width + 1) + " ".join(f"{step:>3}" for step in steps)
    lines = [
        f"{layer:>{width}} " + " ".join(f"{round(100 * float(row[step])):>3}" for step in steps)
        for layer, row in enumerate(rows)
    ]
    return "\n".join([head, *lines])


def _draw(
    book: MaskBook, budget: float, costs: NDArray[np.float32], layer: int | None, output: Path
) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        refuse("--output needs matplotlib: pip install 'jali[report]'")
    from jali.files import make_folder, whole_file

    rows = _heads(costs, layer)
    h = book.header
    figure = Figure(figsize=(7, min(14, 1.5 + 0.06 * len(rows) + 0.1 * h.heads)))
    axes: Any = figure.add_subplot()
    image = axes.imshow(rows, cmap="magma_r", aspect="auto")
    if layer is None:
        axes.set_yticks(range(0, len(rows), h.heads), range(h.layers))
    axes.set(
        xlabel="step",
        ylabel="layer, and its heads" if layer is None else f"heads of layer {layer}",
        title=f"{h.model or 'book'}, {h.grid}: budget {budget:g}, cost {book.cost(budget):.3f}",
    )
    figure.colorbar(image, ax=axes, label="cost of a head")
    make_folder(output.parent)
    with whole_file(output) as temporary:
        figure.savefig(temporary, format=output.suffix[1:] or "png", dpi=120, bbox_inches="tight")
