"""`jali evaluate`: how close generated clips come to their references."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jali.cli.completion import several, words
from jali.cli.exits import input_errors, job_errors
from jali.cli.options import Json, read_metrics
from jali.cli.output import make_table, print_json, say
from jali.device import check_device
from jali.name import METRICS

if TYPE_CHECKING:
    from rich.table import Table

    from jali.evaluation.quality.interval import Interval
    from jali.evaluation.quality.result import Evaluation, Pair

# More clips than these make a table nobody reads; the file has them all.
ROWS = 20


def evaluate(
    clips: Annotated[
        Path | None,
        typer.Argument(
            metavar="CLIPS",
            help="What is judged: a run folder, a folder of clips, or one clip.",
            show_default=False,
        ),
    ] = None,
    against: Annotated[
        Path | None,
        typer.Argument(
            metavar="REFERENCE", help="The dense ones, by the same names.", show_default=False
        ),
    ] = None,
    reference: Annotated[
        Path | None, typer.Option(help="The same as the second argument.", show_default=False)
    ] = None,
    generated: Annotated[
        Path | None, typer.Option(help="The same as the first argument.", show_default=False)
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Write every value of every frame here, as JSON.")
    ] = None,
    metrics: Annotated[
        str,
        typer.Option(
            help="Comma-separated: psnr, ssim, ms_ssim, lpips, lpips_vgg, vmaf, flicker; "
            "or all. None given: those that can run here, without lpips_vgg.",
            show_default=False,
            autocompletion=several(words(*METRICS, "all")),
        ),
    ] = "",
    device: Annotated[
        str, typer.Option(help="cpu, cuda, or cuda:1.", autocompletion=words("cpu", "cuda"))
    ] = "cpu",
    weights: Annotated[
        Path | None, typer.Option(help="Folder with LPIPS weights, instead of the cache.")
    ] = None,
    partial: Annotated[
        bool, typer.Option("--partial", help="Leave out clips without a partner.")
    ] = False,
    fetch_weights: Annotated[
        bool, typer.Option("--fetch-weights", help="Get the LPIPS weights (64 MB, once).")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compare clips of the same names, frame by frame.

    Examples:

      jali evaluate out/entropy out/dense --output metrics.json

      jali evaluate b.mp4 a.mp4 --metrics psnr,lpips --json

      jali evaluate --reference out/dense --generated out/entropy

      jali evaluate --fetch-weights
    """
    from rich.console import Console

    with input_errors():
        generated = _one_of(clips, generated, "CLIPS", "--generated")
        reference = _one_of(against, reference, "REFERENCE", "--reference")
        if not (fetch_weights and generated is None and reference is None):
            _check_sides(generated, reference)
        asked = read_metrics(metrics, "all")
        names = METRICS if asked == ["all"] else asked or None
        check_device(device)
        if output is not None and output.is_dir():  # whether it can be made, check_output says
            raise ValueError(f"--output {output} is a folder; name a file in it")
    with job_errors():
        from jali.evaluation.quality.evaluation import evaluate
        from jali.evaluation.quality.result import check_output, write_evaluation
        from jali.evaluation.quality.weights import fetch

        if fetch_weights:
            for file in fetch():
                typer.echo(f"LPIPS weights: {file}", err=as_json)
            if reference is None and generated is None:
                return
        assert reference is not None
        assert generated is not None
        if output is not None:
            check_output(output)  # before an hour of work, not after
        with Console(stderr=True).status("reading") as status:
            found = evaluate(
                reference, generated, names, device=device, weights=weights, partial=partial,
                progress=lambda name, number, count: status.update(f"{number + 1}/{count} {name}"),
            )  # fmt: skip
            if output is not None:
                write_evaluation(found, output)
    if as_json:
        print_json(_brief(found), indent=1, allow_nan=False)
    else:
        _show(found, output)


def _one_of(argument: Path | None, option: Path | None, name: str, flag: str) -> Path | None:
    """A side by its place or by its flag."""
    if argument is not None and option is not None:
        raise ValueError(f"{name} and {flag} are the same; got {argument} and {option}")
    return option if argument is None else argument


def _check_sides(generated: Path | None, reference: Path | None) -> None:
    if generated is None or reference is None:
        raise ValueError(
            "evaluate needs both --reference and --generated, or jali evaluate CLIPS REFERENCE"
        )
    for side, path in (("CLIPS", generated), ("REFERENCE", reference)):
        if not path.expanduser().exists():
            raise ValueError(f"{side}: {path} does not exist")


def _brief(found: Evaluation) -> dict[str, Any]:
    """The result without the values of single frames."""
    result = found.to_dict()
    for pair in result["pairs"]:
        for name in found.metrics:
            if pair[name] is not None:
                del pair[name]["per_frame"]
    return result


def _show(found: Evaluation, output: Path | None) -> None:
    from rich.console import Console

    Console().print(_table(found))
    if len(found.pairs) > ROWS:
        say(f"The first {ROWS} of {len(found.pairs)} clips; the mean is over all.")
    for name, reason in found.unavailable.items():
        say(f"{name}: {reason}")
    for note in found.notes:
        say(note)
    for side, names in (("reference", found.only_reference), ("generated", found.only_generated)):
        if names:
            say(f"Only in {side}: {', '.join(names)}")
    if output is not None:
        say(f"Written: {output}")


def _table(found: Evaluation) -> Table:
    from rich.markup import escape

    from jali.evaluation.quality.measure import MEASURES

    summary = found.summary
    table = make_table(
        ("clip", *(MEASURES[m].heading for m in summary), "faults"),
        [
            (escape(pair.name), *(_number(pair.value(m), m) for m in summary), _faults(pair))
            for pair in found.pairs[:ROWS]
        ],
        wrap_last=True,
        padding=(0, 1),
        pad_edge=False,
    )
    table.columns[0].overflow, table.columns[0].max_width = "ellipsis", 28
    if len(found.pairs) > 1:
        table.add_section()
        table.add_row("mean", *(_number(summary[m].mean, m) for m in summary), "")
        if any(own.low is not None for own in summary.values()):
            table.add_row("95 % interval", *(_between(summary[m], m) for m in summary), "")
    return table


def _number(value: float | None, name: str) -> str:
    from jali.evaluation.quality.measure import MEASURES

    return "n/a" if value is None else f"{value:.{MEASURES[name].digits}f}"


def _between(found: Interval, name: str) -> str:
    if found.low is None or found.high is None:
        return ""
    return f"{_number(found.low, name)} – {_number(found.high, name)}"


def _faults(pair: Pair) -> str:
    counts = {"black": pair.checks.black, "frozen": pair.checks.frozen, "NaN": pair.checks.nan}
    found = [f"{count} {name}" for name, count in counts.items() if count]
    return f"[red]{', '.join(found)}[/]" if found else "none"
