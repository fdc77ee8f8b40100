"""`jali generate`: prompts to a folder of clips."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jali.cli.exits import input_errors, job_errors
from jali.cli.options import PromptFile, Prompts, check_folder, with_settings
from jali.cli.output import print_json, progress_bar, say, tell_clips
from jali.cli.quiet import quiet_libraries
from jali.generation.settings import Settings, with_shipped_recipe

if TYPE_CHECKING:
    from jali.generation.manifest import ClipRecord

EXAMPLES = (
    'jali generate --model nano --prompt "a red striped ball moves right" --with-dense',
    "jali generate --model wan-t2v-1.3b --method psa --preset psa_balanced --num-prompts 4",
    "jali generate --model wan-t2v-14b --budget 0.3 --prompts mine.txt --output-dir runs/mine",
    "torchrun --nproc-per-node 4 -m jali generate --model wan-t2v-14b --context-parallel 4",
)


@with_settings()
def generate(
    settings: Settings,
    prompt: Prompts = None,
    prompts: PromptFile = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=1, help="Only the first N; without prompts, of the shipped set."),
    ] = None,
    output_dir: Annotated[
        Path | None, typer.Option(help="The run folder; one that is half-finished goes on.")
    ] = None,
    with_dense: Annotated[
        bool, typer.Option("--with-dense", help="Dense too: DIR/dense beside DIR/METHOD.")
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the manifests, and nothing else.")
    ] = False,
) -> None:
    """Make clips, sparse or dense: mp4 for people, lossless for metrics, and a manifest."""
    from jali.generation import produce_runs
    from jali.generation.pair import choose_folder, plan_runs
    from jali.generation.prompts import select_prompts
    from jali.generation.ranks import check_ranks

    with input_errors():
        check_ranks(settings)
        texts = select_prompts(settings.model, prompt, prompts, num_prompts)
        check_folder(output_dir)
        asked, settings = settings, with_shipped_recipe(settings)
        settings = settings.resolve()
        folder = output_dir or choose_folder(settings, texts, with_dense)
        runs = plan_runs(settings, folder, with_dense)
    if settings.recipe is not None and asked.recipe is None and not as_json:
        typer.echo(_own_recipe(settings), err=True)
    quiet_libraries()
    others = int(os.environ.get("RANK", "0")) > 0  # under torchrun the first one speaks for all
    with job_errors(), progress_bar(quiet=as_json or others) as tell:
        made = produce_runs(runs, texts, tell_clips(tell))
    if others:
        return
    if as_json:
        found = [{"folder": str(run.folder), **run.to_dict()} for run in made]
        print_json(found if len(found) > 1 else found[0])
        return
    for run in made:
        say(f"{run.folder}: {_times(run.clips)}")
        last = "" if len(run.clips) == 1 else "last clip: "
        say(f"  {last}{run.clips[-1].summary}", style="dim")
    if len(made) == 2:
        say(f"next: jali compare {made[0].folder} {made[1].folder}")


def _own_recipe(settings: Settings) -> str:
    """What is run where nothing was asked of attention."""
    recipe = settings.find_recipe()
    assert recipe is not None
    what = (
        "dense" if recipe.curve is None else f"{settings.method} at a total of {settings.total:g}"
    )
    size = recipe.run
    return (
        f"by the recipe that comes with {settings.model} ({recipe.target}, found with {size.steps} "
        f"steps at {size.height}×{size.width}×{size.num_frames}): {what}; --method, --total or "
        f"--recipe none ask for something else"
    )


def _times(clips: Sequence[ClipRecord]) -> str:
    """How many clips, and how long one takes; first ones, which load and compile, by themselves."""
    warm = [clip.seconds for clip in clips if not clip.cold]
    said = "1 clip" if len(clips) == 1 else f"{len(clips)} clips"
    if warm:
        said += f", {sum(warm) / len(warm):.1f} s each"
    cold = ", ".join(_first_clip(clip) for clip in clips if clip.cold)
    if cold:
        said += f"{';' if warm else ','} first clip, with loading and compilation: {cold}"
    return said


def _first_clip(clip: ClipRecord) -> str:
    """Its seconds, and where most of what is done once is in them."""
    said, call = f"{clip.seconds:.1f} s", clip.seconds_first_call
    return said if call is None else f"{said} ({call:.1f} s its first transformer call)"
