"""Tab in a shell: installed by one option, answered at once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from jali.cli import completion
from jali.name import _METHODS

PROPOSED = [
    ("gen", ["generate"]),
    ("bench ", ["kernel", "pipeline"]),
    ("methods ent", ["entropy"]),
    ("arena --methods rd,a", ["rd,all", "rd,ada_bsa"]),
    ("arena --schedule graded,l", ["graded,linear"]),
    ("generate --meth", ["--method"]),
    ("generate --method ", [*_METHODS, "cached"]),
    ("generate --model wan-", ["wan-t2v-1.3b", "wan-t2v-14b"]),
    ("generate --model wan-t2v-1.3b --preset psa_b", ["psa_balanced"]),
    ("generate --backend t", ["triton", "torch"]),
    ("inspect --methods entropy,r", [f"entropy,{m}" for m in ("rd", "rf_v2", "radial", "random")]),
    ("evaluate --metrics psnr,v", ["psnr,vmaf"]),
    ("experiment launch --on ", ["local", "slurm"]),
]  # fmt: skip


def propose(line: str) -> list[str]:
    words = ["jali", *line.split(" ")]
    asked = {"COMP_WORDS": " ".join(words), "COMP_CWORD": str(len(words) - 1)}
    code = (
        "import sys, atexit; from jali.cli.main import app;"
        "atexit.register(lambda: print('torch' in sys.modules, file=sys.stderr));"
        "app(prog_name='jali')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={**os.environ, "_JALI_COMPLETE": "complete_bash", **asked},
    )  # fmt: skip
    assert done.stderr.splitlines()[-1] == "False", "torch takes seconds"
    return done.stdout.split()


@pytest.mark.parametrize(("line", "words"), PROPOSED, ids=[line for line, _ in PROPOSED])
def test_what_is_proposed(line: str, words: list[str]) -> None:
    assert propose(line) == words


def test_presets_of_a_model() -> None:
    import typer

    context = typer.Context(typer.main.get_command(typer.Typer(callback=lambda: None)))
    context.params = {"model": "nano"}
    assert "psa_topk" not in completion.presets(context, "")
    assert "psa_topk" in completion.presets(typer.Context(context.command), "psa")


def test_installing_it(tmp_path: Path) -> None:
    """A shell that starts afterwards has it; nothing outside the home is touched."""
    done = subprocess.run(
        [sys.executable, "-m", "jali", "--install-completion", "bash"], capture_output=True,
        text=True, env={**os.environ, "HOME": str(tmp_path)}, check=True,
    )  # fmt: skip
    assert "bash completion installed" in done.stdout
    code = "source ~/.bashrc; complete -p jali"
    env = {"HOME": str(tmp_path), "PATH": os.environ["PATH"]}
    shell = subprocess.run(["bash", "-c", code], capture_output=True, text=True, env=env)
    assert "_jali_completion jali" in shell.stdout
