"""`jali tune`: a wanted quality or speed to a recipe."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from jali.cli import completion
from jali.cli.exits import input_errors, job_errors
from jali.cli.options import MACHINE, SIZES, Json, PromptFile, Prompts, with_settings
from jali.cli.output import print_json, progress_bar, say
from jali.cli.quiet import quiet_libraries
from jali.evaluation.tuning.size import METHODS, PROBES, PROMPTS
from jali.generation.settings import Settings

EXAMPLES = (
    "jali tune --model nano --target-psnr 35 --output nano.yaml",
    "jali tune --model wan-t2v-1.3b --speedup 1.8 --minutes 120 --output wan.yaml",
    'jali tune --model nano --target-ssim 0.95 --method "rd:samples=8 entropy" --height 128 '
    "--width 128 --num-frames 33 --output small.yaml",
)


@with_settings("model", "backend", "negative_prompt", *SIZES, "arguments", "lora", *MACHINE)
def tune(
    settings: Settings,
    output: Annotated[
        Path,
        typer.Option(help="The recipe's file; a tuning that was cut goes on.", show_default=False),
    ],
    target_psnr: Annotated[
        float | None, typer.Option(help="So near to dense, in dB.", show_default=False)
    ] = None,
    target_ssim: Annotated[
        float | None, typer.Option(help="So near, 1 being the same.", show_default=False)
    ] = None,
    target_lpips: Annotated[
        float | None, typer.Option(help="So near, 0 being the same.", show_default=False)
    ] = None,
    speedup: Annotated[
        float | None, typer.Option(help="So many times as fast as dense.", show_default=False)
    ] = None,
    method: Annotated[
        str,
        typer.Option(
            help="Those to try, comma-separated, with options as in rd:samples=8.",
            autocompletion=completion.several(completion.contestants),
        ),
    ] = ",".join(METHODS),
    prompt: Prompts = None,
    prompts: PromptFile = None,
    num_prompts: Annotated[
        int | None,
        typer.Option(min=2, help="Only the first N.", show_default=f"{PROMPTS} of the shipped set"),
    ] = None,
    batch: Annotated[int, typer.Option(min=1, help="Prompts in one call of the model.")] = 1,
    minutes: Annotated[
        float | None,
        typer.Option(min=0, help="Keep to these, with fewer prompts and tries if need be."),
    ] = None,
    probes: Annotated[
        int,
        typer.Option(min=0, help="Places, of steps and of layers, where more work is tried."),
    ] = PROBES,
    saves: Annotated[
        str, typer.Option(help="time, as measured here, or work, for a machine elsewhere.")
    ] = "time",
    as_json: Json = False,
) -> None:
    """Find the method and the total that give a wanted quality or speed, by finished clips.

    One half of the prompts finds them, the other half judges: what the recipe states is what clips
    of prompts showed that had no part in it. Use it with --recipe, or recipe= in Python.
    """
    from jali.evaluation.tuning.size import check_output, check_saves, check_target, folder_of
    from jali.generation.prompts import select_prompts

    begun = time.monotonic()
    with input_errors():
        from jali.evaluation.arena.row import split_methods

        metric, value = check_target(
            psnr=target_psnr, ssim=target_ssim, lpips=target_lpips, speedup=speedup
        )
        check_saves(saves, metric)
        words = split_methods(method, "--method")
        check_output(output)
        texts = select_prompts(settings.model, prompt, prompts, num_prompts, shipped=PROMPTS)
        from jali.evaluation.tuning.run import find_recipe, make_request
        from jali.integration.recipe import Target

        request = make_request(
            settings, output, Target(metric, value), words, texts, batch, None, probes, saves
        )
    quiet_libraries()
    with job_errors(), progress_bar(quiet=as_json, log=True) as tell:
        from jali.generation.produce import load

        stop = None if minutes is None else begun + 60 * minutes
        recipe = find_recipe(request, load(request.plan.dense), stop, lambda *said: tell(*said))
    if as_json:
        print_json({"recipe": str(output), "said": recipe.sentences(), **recipe.to_dict()})
        return
    for sentence in recipe.sentences():
        say(sentence)
    say(f"{output}; how it was found: {folder_of(output) / 'tuning.html'}", soft_wrap=True)
    say(f"use it: jali generate --model {recipe.model} --recipe {output}", soft_wrap=True)
