"""`jali demo` on the model: both clips, the files, the words, and every way to end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("av")

from jali.clips.clip import read_clip
from jali.evaluation.demo import clips
from jali.evaluation.quality import metric
from jali.generation import read_run
from jali.methods import METHODS

Jali = Callable[..., Any]
Tiny = tuple[str, ...]
TOP = ["demo.json", "dense", "index.html", "rd", "side-by-side.mp4", "strip.png"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture(scope="module")
def made(
    jali: Jali, weights: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """One demo that really is sparse: 3×8×16 tokens are 2 by 3 blocks."""
    folder = tmp_path_factory.mktemp("demo") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clips, "FULL", {"height": 64, "width": 128, "num_frames": 9})
        done = jali("demo", "--json", f"--path={weights}", "--steps=2", "--seed=3", "--output-dir",
                    folder, "--prompt", "a red ball moves right")  # fmt: skip
    assert done.exit_code == 0, done.stderr
    told: dict[str, Any] = json.loads(done.stdout)
    return folder, told


def test_the_files(made: tuple[Path, dict[str, Any]]) -> None:
    folder, told = made
    assert names(folder) == TOP == told["files"]
    assert json.loads((folder / "demo.json").read_text()) == told
    for run in ("dense", "sparse"):
        clip = read_clip(folder / told[run]["video"])
        assert clip.frames.shape == (9, 64, 128, 3)
    page = (folder / "index.html").read_text()
    assert "rd total 0.3 against dense" in page
    assert "http" not in page.partition("<script")[0].replace("http-equiv", "")


def test_both_runs_differ_in_the_method_alone(made: tuple[Path, dict[str, Any]]) -> None:
    folder, told = made
    dense, sparse = (read_run(folder / name) for name in ("dense", "rd"))
    other = set(dense.settings.differences(sparse.settings))
    assert other <= {
        "method",
        "budget",
        "total",
        "curve",
        "attention",
        "warmup_frac",
        "dense_first_layer",
    }
    assert dense.clips[0].seed == sparse.clips[0].seed == 3
    assert dense.clips[0].cost == 1
    assert told["dense"]["cost"] == 1 > told["sparse"]["cost"] >= told["sparse"]["sparse_cost"]
    assert (sparse.settings.total, sparse.settings.curve) == (0.3, "exponential")
    assert told["speed_up"] == pytest.approx(
        dense.clips[0].seconds / sparse.clips[0].seconds, rel=1e-3
    )


def test_the_metrics_are_of_the_lossless_frames(made: tuple[Path, dict[str, Any]]) -> None:
    folder, told = made
    runs = [read_run(folder / name) for name in ("dense", "rd")]
    dense, sparse = (read_clip(run.path(run.clips[0].lossless)).frames for run in runs)
    assert not torch.equal(dense, sparse)
    assert told["psnr"] == pytest.approx(float(metric.psnr(dense, sparse).mean()), abs=1e-3)
    assert told["ssim"] == pytest.approx(float(metric.ssim(dense, sparse).mean()), abs=1e-3)


def test_words_and_a_second_demo_in_the_same_place(jali: Jali, tiny: Tiny, tmp_path: Path) -> None:
    folder = tmp_path / "new" / "out"
    done = jali("demo", *tiny, "--output-dir", folder)
    assert done.exit_code == 0, done.stderr
    assert done.stdout.rstrip().splitlines()[-1] == f"Open {folder / 'index.html'}"
    for word in (
        "asked",
        "in all",
        "calls calls clip clip",
        "PSNR",
        "rd 0.30",
        "side-by-side.mp4",
    ):
        assert word in " ".join(done.stdout.split())
    for word in ("loading nano", "dense: 1 steps", "rd: decoding", "measuring"):
        assert word in done.stderr
    # One block cannot be left out, so the clips are the same, and it says so.
    assert "same" in done.stdout
    before = (folder / "demo.json").read_text()
    done = jali("demo", *tiny, "--quick", "--method=psa", "--budget=0.5", "--output-dir", folder)
    assert done.exit_code == 0, done.stderr
    assert names(folder) == sorted({*TOP, "psa"} - {"rd"})
    assert (folder / "demo.json").read_text() != before


def test_a_prompt_outside_the_grammar(jali: Jali, tiny: Tiny, tmp_path: Path) -> None:
    pytest.importorskip("jali.nano.grammar")
    done = jali("demo", *tiny, "--prompt", "Ein [rotes] Haus 🏠", "--output-dir", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert "names no colour, shape, motion that nano knows" in done.stderr
    assert "“Ein [rotes] Haus 🏠”, 32×32×5" in done.stdout
    assert (
        json.loads((tmp_path / "out" / "demo.json").read_text())["prompt"] == "Ein [rotes] Haus 🏠"
    )


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("--method=dense",), "got 'dense'"),
        (("--method=entrpy",), "did you mean"),
        (("--budget=0",), "budget must be a number above 0 and at most 1, got 0.0"),
        (("--budget=1.5",), "budget must be a number above 0 and at most 1, got 1.5"),
        (("--budget=nan",), "budget must be a number above 0 and at most 1, got nan"),
        (("--steps=0",), "steps must be 1 to 50, got 0"),
        (("--seed=-1",), "seed must be a whole number of at least 0, got -1"),
        (("--prompt=  ",), "--prompt is empty"),
        (("--tensors", "--prompt=a ball"), "--prompt is about the model"),
        (("--tensors", "--budget=2"), "budget must be a number above 0 and at most 1, got 2.0"),
        (("--path=/no/such/folder",), "no folder /no/such/folder"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_what_is_refused(
    words: tuple[str, ...], told: str, jali: Jali, weights: Path, tmp_path: Path
) -> None:
    path = () if any("--tensors" in w or "--path" in w for w in words) else (f"--path={weights}",)
    done = jali("demo", *path, *words, "--output-dir", tmp_path / "out")
    assert done.exit_code == 2
    said = [line for line in done.stderr.splitlines() if "take the times with care" not in line]
    said = [line for line in said if line != "loading nano"]
    assert len(said) == 1
    assert said[0].startswith("jali: ")
    assert told in said[0]
    assert names(tmp_path) == []


def test_a_damaged_file_names_itself(jali: Jali, weights: Path, tmp_path: Path) -> None:
    import shutil

    copy = shutil.copytree(weights, tmp_path / "nano")
    file = next((copy / "vae").glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:-100])
    done = jali("demo", f"--path={copy}", "--output-dir", tmp_path / "out")
    assert done.exit_code in (1, 2)
    assert file.name in done.stderr
    assert not (tmp_path / "out").exists()


def test_ctrl_c_leaves_what_was_there(
    jali: Jali, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second run, so that the first is already written."""
    produce = clips.produce

    def interrupted(*given: Any) -> Any:
        if given[2].label != "dense":
            raise KeyboardInterrupt
        return produce(*given)

    monkeypatch.setattr(clips, "produce", interrupted)
    done = jali("demo", *tiny, "--output-dir", tmp_path / "a" / "out")
    assert done.exit_code == 130
    assert done.stderr.splitlines()[-1] == "jali: interrupted; nothing was written"
    assert names(tmp_path) == []


def test_a_failure_at_the_end_leaves_the_demo_before(
    jali: Jali, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    assert jali("demo", *tiny, "--output-dir", folder).exit_code == 0
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(clips, "write_page", full)
    done = jali("demo", *tiny, "--output-dir", folder)
    assert done.exit_code == 1
    assert "No space left on device" in done.stderr
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_without_weights_the_tensors_are_shown(
    jali: Jali, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jali.evaluation.demo import tensors
    from jali.integration.models import registry

    nowhere = property(lambda _: str(tmp_path / "nowhere"))
    monkeypatch.setattr(registry.ModelCard, "location", nowhere)
    monkeypatch.setattr(tensors, "QUICK", (2, 8, 8))
    monkeypatch.setitem(sys.modules, "matplotlib", None)  # pictures have a test of their own
    done = jali("demo", "--quick", "--json", "--steps=4", "--output-dir", tmp_path / "out")
    assert done.exit_code == 0, done.stderr
    assert done.stderr == (
        "jali: this installation came without the weights of nano; here is the demo on tensors "
        "instead, without --steps\n"
    )
    methods = [row["method"] for row in json.loads(done.stdout)["rows"]]
    assert methods == [name for name in METHODS if name != "dense"]


def test_without_a_package_too(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "av" else found(name)
    )
    assert clips.why_not("anywhere") == "the model needs av (pip install 'jali[quality]')"


def test_warming_up_is_quiet(
    weights: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That so few tokens gain nothing is true of the warm-up alone."""
    monkeypatch.setattr(clips, "produce", lambda *given: given[2].label)
    monkeypatch.setattr(clips, "QUICK", {"height": 64, "width": 64, "num_frames": 5})
    settings = clips.demo_settings(quick=True, steps=1, path=str(weights))
    caplog.clear()  # that one step is all dense was said of the settings
    both = clips.generate_both(settings, "a red ball", tmp_path)
    assert both == ("dense", "rd")
    assert not caplog.records


def test_the_usual_settings_are_those_that_the_help_names(jali: Jali) -> None:
    text = " ".join(jali("demo", "--help").stdout.replace("│", " ").split())
    for value in (clips.METHOD, clips.STEPS):
        assert f"[default: ({value})]" in text
    assert f"[default: ({clips.TOTAL} of all work, most of it early)]" in text
    assert clips.STEPS <= 10
    for size, tokens in ((clips.FULL, 9600), (clips.QUICK, 2304)):
        frames = (size["num_frames"] + 3) // 4
        assert frames * (size["height"] // 8) * (size["width"] // 8) == tokens


def test_the_usual_prompt_is_in_the_grammar() -> None:
    pytest.importorskip("jali.nano.grammar")
    assert clips.unknown_words(clips.PROMPT) is None
