"""`jali generate`: folders, resume, what is refused and with which code."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import forked

pytest.importorskip("diffusers")
pytest.importorskip("av")

from jali.clips.clip import read_clip
from jali.generation import read_run

Jali = Callable[..., Any]
Small = tuple[str, ...]
BLOCKS = ("--option=q_block=16", "--option=k_block=16")


def test_one_prompt_to_one_folder(jali: Jali, small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--prompt", "a red ball", "--budget=0.4", *BLOCKS, "--output-dir", folder)
    done = jali("generate", *small, *words)
    assert done.exit_code == 0, done.stderr
    said = f"{folder}: 1 clip, first clip, with loading and compilation:"
    assert said in " ".join(done.stdout.split())
    assert "rd: asked 0.40" in done.stdout
    run = read_run(folder)
    assert run.complete
    assert run.settings.options == {"q_block": 16, "k_block": 16}
    # Once more: nothing is made, and the answer is the same.
    before = (folder / "manifest.json").stat().st_mtime_ns
    done = jali("generate", *small, *words, "--json")
    assert (folder / "manifest.json").stat().st_mtime_ns == before
    told = json.loads(done.stdout)
    assert told.pop("folder") == str(folder)
    assert told == json.loads((folder / "manifest.json").read_text())


def test_dense_beside_sparse(jali: Jali, small: Small, tmp_path: Path) -> None:
    file = tmp_path / "p.txt"
    file.write_text("a cat\na dog\na bird\n")
    words = ("--prompts", file, "--num-prompts=2", "--with-dense", "--output-dir", tmp_path / "out")
    done = jali("generate", *small, "--method=local", "--budget=0.4", *BLOCKS, *words)
    assert done.exit_code == 0, done.stderr
    assert sorted(os.listdir(tmp_path / "out")) == ["dense", "local"]
    dense, sparse = (read_run(tmp_path / "out" / name) for name in ("dense", "local"))
    assert (
        [c.name for c in dense.clips]
        == [c.name for c in sparse.clips]
        == ["0000-a-cat", "0001-a-dog"]
    )
    assert dense.clips[0].cost == 1 > sparse.clips[0].cost
    one, two = (read_clip(run.path(run.clips[0].lossless)).frames for run in (dense, sparse))
    assert not torch.equal(one, two)
    assert "jali compare" in done.stdout
    # Both were warmed up, so that their seconds can be compared.
    assert "first clip" not in done.stdout
    assert " ".join(done.stdout.split()).count("2 clips, ") == 2
    # A third folder in it, or one run in the place of two, is refused.
    done = jali("generate", *small, "--method=psa", "--budget=0.4", *words)
    assert done.exit_code == 2
    assert "holds local, which is not of this run" in done.stderr
    done = jali("generate", *small, "--method=local", "--budget=0.4", *words[:2], *words[4:])
    assert done.exit_code == 2
    assert "holds runs in folders of its own" in done.stderr


@pytest.mark.parametrize(
    ("cold", "call", "said"),
    [
        ((True,), None, "1 clip, first clip, with loading and compilation: 10.0 s"),
        ((True, False, False), 7.25, "3 clips, 11.5 s each; first clip, with loading and "
                                     "compilation: 10.0 s (7.2 s its first transformer call)"),
        ((False, False), None, "2 clips, 10.5 s each"),
    ],
)  # fmt: skip
def test_seconds_of_a_first_clip_are_named(
    cold: tuple[bool, ...], call: float | None, said: str
) -> None:
    from types import SimpleNamespace

    from jali.cli.generate import _times

    clips: Any = [
        SimpleNamespace(cold=own, seconds=10.0 + i, seconds_first_call=call if own else None)
        for i, own in enumerate(cold)
    ]
    assert _times(clips) == said


def test_shipped_prompts_without_any(jali: Jali, small: Small, tmp_path: Path) -> None:
    from jali.generation.prompts import default_prompts

    done = jali("generate", *small, "--method=dense", "--num-prompts=1", "--output-dir",
                tmp_path / "run", "--json")  # fmt: skip
    told = json.loads(done.stdout)
    assert told["clips"][0]["prompt"] == default_prompts("wan-t2v-1.3b")[0]


def test_folders_by_name(
    jali: Jali, small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another prompt goes to another folder; the same one finds its own again."""
    monkeypatch.chdir(tmp_path)
    for prompt, name in (("a cat", "dense"), ("a dog", "dense-2"), ("a cat", "dense")):
        done = jali("generate", *small, "--method=dense", "--prompt", prompt, "--json")
        assert json.loads(done.stdout)["folder"] == f"outputs/wan-t2v-1.3b-{name}"
    assert sorted(os.listdir("outputs")) == ["wan-t2v-1.3b-dense", "wan-t2v-1.3b-dense-2"]


def test_a_file_that_is_for_another_grid(jali: Jali, small: Small, tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    text = "presets:\n  mine:\n    method: local\n    video_scale: {width_divisor: 16, " \
           "height_divisor: %d, depth_divisor: 4}\n"  # fmt: skip
    for height, code in ((8, 2), (16, 0)):
        file.write_text(text % height)
        done = jali("generate", *small, "--prompt=a cat", "--config", file, "--preset=mine",
                    "--output-dir", tmp_path / "run")  # fmt: skip
        assert done.exit_code == code, done.stderr
        assert ("by its video_scale, but this run has 3×4×4" in done.stderr) == (code == 2)


def test_a_lora_is_used(jali: Jali, small: Small, checkpoint: Path, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from diffusers import WanTransformer3DModel
    from safetensors.torch import save_file

    module = WanTransformer3DModel.from_pretrained(checkpoint / "transformer").blocks[1].attn1.to_q
    torch.manual_seed(0)
    key = "transformer.blocks.1.attn1.to_q"
    save_file(
        {
            f"{key}.lora_A.weight": torch.randn(4, module.in_features),
            f"{key}.lora_B.weight": torch.randn(module.out_features, 4),
        },
        tmp_path / "lora.safetensors",
    )
    frames = {}
    for name, extra in (("plain", ()), ("lora", ("--lora", tmp_path / "lora.safetensors"))):
        done = jali("generate", *small, "--method=dense", "--prompt=a cat", *extra, "--output-dir",
                    tmp_path / name)  # fmt: skip
        assert done.exit_code == 0, done.stderr
        run = read_run(tmp_path / name)
        frames[name] = read_clip(run.path(run.clips[0].lossless)).frames
    assert run.settings.lora == str(tmp_path / "lora.safetensors")
    assert not torch.equal(frames["plain"], frames["lora"])


def test_a_book_is_replayed(jali: Jali, small: Small, tmp_path: Path) -> None:
    book = tmp_path / "book.safetensors"
    size = [word for word in small if not word.startswith("--argument")]
    made = jali("calibrate", *size, "--num-prompts=1", "--q-block=16", "--k-block=16",
                "--output", book)  # fmt: skip
    assert made.exit_code == 0, made.stderr
    words = ("--masks", book, "--budget=0.4", "--num-prompts=1", "--output-dir", tmp_path / "run")
    without_steps = [word for word in size if not word.startswith("--steps")]
    done = jali("generate", *without_steps, *words, "--json")
    assert done.exit_code == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["settings"]["method"] == "cached"
    assert told["settings"]["steps"] == 3  # those of the book
    assert len(told["settings"]["attention"]["options"]["book"]) == 64
    assert told["clips"][0]["sparse_calls"] > 0
    assert read_run(tmp_path / "run").settings.resolve().digest == told["digest"]
    done = jali("generate", *without_steps, "--steps=4", *words)
    assert done.exit_code == 2
    assert "is for 3 steps, and 4 are asked for" in done.stderr
    done = jali("generate", *without_steps, "--height=128", *words[:-1], tmp_path / "other")
    assert done.exit_code == 2
    assert "the book is for the grid 3×4×4" in done.stderr
    done = jali("bench", "pipeline", *size, "--masks", book, "--methods=local", "--budgets=0.4",
                "--num-prompts=1", "--output-dir", tmp_path / "bench", "--json")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    labels = [row["label"] for row in json.loads(done.stdout)["rows"]]
    assert labels == ["dense", "local-0.4", "cached-0.4"]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--model=wan-t2v-2b"], "unknown model 'wan-t2v-2b'"),
        (["--method=entropie"], "unknown method or preset 'entropie'; did you mean 'entropy'?"),
        (["--budget=1.5"], "--budget must be a number above 0 and at most 1, got 1.5"),
        (["--option=samples"], "--option is NAME=VALUE, got 'samples'"),
        (["--option=colour=red"], "has no key 'colour'"),
        (["--preset=psa_fast"], "has no preset 'psa_fast'"),
        (["--prompt="], "--prompt is empty"),
        (["--prompts=none.txt"], "there is no prompt file none.txt"),
        (["--num-prompts=999"], "but there are only"),
        (["--height=65"], "multiple of 16 pixels, got 65; the nearest are 64 and 80"),
        (["--num-frames=8"], "the nearest are 5 and 9"),
        (["--path=/no/such"], "/no/such"),
        (["--dtype=int4"], "dtype must be one of"),
        (["--lora=none.safetensors"], "no LoRA at none.safetensors"),
        (["--masks=none.safetensors"], "none.safetensors"),
        (["--config=none.yaml"], "no preset file none.yaml"),
        (["--context-parallel=2"], "torchrun --nproc-per-node 2 -m jali generate"),
        (["--cpu-offload"], "the device is the CPU"),
        (["--argument=colour=1"], "--argument: the pipeline of wan-t2v-1.3b has no argument"),
        (["--argument=prompt=x"], "--argument prompt is set by jali"),
        (["--model=cogvideox-5b"], "is not cogvideox-5b"),
    ],
)
def test_bad_input_is_one_sentence_and_code_2(
    words: list[str], sentence: str, jali: Jali, small: Small, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    done = jali("generate", *small, *words, "--output-dir", folder)
    assert done.exit_code == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("jali: ")
    assert sentence in last.replace("\n", " ")
    assert not done.stdout
    assert not folder.exists()


def test_another_run_in_the_folder(jali: Jali, small: Small, tmp_path: Path) -> None:
    words = ("--prompt=a cat", "--output-dir", tmp_path / "run")
    assert jali("generate", *small, "--method=dense", *words).exit_code == 0
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    done = jali("generate", *small, "--output-dir", tmp_path / "run" / "manifest.json")
    assert done.exit_code == 2
    assert "is a file, and a run needs a folder" in done.stderr
    done = jali("generate", *small, "--method=dense", "--seed=3", *words)
    assert done.exit_code == 2
    assert "was made with other settings: seed is 0, not 3" in done.stderr
    done = jali("generate", *small, "--method=dense", "--with-dense", *words)
    assert done.exit_code == 0  # dense beside dense is one run
    assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_ctrl_c_and_go_on(jali: Jali, small: Small, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    words = ("--method=dense", "--num-prompts=20", "--steps=12")
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    command = ("generate", *small, *words, "--output-dir", str(folder))
    process = forked.start(forked.run_command, command, out, err, None)
    deadline = time.monotonic() + 100
    while not (folder / "manifest.json").exists() and time.monotonic() < deadline:
        assert process.is_alive(), err.read_text()
        time.sleep(0.02)
    assert process.pid is not None
    os.kill(process.pid, signal.SIGINT)
    process.join(60)
    assert process.exitcode == 130, err.read_text()
    assert err.read_text().splitlines()[-1] == "jali: interrupted; what is finished is kept"
    assert not out.read_text()
    half = read_run(folder)
    assert not half.complete
    assert 1 <= len(half.clips) < 20
    assert not [name for name in os.listdir(folder) if name.startswith(".")]
    count = len(half.clips) + 1
    done = jali("generate", *small, *words[:1], f"--num-prompts={count}", "--steps=12",
                "--output-dir", folder)  # fmt: skip
    assert done.exit_code == 0, done.stderr
    whole = read_run(folder)
    assert whole.complete
    assert whole.clips[: len(half.clips)] == half.clips


def test_a_full_disk_is_a_failed_job(small: Small, tmp_path: Path) -> None:
    """No file may grow beyond 2 kB: the first clip cannot be written."""
    folder = tmp_path / "run"
    out, err = tmp_path / "out.txt", tmp_path / "err.txt"
    words = ("generate", *small, "--method=dense", "--num-prompts=1", "--output-dir", str(folder))
    process = forked.start(forked.run_command, words, out, err, 2048)
    process.join(100)
    said = err.read_text()
    assert process.exitcode == 1, said
    assert said.splitlines()[-1].startswith("jali: ")
    assert "Traceback" not in said
    assert not folder.exists()
