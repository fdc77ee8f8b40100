"""`jali inspect`: which method suits a model, from its own q and k."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from jali import files
from jali.cli import completion
from jali.cli.exits import input_errors, job_errors
from jali.cli.options import (
    MACHINE,
    SIZES,
    Json,
    check_folder,
    read_list,
    read_names,
    with_settings,
)
from jali.cli.output import can_draw, make_table, print_json, say
from jali.cli.quiet import quiet_libraries
from jali.generation.settings import Settings
from jali.integration.models.registry import model_card
from jali.name import method_names

if TYPE_CHECKING:
    from rich.table import Table

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
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated: {own_methods}.",
            show_default="all of them",
            autocompletion=completion.several(completion.methods),
        ),
    ] = "",
    at_layers: Annotated[
        str, typer.Option(help="Comma-separated.", show_default="three over the depth")
    ] = "",
    at_steps: Annotated[str, typer.Option(help="Comma-separated.", show_default="the middle")] = "",
    prompt: Annotated[
        str | None, typer.Option(help="What is generated.", show_default="the first shipped one")
    ] = None,
    output_dir: Annotated[Path | None, typer.Option(help="Where table and picture go.")] = None,
    as_json: Json = False,
) -> None:
    """Show which method suits a model: what each keeps of its attention at equal cost."""
    from jali.generation.prompts import select_prompts

    with input_errors():
        if not 0 < cost < 1:
            raise ValueError(f"--cost must be above 0 and below 1, got {cost}")
        known = [name for name in method_names() if name != "dense"]
        names = read_names(methods, known, "method", "--methods")
        layers, at = (
            read_list(given, int, f"{flag} are whole numbers, comma-separated") or None
            for given, flag in ((at_layers, "--at-layers"), (at_steps, "--at-steps"))
        )
        _check_places(settings, layers, at)
        text = select_prompts(settings.model, None if prompt is None else [prompt], count=1)[0]
        check_folder(output_dir)
        from jali.evaluation.inspection import capture, judge
        from jali.generation.produce import check_sizes, load

        settings = replace(settings, method="dense").resolve()
        folder = output_dir or Path("outputs") / f"inspect-{settings.model}"
        check_folder(folder)
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
        facts = _facts(found, settings, text)
        written = _write(folder, facts, found, settings)
    if as_json:
        print_json(facts)
    else:
        _show(found, folder, written)


def _check_places(settings: Settings, layers: list[int] | None, steps: list[int] | None) -> None:
    """Refuse layers and steps that there are not, as far as the registry knows."""
    card = model_card(settings.model)
    counts = {"--at-steps": (steps, settings.steps or card.steps)}
    if settings.path is None:
        counts["--at-layers"] = (layers, sum(card.layers))
    for flag, (asked, count) in counts.items():
        for place in asked or ():
            if not 0 <= place < count:
                raise ValueError(f"{flag} count from 0 to {count - 1}, got {place}")


def _facts(found: list[JudgedCall], settings: Settings, prompt: str) -> dict[str, Any]:
    from jali.evaluation.inspection import ranking, verdict
    from jali.generation.machine import machine, versions

    judgement = verdict(found)
    return {
        "kind": "jali-inspection",
        "version": 1,
        "settings": settings.to_dict(),
        "prompt": prompt,
        "cost": found[0].cost,
        "machine": machine(str(settings.device)),
        "versions": versions(),
        "ranking": [{"method": m, "error": e, "mass": p} for m, e, p in ranking(found)],
        "winner": judgement.winner,
        "verdict": asdict(judgement),
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
                "reachable": judged.reachable and asdict(judged.reachable),
            }
            for judged in found
        ],
    }


def _write(
    folder: Path, facts: dict[str, Any], found: list[JudgedCall], settings: Settings
) -> list[str]:
    """The table always; the picture where matplotlib is installed."""
    files.write_json(folder / TABLE, facts, sort_keys=False)
    if not can_draw():
        return [TABLE]
    from jali.evaluation.inspection.picture import figure

    with files.whole_file(folder / PICTURE) as temporary:
        figure(found, settings.model).savefig(temporary, format="png", dpi=150)
    return [TABLE, PICTURE]


def _show(found: list[JudgedCall], folder: Path, written: list[str]) -> None:
    from jali.evaluation.inspection import ranking, sentences, what_is_left
    from jali.evaluation.inspection.judge import too_costly

    ranked, dear = ranking(found), too_costly(found)
    order = [name for name, _, _ in ranked]
    for judged in found:
        Console().print(_table(judged, order, dear))
    say(
        "mass: share of the exact attention in what it reads; at most: what the best full blocks "
        "have of it for as much work; error: ‖out − dense‖ / ‖dense‖, dense in fp32; dim: controls "
        "that look at nothing, what cannot be had at this cost or had nothing to choose, and last "
        "what could be had",
        style="dim",
    )
    for words in (*sentences(found), what_is_left(found)):
        if words is not None:
            say(words)
    say(f"{folder}: {', '.join(written)}")


def _table(judged: JudgedCall, order: list[str], dear: Collection[str]) -> Table:
    from jali.evaluation.inspection.judge import MethodScore
    from jali.name import CONTROLS

    def remark(score: MethodScore) -> str:
        if score.method in dear:
            return " (costs more)"
        return " (no choice)" if score.no_choice else ""

    def row(name: str, score: MethodScore) -> tuple[str, ...]:
        return (
            name,
            f"{score.budget:.3f}",
            f"{score.cost:.3f}",
            f"{score.mass:.1%}",
            f"{score.mass_full:.1%}",
            f"{score.bound:.1%}",
            f"{score.error:.1%}",
            f"{max(error for _, _, error in score.heads):.1%}",
        )

    site, spread = judged.capture.site, sorted(judged.spread)
    ranked = sorted(judged.scores, key=lambda own: order.index(own.method))
    rows = [row(score.method + remark(score), score) for score in ranked]
    if judged.reachable is not None:
        rows.append(row(f"({judged.reachable})", judged.reachable.score))
    return make_table(
        ("", "asked", "cost", "mass", "in full", "at most", "error", "worst head"),
        rows,
        dim=lambda row: row[0] in CONTROLS or row[0].endswith(")"),
        title=f"layer {site.layer}, step {site.step}: heads look at {spread[0]:.0%} to "
        f"{spread[-1]:.0%} of the keys",
    )
