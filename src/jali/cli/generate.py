"""`jali generate`: prompts to a folder of clips."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from jali.cli.exits import input_errors, job_errors
from jali.cli.options import PromptFile, Prompts, with_settings
from jali.cli.output import print_json, progress_bar, say, tell_clips
from jali.cli.quiet import quiet_libraries
from jali.generation.settings import Settings

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
        settings = settings.resolve()
        texts = select_prompts(settings.model, prompt, prompts, num_prompts)
        folder = output_dir or choose_folder(settings, texts, with_dense)
        runs = plan_runs(settings, folder, with_dense)
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
        seconds = [clip.seconds for clip in run.clips]
        clips = "1 clip" if len(seconds) == 1 else f"{len(seconds)} clips"
        say(f"{run.folder}: {clips}, {sum(seconds) / len(seconds):.1f} s each")
        say(f"  {run.clips[-1].summary}", style="dim")
    if len(made) == 2:
        say(f"next: jali compare {made[0].folder} {made[1].folder}")
