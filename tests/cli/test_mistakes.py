"""Mistakes on the command line: exit code 2, a sentence with the flag as typed, and no torch."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

# Everything that is wrong with a command can be told before torch is loaded. FILE is a text file,
# FOLDER a folder, EMPTY an empty file; nothing else exists.
MISTAKES: list[tuple[str, list[str]]] = [
    # Names
    ("generate --model nona", ["--model", "'nona'", "did you mean 'nano'?", "wan-t2v-14b"]),
    ("generate --method entrpy", ["--method", "'entrpy'", "did you mean 'entropy'?"]),
    ("generate --backend tritn", ["--backend", "'tritn'", "did you mean 'triton'?"]),
    ("generate --preset psa_balancd", ["--preset", "'psa_balancd'", "nano has no preset"]),
    ("generate --model wan-t2v-14b --preset psa_4steps_x", ["--preset", "wan-t2v-14b"]),
    ("generate --dtype bf17", ["--dtype", "'bf17'", "bf16"]),
    ("generate --device gpu", ["--device", "'gpu'", "cuda or cpu"]),
    ("generate --device cuda:x", ["--device", "'cuda:x'"]),
    ("calibrate --model nona --output x.safetensors", ["--model", "'nona'"]),
    ("inspect --model nona", ["--model", "'nona'"]),
    ("inspect --methods entropy,pza", ["--methods", "'pza'", "did you mean 'psa'?"]),
    ("inspect --methods dense", ["--methods", "'dense'"]),
    ("bench pipeline --model nona", ["--model", "'nona'"]),
    ("bench pipeline --totals 2", ["--totals", "'2'"]),
    ("bench pipeline --totals 0.4 --warmup-frac 0.5", ["--warmup-frac does not go with --totals"]),
    ("bench pipeline --totals 0.4 --masks FILE", ["--masks does not go with --totals"]),
    ("arena --model nona --output x", ["--model", "'nona'", "did you mean 'nano'?"]),
    ("arena --methods entropy,entrpy --output x", ["--methods", "did you mean 'entropy'?"]),
    ("arena --methods dense --output x", ["--methods", "'dense'"]),
    ("arena --schedule grade --output x", ["--schedule", "'grade'"]),
    ("arena --totals 0.5,2 --output x", ["--totals", "'0.5,2'"]),
    ("arena --schedule esa --totals 0.1 --output x", ["a total of 0.1 cannot be reached in 20"]),
    ("arena --totals 0.01 --output x", ["a total of 0.01 cannot be reached", "ask for more"]),
    ("arena --prompts nothing --output x", ["--prompts", "there is no prompt file nothing"]),
    ("arena --prompts EMPTY --output x", ["--prompts", "holds no prompts"]),
    ("arena --batch 0 --output x", ["--batch", "'0'"]),
    ("arena --minutes -1 --output x", ["--minutes", "'-1'"]),
    ("arena --output FILE", ["--output", "is a file"]),
    ("tune --output x.yaml", ["--target-psnr or one of --target-ssim", "give exactly one"]),
    ("tune --target-psnr 30 --speedup 2 --output x.yaml", ["--target-psnr and --speedup are two"]),
    ("tune --target-psnr nan --output x.yaml", ["--target-psnr", "got nan"]),
    ("tune --target-ssim 2 --output x.yaml", ["--target-ssim", "below 1, got 2.0"]),
    ("tune --speedup 0.5 --output x.yaml", ["--speedup", "above 1", "got 0.5"]),
    ("tune --speedup fast --output x.yaml", ["--speedup", "'fast'"]),
    ("tune --model nona --target-psnr 30 --output x.yaml", ["--model", "'nona'"]),
    ("tune --method entrpy --target-psnr 30 --output x.yaml", ["--method", "'entropy'?"]),
    ("tune --num-prompts 1 --target-psnr 30 --output x.yaml", ["--num-prompts", "'1'"]),
    ("tune --minutes -1 --target-psnr 30 --output x.yaml", ["--minutes", "'-1'"]),
    ("tune --target-psnr 30 --output FILE", ["--output", "ends in .yaml"]),
    ("tune --target-psnr 30 --output FOLDER", ["--output", "ends in .yaml"]),
    ("tune --saves money --target-psnr 30 --output x.yaml", ["--saves", "time, work", "'money'"]),
    ("tune --saves work --speedup 2 --output x.yaml", ["--saves", "--speedup asks for time"]),
    ("tune --probes -1 --target-psnr 30 --output x.yaml", ["--probes", "'-1'"]),
    ("generate --preset nothing.yaml", ["--recipe", "there is no recipe nothing.yaml"]),
    ("arena --recipe nothing.yaml --output x", ["--recipe", "there is no recipe"]),
    ("calibrate --recipe nothing.yaml --output x.safetensors", ["--recipe", "there is no recipe"]),
    ("experiment run --recipe nothing.yaml --tag x", ["--recipe", "there is no recipe"]),
    ("generate --recipe nothing.yaml", ["--recipe", "there is no recipe", "jali tune"]),
    ("generate --recipe FILE --budget 0.3", ["--budget and --recipe ask for the same"]),
    ("generate --recipe FILE --total 0.3", ["--total and --recipe ask for the same"]),
    ("generate --recipe FILE --method rd", ["--method and --recipe ask for the same"]),
    ("bench pipeline --recipe nothing.yaml", ["--recipe", "nothing.yaml"]),
    ("bench pipeline --totals 0.4 --recipe FILE", ["--recipe does not go with --totals"]),
    ("demo --recipe nothing.yaml", ["--recipe", "nothing.yaml"]),
    ("methods entrpy", ["'entrpy'", "did you mean 'entropy'?"]),
    ("bench pipeline --methods entropi", ["--methods", "'entropi'", "did you mean 'entropy'?"]),
    ("bench kernel --backends fa9", ["--backends", "'fa9'"]),
    ("bench kernel --device gpu", ["--device", "'gpu'"]),
    ("experiment run --tag a --model nona", ["--model", "'nona'"]),
    ("experiment run --tag a --method entrpy", ["--method", "'entrpy'"]),
    ("experiment run --tag a --backend tritn", ["--backend", "'tritn'"]),
    ("experiment launch FILE --on cloud", ["--on", "local or slurm", "'cloud'"]),
    ("presets psa_balancd", ["'psa_balancd'", "did you mean 'psa_balanced'?"]),
    ("presets baseline --model nona", ["--model", "'nona'"]),
    ("presets --model nona", ["--model", "'nona'", "did you mean 'nano'?"]),
    ("presets psa_balancd --model nano", ["nano has no preset 'psa_balancd'"]),
    ("demo --method entrpy", ["--method", "'entrpy'"]),
    ("demo --method dense", ["--method", "'dense'"]),
    ("demo --method cached", ["--method", "'cached'"]),
    ("doctor --device gpu", ["--device", "'gpu'"]),
    ("evaluate FOLDER FOLDER --device gpu", ["--device", "'gpu'"]),
    ("evaluate FOLDER FOLDER --metrics psnr,sssim", ["--metrics", "got sssim"]),
    ("evaluate FOLDER FOLDER --metrics all,psnr", ["--metrics", "got all"]),
    # Numbers
    ("generate --budget 0", ["--budget", "above 0", "got 0.0"]),
    ("generate --budget 1.5", ["--budget", "at most 1", "got 1.5"]),
    ("generate --budget nan", ["--budget", "got nan"]),
    ("generate --budget half", ["--budget", "'half'"]),
    ("generate --steps 0", ["--steps", "at least 1", "got 0"]),
    ("generate --steps 2.5", ["--steps", "'2.5'"]),
    ("generate --seed -1", ["--seed", "got -1"]),
    ("generate --guidance -1", ["--guidance", "got -1"]),
    ("generate --warmup-frac 3", ["--warmup-frac must be a share in [0, 1], got 3.0"]),
    ("generate --num-prompts 0", ["--num-prompts", "0"]),
    ("generate --num-prompts 999", ["--num-prompts is 999"]),
    ("generate --height 100", ["--height", "multiple of 16", "96 and 112"]),
    ("generate --width 0", ["--width", "got 0"]),
    ("generate --num-frames 2", ["--num-frames", "4·k + 1", "1 and 5"]),
    ("generate --model flux.1-dev --num-frames 9", ["--num-frames", "images"]),
    ("generate --frames 9", ["--frames", "--num-frames"]),
    ("generate --context-parallel 2", ["--context-parallel 2", "torchrun"]),
    ("calibrate --output x.safetensors --budgets 2", ["--budgets", "'2'"]),
    ("calibrate --output x.safetensors --budgets half", ["--budgets", "'half'"]),
    ("calibrate --output x.safetensors --steps 0", ["--steps", "got 0"]),
    ("calibrate --output x.safetensors --height 100", ["--height", "96 and 112"]),
    ("calibrate --output x.safetensors --q-block 0", ["--q-block", "0"]),
    ("inspect --cost 2", ["--cost", "got 2.0"]),
    ("inspect --at-steps 20", ["--at-steps", "0 to 19", "got 20"]),
    ("inspect --at-layers 8", ["--at-layers", "0 to 7", "got 8"]),
    ("inspect --at-layers two", ["--at-layers", "'two'"]),
    ("bench pipeline --budgets 0.5,2", ["--budgets", "'0.5,2'"]),
    ("bench kernel --densities 0.5,0", ["--densities", "'0.5,0'"]),
    ("bench kernel --repeats 0", ["--repeats", "0"]),
    ("demo --budget 2", ["--budget", "got 2.0"]),
    ("demo --steps 0", ["--steps", "0"]),
    ("demo --steps 51", ["--steps", "51"]),
    ("demo --seed -1", ["--seed", "got -1"]),
    ("experiment run --tag a --num-frames 2", ["--num-frames", "1 and 5"]),
    ("experiment run --tag a --budget 0", ["--budget", "got 0.0"]),
    # Files and folders
    ("generate --prompts none.txt", ["--prompts", "no prompt file none.txt"]),
    ("generate --prompts FOLDER", ["--prompts", "is a folder"]),
    ("generate --prompts EMPTY", ["--prompts", "holds no prompts"]),
    ("generate --output-dir FILE", ["--output-dir", "is a file"]),
    ("generate --output-dir FILE/run", ["--output-dir", "FILE is not a folder"]),
    ("generate --path none", ["--path", "no folder none"]),
    ("generate --lora none.safetensors", ["--lora", "no LoRA at none.safetensors"]),
    ("generate --config none.yaml", ["--config", "no preset file none.yaml"]),
    ("generate --masks none.safetensors", ["--masks", "no book at none.safetensors"]),
    ("calibrate --output x.pt", ["--output", ".safetensors", "x.safetensors"]),
    ("calibrate --output FOLDER", ["--output", "is a folder"]),
    ("calibrate", ["--output"]),
    ("calibrate --output x.safetensors --prompts none.txt", ["--prompts", "none.txt"]),
    ("calibrate --output x.safetensors --path none", ["--path", "none"]),
    ("inspect --output-dir FILE", ["--output-dir", "is a file"]),
    ("bench pipeline --output-dir FILE", ["--output-dir", "is a file"]),
    ("bench pipeline --prompts none.txt", ["--prompts", "none.txt"]),
    ("bench pipeline --masks none.safetensors", ["--masks", "none.safetensors"]),
    ("bench kernel --output FOLDER", ["--output", "is a folder"]),
    ("bench kernel --plot FOLDER", ["--plot", "is a folder"]),
    ("demo --output-dir FILE", ["--output-dir", "is a file"]),
    ("demo --path none", ["--path", "none"]),
    ("evaluate", ["CLIPS REFERENCE", "--reference", "--generated"]),
    ("evaluate FOLDER", ["CLIPS REFERENCE"]),
    ("evaluate none FOLDER", ["CLIPS", "none does not exist"]),
    ("evaluate FOLDER none", ["REFERENCE", "none does not exist"]),
    ("evaluate --reference none --generated FOLDER", ["none does not exist"]),
    ("evaluate FOLDER FOLDER --reference FOLDER", ["REFERENCE and --reference are the same"]),
    ("evaluate FOLDER FOLDER --output FOLDER", ["--output", "is a folder"]),
    ("evaluate FOLDER FOLDER FOLDER", ["unexpected extra argument"]),
    ("compare none FOLDER", ["no folder none"]),
    ("compare FOLDER --metrics sssim", ["--metrics", "got sssim"]),
    ("compare FOLDER --output FOLDER", ["--output", "is a folder"]),
    ("compare FOLDER --limit 0", ["--limit", "'0'"]),
    ("export none", ["none does not exist"]),
    ("export FOLDER --fps 0", ["--fps", "got 0"]),
    ("export FOLDER --output-dir FILE", ["--output-dir", "is a file"]),
    ("book info none.safetensors", ["no book at none.safetensors", "jali calibrate"]),
    ("book show none.safetensors", ["no book at none.safetensors"]),
    ("book resample FILE", ["--output"]),
    ("presets --config none.yaml", ["--config", "no preset file none.yaml"]),
    ("experiment run", ["--tag"]),
    ("experiment launch none.yaml", ["none.yaml"]),
    ("experiment status none", ["'none'"]),
    ("experiment run --tag a --prompts none.txt", ["--prompts", "none.txt"]),
    # What does not go together, or not here
    ("generate --backend triton --device cpu", ["--backend", "'triton'", "CUDA"]),
    ("generate --device cuda", ["--device is cuda", "no GPU"]),
    ("generate --device cuda:1", ["--device is cuda:1", "no GPU"]),
    ("generate --cpu-offload --device cpu", ["--cpu-offload", "leave it out"]),
    ("generate --compile --tensor-parallel 2", ["--compile is not for --tensor-parallel:"]),
    ("generate --compile maybe", ["maybe"]),
    ("generate --method cached", ["--method cached", "--masks"]),
    ("generate --masks FILE --preset baseline", ["--preset and --masks"]),
    ("generate --masks FILE --method psa", ["--method and --masks", "psa"]),
    ("generate --masks FILE --option seed=1", ["--option", "seed"]),
    ("generate --preset baseline --option seed=1", ["--option", "seed", "complete"]),
    ("generate --option seed", ["--option is NAME=VALUE", "'seed'"]),
    (
        "generate --context-parallel 2 --tensor-parallel 2",
        ["--context-parallel and --tensor-parallel do not go together; leave one at 1"],
    ),
    ("generate --model hunyuan-video --negative-prompt x", ["--negative-prompt", "no effect"]),
    ("calibrate --output x.safetensors --branches both", ["--branches", "'both'"]),
    ("calibrate --output x.safetensors --method psa", ["--method", "entropy", "rd", "'psa'"]),
    ("calibrate --output x.safetensors --method rd --budgets 0.5", ["--budgets", "rd"]),
    ("calibrate --output x.safetensors --option samples=3", ["--option samples", "rd"]),
    (
        "calibrate --output x.safetensors --no-importance --budgets=",
        ["--no-importance", "--budgets"],
    ),
    ("bench kernel --device cuda", ["--device is cuda", "no GPU"]),
    ("doctor --device cuda", ["--device is cuda", "no GPU"]),
    ("evaluate FOLDER FOLDER --device cuda", ["--device is cuda", "no GPU"]),
    ("demo --tensors --method psa", ["--method", "--tensors"]),
    ("generate --colour red", ["--colour"]),
    ("generat", ["generat"]),
]  # fmt: skip
SCRIPT = """
import json, sys, time
from typer.testing import CliRunner
from jali.cli.main import app

for words in json.load(sys.stdin):
    start = time.process_time()
    done = CliRunner().invoke(app, words)
    heavy = [name for name in ("torch", "diffusers", "transformers") if name in sys.modules]
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    spent = time.process_time() - start
    print(json.dumps([done.exit_code, done.stderr, done.stdout, heavy, spent]), flush=True)
"""
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All mistakes, made in one process that has not loaded torch."""
    place = tmp_path_factory.mktemp("mistakes")
    (place / "FOLDER").mkdir()
    (place / "FILE").write_text("a prompt\n")
    (place / "EMPTY").write_text("# nothing\n")
    lines = json.dumps([words.split() for words, _ in MISTAKES])
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], input=lines, capture_output=True, text=True, cwd=place,
        env=NO_GPU, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(found) == len(MISTAKES), done.stderr
    made = sorted(path.name for path in place.iterdir())
    assert made == ["EMPTY", "FILE", "FOLDER"], "nothing is written"
    return {words: answer for (words, _), answer in zip(MISTAKES, found, strict=True)}


@pytest.mark.parametrize(("words", "said"), MISTAKES, ids=[words for words, _ in MISTAKES])
def test_a_mistake_is_answered_at_once(
    words: str, said: list[str], answers: dict[str, Any]
) -> None:
    code, stderr, stdout, heavy, spent = answers[words]
    sentence = " ".join(stderr.replace("│", " ").split())
    for part in said:
        assert part in sentence, sentence
    assert code == 2
    assert stdout == ""
    assert "Traceback" not in stderr
    assert heavy == []
    assert spent < 1


SLOWEST = (
    ("generate", "--model", "nona"),
    ("generate", "--prompts", "none.txt"),
    ("generate", "--backend", "triton"),
    ("calibrate", "--output", "x.pt"),
    ("inspect", "--cost", "2"),
    ("evaluate", "a", "b"),
)


@pytest.mark.parametrize("words", SLOWEST, ids=" ".join)
def test_a_mistake_costs_less_than_two_seconds(words: tuple[str, ...], tmp_path: Path) -> None:
    def spent() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = spent()
    done = subprocess.run(
        [sys.executable, "-m", "jali", *words], capture_output=True, text=True, cwd=tmp_path,
        env=NO_GPU, check=False,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr.startswith("jali: ")
    assert spent() - before < 2
