"""The real stages on a small real pipeline: complete, resumed within a stage, on several ranks."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("av")
sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))

import rank
from rank import experiment

from jali.clips.clip import read_clip
from jali.experiments.job import run_experiment
from jali.experiments.results import Results
from jali.experiments.stages import all_stages
from jali.experiments.stages.calibration import with_own_book
from jali.experiments.stages.run import calibration_prompts, prompts_of
from jali.experiments.state import State
from jali.experiments.status import read_status
from jali.generation import read_run
from jali.maskbook import MaskBook

FILES = ("masks.safetensors", "quality.json")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    import checkpoints

    return str(checkpoints.save("wan-t2v-1.3b", tmp_path_factory.mktemp("wan")))


@pytest.fixture(scope="module")
def done(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """An experiment that nothing disturbed."""
    folder = tmp_path_factory.mktemp("done")
    results = Results(folder / "results", folder / "logs")
    run_experiment(experiment(checkpoint), results, all_stages())
    return results


def process(
    checkpoint: str,
    results: Results,
    kill: str = "",
    env: Mapping[str, str] = {},
    **changes: object,
) -> BaseProcess:
    """Another process. All are forked from one that has imported the libraries, and no more."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["preloaded"])
    made = context.Process(target=rank.main, args=(checkpoint, results, kill, env, changes))
    made.start()
    return made


def stages_of(results: Results) -> dict[str, str]:
    entry = State.read(results.state("a"))
    assert entry is not None
    return entry.stages


def test_every_stage_leaves_its_files(done: Results, checkpoint: str) -> None:
    folder = done.folder("a")
    assert [row.state for row in read_status(done, ["a"])] == ["done"]
    book = MaskBook.open(folder / "masks.safetensors")
    assert (book.steps, book.budgets) == (3, (0.4,))
    book.close()
    speed = json.loads(done.speed("a").read_text())
    assert [row["variant"] for row in speed["rows"]] == ["dense", "entropy", "cached"]
    assert speed["rows"][0]["speedup"] == 1.0
    assert speed["machine"]["threads"] == 1
    assert all(len(row["all_seconds"]) == speed["repeats"] for row in speed["rows"])
    quality = json.loads(done.quality("a").read_text())
    assert [row["variant"] for row in quality["rows"]] == ["entropy", "cached"]
    assert all(row["psnr"]["n"] == 2 for row in quality["rows"])
    for variant in ("dense", "entropy", "cached"):
        assert read_run(folder / "clips" / variant).complete
    assert "<html" in (folder / "report.html").read_text()
    e = experiment(checkpoint)
    assert not set(prompts_of(e)) & set(calibration_prompts(e))


def test_again_nothing_is_loaded(done: Results, checkpoint: str) -> None:
    run_experiment(replace(experiment(checkpoint)), done, all_stages())
    assert set(stages_of(done).values()) == {"kept"}


def test_killed_in_every_stage_it_resumes_to_the_same_numbers(
    done: Results, checkpoint: str, results: Results
) -> None:
    kills = ("calibrate 2", "benchmark 3", "quality 10", "report 0")  # 10: the second sparse clip
    stages = [kill.split()[0] for kill in kills]
    clips: dict[Path, int] = {}
    for number, kill in enumerate(kills):
        died = process(checkpoint, results, kill)
        died.join(120)
        assert died.exitcode == -signal.SIGKILL, results.log("a").read_text()
        assert [row.state for row in read_status(results, ["a"])] == ["lost"]
        hows = [stages_of(results)[stage] for stage in stages[: number + 1]]
        # The stage it died in before is done now; those before that one are not touched again.
        assert hows == ["kept"] * (number - 1) + ["done"] * (number > 0) + ["running"]
        assert all(path.stat().st_mtime_ns == when for path, when in clips.items())
        clips = {p: p.stat().st_mtime_ns for p in results.folder("a").glob("clips/*/*.mkv")}
        if kill.startswith("quality"):  # what is complete by then, and stays
            assert len(clips) == 3
    run_experiment(experiment(checkpoint), results, all_stages())
    assert [stages_of(results)[stage] for stage in stages] == ["kept"] * 3 + ["done"]
    for name in FILES:
        assert (results.folder("a") / name).read_bytes() == (done.folder("a") / name).read_bytes()


def test_a_damaged_clip_is_made_again(done: Results, checkpoint: str, results: Results) -> None:
    shutil.copytree(done.root, results.root)
    (clip,) = results.folder("a").glob("clips/entropy/0001*.mkv")
    good = read_clip(clip).frames
    clip.write_bytes(clip.read_bytes()[:1000])
    run_experiment(experiment(checkpoint), results, all_stages())
    assert torch.equal(read_clip(clip).frames, good)
    assert results.quality("a").read_bytes() == done.quality("a").read_bytes()


def test_other_settings_redo_only_what_they_change(
    done: Results, checkpoint: str, results: Results
) -> None:
    shutil.copytree(done.root, results.root)
    dense = results.folder("a") / "clips" / "dense" / "manifest.json"
    before = dense.stat().st_mtime_ns
    other = experiment(checkpoint, method="psa", budget=0.6)
    run_experiment(other, results, all_stages(), overwrite=True)
    assert stages_of(results)["calibrate"] == "none"
    assert dense.stat().st_mtime_ns == before
    rows = json.loads(results.quality("a").read_text())["rows"]
    assert [row["variant"] for row in rows] == ["psa"]


def test_dense_clips_are_borrowed_from_a_finished_experiment(
    done: Results, checkpoint: str, results: Results
) -> None:
    shutil.copytree(done.root, results.root)
    other = experiment(checkpoint, tag="b", method="psa")
    run_experiment(other, results, all_stages())
    assert "the dense clips are those of a" in results.log("b").read_text()
    name = "clips/dense/manifest.json"
    assert (results.folder("b") / name).read_bytes() == (results.folder("a") / name).read_bytes()
    # One that was tampered with lends nothing, and another seed is another run.
    (clip,) = results.folder("a").glob("clips/dense/0001*.mkv")
    clip.write_bytes(b"")
    (clip,) = results.folder("b").glob("clips/dense/0001*.mkv")
    clip.write_bytes(b"")
    run_experiment(replace(other, tag="c"), results, all_stages())
    assert "are those of" not in results.log("c").read_text()
    rows = [json.loads(results.quality(tag).read_text())["rows"] for tag in ("b", "c")]
    assert rows[0] == rows[1]


def test_skip_calibrate_takes_the_book_that_is_there(done: Results, checkpoint: str) -> None:
    same = with_own_book(experiment(checkpoint, calibrate=False), done)
    assert same == experiment(checkpoint)
    other = with_own_book(experiment(checkpoint, calibrate=False, budget=0.7), done)
    assert other.settings.masks == str(done.folder("a") / "masks.safetensors")
    none = with_own_book(experiment(checkpoint, calibrate=False, tag="b"), done)
    assert none.settings.masks is None


def test_two_ranks_and_one_writes(checkpoint: str, results: Results) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    changes = {"context_parallel": 2, "calibrate": False, "num_prompts": 1, "steps": 2}
    running = [
        process(checkpoint, results, "", shared | {"RANK": str(r), "LOCAL_RANK": str(r)}, **changes)
        for r in range(2)
    ]
    for one in running:
        one.join(240)
        assert one.exitcode == 0, results.log("a").read_text()
    assert stages_of(results)["calibrate"] == "none"
    assert [row.state for row in read_status(results, ["a"])] == ["done"]
    settings = read_run(results.folder("a") / "clips" / "entropy").settings
    assert settings.context_parallel == 2


def test_ranks_are_counted(checkpoint: str, results: Results) -> None:
    e = experiment(checkpoint, context_parallel=2, calibrate=False)
    with pytest.raises(ValueError, match=r"for 2 processes, and 1 run; start it with torchrun"):
        run_experiment(e, results, all_stages())


def test_a_book_for_something_else_is_refused(
    done: Results, checkpoint: str, results: Results
) -> None:
    book = str(done.folder("a") / "masks.safetensors")
    e = experiment(checkpoint, masks=book, calibrate=False, steps=4)
    with pytest.raises(ValueError, match=r"steps"):
        run_experiment(e, results, all_stages())
    assert [row.state for row in read_status(results, ["a"])] == ["failed"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_prompts": 1000}, "are shipped for wan-t2v-1.3b"),
        ({"calibration_prompts": 1000}, "are needed to calibrate"),
    ],
)
def test_too_few_prompts_are_said(
    checkpoint: str, results: Results, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        run_experiment(experiment(checkpoint, **changes), results, all_stages())
