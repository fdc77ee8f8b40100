"""Run folders: what is written, how a run goes on, and what is refused."""

from __future__ import annotations

import base64
import fcntl
import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("av")

from jali.clips.clip import read_clip, to_uint8
from jali.generation import RunFolderError, Settings, Tick, produce, produce_runs, read_run
from jali.generation.folder import clip_name
from jali.generation.produce import frames_of
from jali.generation.settings import dense_twin

Make = Callable[..., Settings]
PROMPTS = ("a red ball", "two blue cats")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.fixture(scope="module")
def made(pipe: Any, settings: Make, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "entropy"
    produce(pipe, PROMPTS, settings(), folder)
    return folder


# What is written


def test_the_manifest_says_everything(made: Path) -> None:
    data = json.loads((made / "manifest.json").read_text())
    assert (data["kind"], data["version"], data["complete"]) == ("jali-run", 1, True)
    assert {"device", "cpu", "threads"} <= set(data["machine"])
    assert {"python", "torch", "diffusers", "triton"} <= set(data["versions"])
    settings = data["settings"]
    assert settings["guidance"] == 5.0  # the model's own
    assert (settings["warmup_frac"], settings["dense_first_layer"]) == (0.2, True)
    assert settings["attention"]["schedule"]["dense_steps"] == 0.2
    assert settings["attention"]["options"]["budget"]["mean"] == 0.4
    names = [clip["name"] for clip in data["clips"]]
    assert names == ["0000-a-red-ball", "0001-two-blue-cats"]
    assert [clip["seed"] for clip in data["clips"]] == [0, 1]
    for clip in data["clips"]:
        assert 0 < clip["seconds_transformer"] < clip["seconds"]
        # Step 0 is dense on both layers and branches, layer 0 always.
        assert clip["dense_reasons"] == {"first steps": 4, "layer 0": 4}
        assert (clip["calls"], clip["sparse_calls"]) == (12, 4)
        assert clip["cost"] == pytest.approx((8 + 4 * clip["sparse_cost"]) / 12)
        assert "entropy: asked 0.40" in clip["summary"]
    listed = {clip[key] for clip in data["clips"] for key in ("video", "lossless", "sites")}
    assert listed | {"manifest.json"} == set(os.listdir(made))
    assert read_run(made).to_dict() == data


def test_lossless_frames_are_the_frames(made: Path, pipe: Any) -> None:
    run = read_run(made)
    settings = run.settings
    from jali import sparse_processor_mode

    with sparse_processor_mode(pipe, method=settings.make_method()):
        frames = frames_of(pipe, settings, PROMPTS[1], 1)
    clip = read_clip(run.path(run.clips[1].lossless))
    assert torch.equal(clip.frames, to_uint8(frames))
    assert clip.fps == 16
    seen = read_clip(run.path(run.clips[1].video)).frames
    assert seen.shape == clip.frames.shape


def test_dense_is_the_stock_pipeline_bit_for_bit(pipe: Any, settings: Make, tmp_path: Path) -> None:
    run = produce(
        pipe, PROMPTS[:1], settings(method="dense", budget=None, options={}), tmp_path / "d"
    )
    plain = frames_of(pipe, run.settings, PROMPTS[0], 0)
    clip = run.clips[0]
    assert torch.equal(read_clip(run.path(clip.lossless)).frames, to_uint8(plain))
    assert (clip.cost, clip.sparse_cost, clip.sparse_calls) == (1.0, None, 0)
    assert run.settings.label == "dense"


def test_sites_hold_the_cost_of_every_head(made: Path) -> None:
    run = read_run(made)
    data = json.loads(run.path(run.clips[0].sites).read_text())
    assert (data["grid"], data["layers"], data["steps"], data["heads"]) == ([3, 4, 4], 2, 3, 2)
    assert len(data["rows"]) == 12
    for row in data["rows"]:
        assert len(row["heads"]) == 2
        assert sum(row["heads"]) / 2 == pytest.approx(row["cost"], abs=1e-3)
        dense = row["layer"] == 0 or row["step"] == 0
        assert (row["reason"] is not None) == dense
        assert (row["cost"] == 1) == dense
    assert {row["branch"] for row in data["rows"]} == {"cond", "uncond"}


@pytest.mark.parametrize("method", ["entropy", "psa", "local"])
def test_plans_show_what_a_query_block_reads(
    method: str, pipe: Any, settings: Make, tmp_path: Path
) -> None:
    from jali.generation.call_record import PlanRecorder
    from jali.integration.transformer import AttentionCall

    seen: list[AttentionCall] = []
    watched = PlanRecorder.__call__

    def keep(self: PlanRecorder, call: AttentionCall) -> None:
        seen.append(call)
        watched(self, call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PlanRecorder, "__call__", keep)
        run = produce(pipe, PROMPTS[:1], settings(method=method), tmp_path / method)
    plans = json.loads(run.path(run.clips[0].sites).read_text())["plans"]
    assert plans
    for plan in plans:
        levels = torch.frombuffer(bytearray(base64.b64decode(plan["levels"])), dtype=torch.uint8)
        assert plan["grid"] == [3, 4, 4]
        assert len(levels) == 48
        call = next(
            c
            for c in seen
            if (c.site.layer, c.site.step, c.site.branch)
            == (plan["layer"], plan["step"], plan["branch"])
        )
        executed = call.result.executed
        assert executed is not None
        layout, blocks = executed.layout, executed.blocks
        # By hand, token by token: where a token went, and what its block is read at.
        row = executed.levels[0, plan["head"], plan["query_block"]]
        slots = range(48) if layout.k.inverse is None else layout.k.inverse.tolist()
        assert levels.tolist() == [int(row[slot // blocks.k]) for slot in slots]
        own = [i for first, count in plan["query_tokens"] for i in range(first, first + count)]
        q_slots = range(48) if layout.q.inverse is None else layout.q.inverse.tolist()
        assert own == [t for t, s in enumerate(q_slots) if s // blocks.q == plan["query_block"]]
        assert all(levels[token] for token in own)  # a block always reads itself


def test_large_plans_are_thinned() -> None:
    from jali.generation import call_record
    from jali.planning.plan import full_plan
    from jali.planning.site import Site
    from jali.tokens.grid import TokenGrid
    from jali.tokens.layout import Blocks, block_layout

    grid = TokenGrid.video(21, 45, 80, text=20)
    plan = full_plan(block_layout(grid, blocks=Blocks(256, 128)))
    found = call_record._footprint(Site(1, 4, 2, 8), grid, plan, 0, 14_000)
    frames, height, width = found["grid"]
    assert frames == 21
    assert 45 / height == pytest.approx(80 / width, rel=0.1)
    assert len(found["levels"]) <= 14_004
    assert len(base64.b64decode(found["levels"])) == frames * height * width


def test_images_are_pictures(tmp_path: Path) -> None:
    import tiny
    from PIL import Image

    settings = Settings("flux.1-dev", height=32, width=64, steps=2, device="cpu", method="dense",
                        arguments={"max_sequence_length": 16})  # fmt: skip
    run = produce(tiny.flux(), ["a cat"], settings, tmp_path / "flux")
    clip = run.clips[0]
    assert clip.image is not None
    picture = torch.frombuffer(
        bytearray(Image.open(run.path(clip.image)).tobytes()), dtype=torch.uint8
    )
    assert torch.equal(picture.view(32, 64, 3), read_clip(run.path(clip.lossless)).frames[0])


@pytest.mark.parametrize(
    ("prompt", "name"),
    [
        ("A red ball.", "0007-a-red-ball"),
        ("Ein Tänzer übt", "0007-ein-tanzer-ubt"),
        ("猫が走る", "0007"),
        ("../../etc/passwd", "0007-etc-passwd"),
        ("x" * 300, "0007"),
        ("to be or not to be that is the question, asked Hamlet",
         "0007-to-be-or-not-to-be-that-is-the-question"),
    ],
)  # fmt: skip
def test_names(prompt: str, name: str) -> None:
    assert clip_name(7, prompt) == name


# Going on


def test_an_interrupted_run_goes_on(pipe: Any, settings: Make, made: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def stop(tick: Tick) -> None:
        if tick.clip == 1 and tick.step == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        produce(pipe, PROMPTS, settings(), folder, stop)
    half = read_run(folder)
    assert (len(half.clips), half.complete) == (1, False)
    assert set(os.listdir(folder)) == {"manifest.json", *half.clips[0].files}
    before = contents(folder)
    (folder / ".0001-two-blue-cats.mkv.x7").write_bytes(b"what a killed process leaves")
    whole = produce(pipe, PROMPTS, settings(), folder)
    assert whole.complete
    assert set(os.listdir(folder)) == {
        "manifest.json",
        *whole.clips[0].files,
        *whole.clips[1].files,
    }
    assert all(contents(folder)[name] == before[name] for name in half.clips[0].files)
    for name in ("0000-a-red-ball.mkv", "0001-two-blue-cats.mkv"):
        assert torch.equal(read_clip(folder / name).frames, read_clip(made / name).frames)


def test_a_finished_run_is_left_alone_and_can_grow(
    pipe: Any, settings: Make, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    produce(pipe, PROMPTS[:1], settings(), folder)
    before = contents(folder)
    again = produce(settings().model, PROMPTS[:1], settings(), folder)  # nothing is loaded
    assert contents(folder) == before
    assert again.clips == read_run(folder).clips
    assert len(produce(pipe, PROMPTS, settings(), folder).clips) == 2
    assert len(produce(pipe, PROMPTS[:1], settings(), folder).clips) == 2


def test_progress_follows_the_steps(pipe: Any, settings: Make, tmp_path: Path) -> None:
    ticks: list[Tick] = []
    produce(pipe, PROMPTS[:1], settings(), tmp_path / "run", ticks.append)
    assert [t.step for t in ticks] == [0, 1, 2, 3, 3]
    assert {(t.clips, t.steps, t.prompt) for t in ticks} == {(1, 3, PROMPTS[0])}


def test_another_machine_is_said(
    pipe: Any, settings: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "run"
    produce(pipe, PROMPTS[:1], settings(), folder)
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["versions"]["torch"] = "1.0"
    (folder / "manifest.json").write_text(json.dumps(manifest))
    produce(pipe, PROMPTS, settings(), folder)
    assert "another torch than before" in caplog.text


# What is refused


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"budget": 0.2}, "budget is 0.4, not 0.2"),
        ({"steps": 4}, "steps is 3, not 4"),
        ({"seed": 1}, "seed is 0, not 1"),
        ({"method": "psa"}, "method is 'entropy', not 'psa'"),
        ({"options": {"q_block": 16, "k_block": 32}}, "options is"),
        ({"warmup_frac": 0.5}, "warmup_frac is 0.2, not 0.5"),
        ({"negative_prompt": "bad"}, "negative_prompt is not set, not 'bad'"),
    ],
)
def test_other_settings_are_refused_by_name(
    change: dict[str, Any], words: str, made: Path, pipe: Any, settings: Make
) -> None:
    before = contents(made)
    with pytest.raises(RunFolderError, match="was made with other settings") as caught:
        produce(pipe, PROMPTS, settings(**change), made)
    assert words in str(caught.value)
    assert contents(made) == before


def test_other_folders_are_refused(made: Path, pipe: Any, settings: Make, tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="another prompt at 1: 'two blue cats'"):
        produce(pipe, ["a red ball", "a dog"], settings(), made)
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(RunFolderError, match=r"holds letter.txt and no manifest.json"):
        produce(pipe, PROMPTS, settings(), tmp_path)
    with pytest.raises(RunFolderError, match="is a file, and a run needs a folder"):
        produce(pipe, PROMPTS, settings(), tmp_path / "letter.txt")
    assert contents(tmp_path) == {"letter.txt": b"dear"}


def test_bad_sizes_leave_nothing_behind(pipe: Any, settings: Make, tmp_path: Path) -> None:
    for change, words in (
        ({"height": 65}, "multiple of 16 pixels, got 65"),
        ({"num_frames": 10}, "frames, got 10"),
        ({"arguments": {"colour": 1}}, "no argument 'colour'"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            produce(pipe, PROMPTS, settings(**change), tmp_path / "deep" / "run")
    assert not (tmp_path / "deep").exists()


def test_bad_prompts(pipe: Any, settings: Make, tmp_path: Path) -> None:
    for prompts, words in (([], "at least one prompt"), ("a cat", "put one text"), ([3], "a text")):
        with pytest.raises((ValueError, TypeError), match=words):
            produce(pipe, prompts, settings(), tmp_path / "run")  # type: ignore[arg-type]


def test_one_process_at_a_time(pipe: Any, settings: Make, tmp_path: Path) -> None:
    handle = os.open(tmp_path / ".lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(RunFolderError, match=f"another process is writing to {tmp_path}"):
        produce(pipe, PROMPTS, settings(), tmp_path)
    os.close(handle)  # as when the process ends, killed or not: its file stays, its lock does not
    produce(pipe, PROMPTS[:1], settings(), tmp_path)
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


def test_a_disk_that_fills_up(
    pipe: Any, settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import jali.clips.clip

    folder = tmp_path / "run"
    produce(pipe, PROMPTS[:1], settings(), folder)
    before = contents(folder)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(jali.clips.clip, "write_mp4", full)
    with pytest.raises(OSError, match="No space"):
        produce(pipe, PROMPTS, settings(), folder)
    kept = contents(folder)
    assert {name: kept[name] for name in before} == before
    monkeypatch.undo()
    assert produce(pipe, PROMPTS, settings(), folder).complete
    assert len(os.listdir(folder)) == 7


def test_killed_before_the_first_manifest(pipe: Any, settings: Make, tmp_path: Path) -> None:
    first = produce(pipe, PROMPTS[:1], settings(), tmp_path)
    before = contents(tmp_path)
    (tmp_path / "manifest.json").unlink()
    (tmp_path / first.clips[0].video).write_bytes(b"half of it")
    (tmp_path / f".{first.clips[0].video}.01234567.part").write_bytes(b"half of it")
    with pytest.raises(RunFolderError, match=r"no manifest.json, so it is not a run"):
        produce(pipe, PROMPTS[1:2], settings(), tmp_path)  # of another prompt, so not ours
    assert produce(pipe, PROMPTS[:1], settings(), tmp_path).complete
    assert contents(tmp_path).keys() == before.keys()
    assert contents(tmp_path)[first.clips[0].video] == before[first.clips[0].video]


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: d.update(kind="other"), "not the manifest of a jali run"),
        (lambda d: d.update(version=9), "has version 9"),
        (lambda d: d["settings"].update(steps=50), "changed by hand"),
        (lambda d: d["settings"].update(colour="red"), "has the setting 'colour'"),
        (lambda d: d.pop("clips"), "'clips' is missing"),
        (lambda d: d["clips"][0].pop("seed"), "is damaged"),
        (lambda d: d["clips"][0].update(video="gone.mp4"), "lists gone.mp4, which is not there"),
        (lambda d: d["clips"][0].update(video="../x.mp4"), "'../x.mp4' is not the name of a file"),
        (lambda d: d["clips"][0].update(name="/tmp/x"), "'/tmp/x' is not the name of a file"),
        (
            lambda d: d["clips"][0].update(seconds="1"),
            r"clips\[0\].seconds must be a finite number",
        ),
        (lambda d: d.update(complete="yes"), "complete must be true or false"),
    ],
)
def test_damaged_manifests(
    damage: Callable[[Any], Any], words: str, made: Path, tmp_path: Path
) -> None:
    for name, data in contents(made).items():
        (tmp_path / name).write_bytes(data)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    damage(manifest)
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(RunFolderError, match=words):
        read_run(tmp_path)


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="there is no folder"):
        read_run(tmp_path / "none")
    with pytest.raises(RunFolderError, match=r"holds no manifest.json"):
        read_run(tmp_path)
    (tmp_path / "manifest.json").write_text("{")
    with pytest.raises(RunFolderError, match="is not JSON"):
        read_run(tmp_path)


# What happens once


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch, pipe: Any) -> list[Any]:
    """Why the attention calls of every mode were dense, by step, and every decoding."""
    from jali.integration.modes import Handle

    told: list[Any] = []
    remove, decode = Handle.remove, pipe.vae.decode

    def removed(handle: Any) -> None:
        if handle.active:
            steps: dict[int, set[str | None]] = {}
            for row in handle.stats().rows:
                steps.setdefault(row.step, set()).add(row.reason)
            told.append(list(steps.values()))
        remove(handle)

    def decoded(*given: Any, **more: Any) -> Any:
        told.append("decoding")
        return decode(*given, **more)

    monkeypatch.setattr(Handle, "remove", removed)
    monkeypatch.setattr(pipe.vae, "decode", decoded)
    return told


def test_a_first_clip_is_marked_and_so_is_the_first_after_a_break(
    pipe: Any, settings: Make, tmp_path: Path
) -> None:
    prompts = ["a", "b", "c", "d"]
    run = produce(pipe, prompts[:2], settings(steps=1), tmp_path / "r")
    assert [clip.cold for clip in run.clips] == [True, False]
    run = produce(pipe, prompts, settings(steps=1), tmp_path / "r")
    assert [clip.cold for clip in run.clips] == [True, False, True, False]
    assert read_run(tmp_path / "r") == run
    warm = produce(pipe, prompts[:1], settings(steps=1), tmp_path / "w", warm=True)
    assert not warm.clips[0].cold
    assert "cold" not in (tmp_path / "w" / "manifest.json").read_text()


def test_compiled_blocks(
    checkpoint: Path, settings: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the settings say; the first clip names what its first call took, no other compiles."""
    from torch._dynamo.utils import counters

    from jali.integration.models import pipeline

    torch.compiler.reset()
    counters.clear()
    traced = functools.partial(pipeline.compile_blocks, backend="eager")
    monkeypatch.setattr(pipeline, "compile_blocks", traced)
    made: list[int] = []

    def note(tick: Tick) -> None:
        if tick.step == 0:
            made.append(counters["stats"]["unique_graphs"])

    asked = settings(path=str(checkpoint), compile=True, steps=2)
    run = produce(asked.model, ["a cat", "two dogs in the snow"], asked, tmp_path, note)
    assert made == [0, 1], "the second clip begins with one graph"
    assert counters["stats"]["unique_graphs"] == 1
    cold, warm = run.clips
    assert cold.seconds > (cold.seconds_first_call or 0) > 0
    assert warm.seconds_first_call is None
    assert read_run(tmp_path) == run
    assert run.settings.compile is True
    torch.compiler.reset()


def test_runs_that_are_compared_are_warmed_up_first(
    pipe: Any, settings: Make, tmp_path: Path, seen: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    """By calls of both kinds, however many steps the schedule keeps dense; decoded once."""
    sparse = settings(warmup_frac=2).resolve(pipe)
    runs = {tmp_path / "dense": dense_twin(sparse), tmp_path / "entropy": sparse}
    made = produce_runs(runs, ["a"], pipe=pipe)
    assert [clip.cold for run in made for clip in run.clips] == [False, False]
    dense, first = {"method dense"}, {"first steps"}
    assert seen == [
        "decoding", [dense], [{"layer 0", None}],
        "decoding", [dense] * 3, "decoding", [first, first, {"layer 0", None}],
    ]  # fmt: skip
    assert caplog.text.count("not expected to be faster") == 1  # the warm-up says nothing
    seen.clear()
    assert produce_runs(runs, ["a"], pipe=pipe) == made
    assert not seen  # there is nothing to warm up for
