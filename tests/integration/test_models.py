"""Models by name: real loading code on small checkpoints, generation, and what is refused."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("diffusers")
pytest.importorskip("transformers")

import checkpoints
import tiny

import jali
from jali.integration.models import registry
from jali.integration.models.integrity import write_checksums
from jali.integration.models.lora import LoraSource, lora_source
from jali.integration.models.pipeline import generate_video, load_pipeline
from jali.integration.models.psa import PSA_MODELS
from jali.integration.models.registry import MODELS, matching, model_card
from jali.integration.models.size import Strides, check_size, strides_of
from jali.integration.modes import sparse_processor_mode
from jali.presets import load_preset, model_names, presets, read_file

NAMES = tuple(checkpoints.BUILDERS)
SIZES = {"wan2.2-ti2v-5b": (64, 96)}
COG = "cogvideox-5b"
WAN = "wan-t2v-1.3b"
TWO = "wan2.2-t2v-a14b"


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("checkpoints")
    return {name: checkpoints.save(name, root / name) for name in NAMES}


def load(name: str, folders: dict[str, Path], **options: Any) -> Any:
    pipe = load_pipeline(name, path=folders[name], device="cpu", **options)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def generate(pipe: Any, name: str, **options: Any) -> torch.Tensor:
    height, width = SIZES.get(name, (16, 32))
    usual: dict[str, Any] = {
        "height": height,
        "width": width,
        "num_frames": 9,
        "steps": 2,
        "max_sequence_length": 16,
    }
    if name == "hunyuan-video":
        usual["prompt_template"] = {"template": "{}", "crop_start": 0}
    return generate_video(pipe, "a cat", name, **(usual | options))


# Loading and generating


@pytest.mark.parametrize("name", NAMES)
def test_load_and_generate(name: str, folders: dict[str, Path]) -> None:
    pipe = load(name, folders)
    assert type(pipe).__name__ == model_card(name).pipeline
    assert pipe.transformer.dtype == torch.float32
    video = generate(pipe, name, seed=3)
    height, width = SIZES.get(name, (16, 32))
    assert video.shape == (9, height, width, 3)
    assert video.dtype == torch.float32
    assert video.device.type == "cpu"
    assert video.isfinite().all()
    assert 0 <= video.min() < video.max() <= 1
    assert torch.equal(video, generate(pipe, name, seed=3))
    assert not torch.equal(video, generate(pipe, name, seed=4))
    # Loaded again, it is the same model.
    assert torch.equal(video, generate(load(name, folders), name, seed=3))


def test_the_call_is_the_pipelines_own(folders: dict[str, Path]) -> None:
    pipe = load(WAN, folders)
    steps: list[int] = []

    def count(_pipe: Any, step: int, _t: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
        steps.append(step)
        return kwargs

    found = generate(pipe, WAN, callback_on_step_end=count, negative_prompt="blurry", seed=5)
    assert steps == [0, 1]
    by_hand = pipe(
        "a cat",
        negative_prompt="blurry",
        height=16,
        width=32,
        num_frames=9,
        num_inference_steps=2,
        guidance_scale=5.0,
        generator=torch.Generator().manual_seed(5),
        output_type="pt",
        max_sequence_length=16,
    ).frames[0]
    assert torch.equal(found, by_hand.permute(0, 2, 3, 1))
    assert not torch.equal(found, generate(pipe, WAN, guidance=1.0, seed=5))
    # The pipeline's own names for steps and guidance serve too.
    own = {"height": 16, "width": 32, "num_frames": 9, "max_sequence_length": 16, "seed": 5}
    theirs = {"num_inference_steps": 2, "guidance_scale": 5.0, "negative_prompt": "blurry"}
    assert torch.equal(found, generate_video(pipe, "a cat", WAN, **own, **theirs))


def test_both_experts_have_their_guidance(folders: dict[str, Path]) -> None:
    name = "wan2.2-t2v-a14b"
    pipe = load(name, folders)
    seen: dict[str, Any] = {}
    kind = type(pipe)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            seen.update(kwargs)
            return super().__call__(*args, **kwargs)

    Watched.__name__ = kind.__name__
    Watched.__call__.__signature__ = inspect.signature(kind.__call__)  # type: ignore[attr-defined]
    pipe.__class__ = Watched
    for given, expected in (
        ({}, (4.0, 3.0)),
        ({"guidance": 2.0}, (2.0, 2.0)),
        ({"guidance": 2.0, "guidance_2": 1.5}, (2.0, 1.5)),
        ({"guidance_2": 1.5}, (4.0, 1.5)),
        ({"guidance_scale": 2.0, "guidance_scale_2": 1.5}, (2.0, 1.5)),
    ):
        generate(pipe, name, **given)
        assert (seen["guidance_scale"], seen["guidance_scale_2"]) == expected
    with pytest.raises(ValueError, match=r"guidance_2 is of the second expert, and wan-t2v-1.3b"):
        generate(load(WAN, folders), WAN, guidance_2=3.0)


def test_further_models_load_and_generate(tmp_path: Path) -> None:
    """Their whole way, from a folder to frames."""
    for name, build, size, strides in (
        ("ltx-video", tiny.ltx, (9, 32, 64), None),
        ("flux.1-dev", tiny.flux, (1, 32, 64), Strides(2, 2, 0)),
    ):
        build().save_pretrained(tmp_path / name)
        pipe = tiny.quiet(load_pipeline(name, path=tmp_path / name, device="cpu"))
        assert strides in (None, strides_of(pipe, model_card(name)))
        frames, height, width = size
        call = {"height": height, "width": width, "steps": 2, "max_sequence_length": 16}
        if frames > 1:
            call["num_frames"] = frames
        video = generate_video(pipe, "a cat", name, **call)
        assert video.shape == (frames, height, width, 3)
        assert 0 <= video.min() < video.max() <= 1
        assert torch.equal(video, generate_video(pipe, "a cat", name, **call))


def test_true_cfg_and_the_guider(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models whose text encoders are too large to build small: their prompts are given encoded."""
    qwen, call = tiny.qwen(), tiny.qwen_call()
    prompts: list[str] = []

    def encode_qwen(prompt: str, **_given: Any) -> tuple[Any, Any]:
        prompts.append(prompt)
        prefix = "" if prompt == "a cat" else "negative_"
        return call[f"{prefix}prompt_embeds"], call[f"{prefix}prompt_embeds_mask"]

    monkeypatch.setattr(qwen, "encode_prompt", encode_qwen)
    options: dict[str, Any] = {"height": 64, "width": 96, "steps": 2}
    image = generate_video(qwen, "a cat", "qwen-image", **options)
    assert image.shape == (1, 64, 96, 3)
    assert prompts == ["a cat", " "]  # true CFG is on by default
    assert not torch.equal(
        image, generate_video(qwen, "a cat", "qwen-image", guidance=1.5, **options)
    )

    video, call = tiny.hunyuan15(), tiny.hunyuan15_call()

    def encode_hunyuan(prompt: str | None, **_given: Any) -> tuple[Any, ...]:
        prefix = "" if prompt == "a cat" else "negative_"
        names = ("prompt_embeds", "prompt_embeds_mask", "prompt_embeds_2", "prompt_embeds_mask_2")
        return tuple(call[prefix + name] for name in names)

    monkeypatch.setattr(video, "encode_prompt", encode_hunyuan)
    own = video.guider
    options = {"height": 64, "width": 64, "num_frames": 5, "steps": 2}
    usual, weak = (
        generate_video(video, "a cat", "hunyuan-video-1.5", guidance=scale, **options)
        for scale in (None, 1.5)
    )
    assert usual.shape == (5, 64, 64, 3)
    assert not torch.equal(usual, weak)
    assert video.guider is own
    with pytest.raises(TypeError, match="'callback_on_step_end'"):
        generate_video(video, "a cat", "hunyuan-video-1.5", callback_on_step_end=print, **options)


def test_precision(folders: dict[str, Path]) -> None:
    pipe = load(WAN, folders, dtype="bf16")
    assert pipe.transformer.dtype == pipe.text_encoder.dtype == torch.bfloat16
    assert pipe.vae.dtype == torch.float32
    assert load(COG, folders, dtype=torch.float16).vae.dtype == torch.float16


def test_vae_tiling(folders: dict[str, Path]) -> None:
    assert load(WAN, folders, vae_tiling=True).vae.use_tiling
    assert not load(WAN, folders).vae.use_tiling


# The flow shift


def shift_of(pipe: Any) -> float:
    return float(pipe.scheduler.config.get("flow_shift", pipe.scheduler.config.get("shift")))


def test_only_the_flow_shift_is_set(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders[WAN], tmp_path / "wan")
    file = folder / "scheduler" / "scheduler_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"flow_shift": 9.0, "solver_order": 3}))
    pipe = load(WAN, {WAN: folder})
    assert shift_of(pipe) == 3.0
    assert pipe.scheduler.config.solver_order == 3
    assert shift_of(load(WAN, {WAN: folder}, height=720, width=1280)) == 5.0
    assert shift_of(load("wan2.2-ti2v-5b", folders)) == 5.0
    assert shift_of(load("hunyuan-video", folders)) == 7.0
    # Not named in the registry: the checkpoint's own.
    assert shift_of(load("wan2.2-t2v-a14b", folders)) == 3.0


def test_the_shift_follows_the_size_for_one_call(folders: dict[str, Path]) -> None:
    pipe = load(WAN, folders)
    scheduler = pipe.scheduler
    seen: list[float] = []

    def stop(pipe: Any, _step: int, _t: Any, _kwargs: dict[str, Any]) -> dict[str, Any]:
        seen.append(shift_of(pipe))
        raise KeyboardInterrupt

    for height, width, expected in ((16, 32, 3.0), (720, 1280, 5.0), (720, 704, 3.0)):
        with pytest.raises(KeyboardInterrupt):
            generate(pipe, WAN, height=height, width=width, num_frames=1, callback_on_step_end=stop)
        assert seen.pop() == expected
        assert shift_of(pipe) == 3.0
        assert pipe.scheduler is scheduler
    with pytest.raises(KeyboardInterrupt):
        generate(pipe, WAN, shift=8.0, callback_on_step_end=stop)
    assert seen.pop() == 8.0
    # A shift of one's own stays.
    pipe.scheduler = type(scheduler).from_config(scheduler.config, flow_shift=6.5)
    with pytest.raises(KeyboardInterrupt):
        generate(pipe, WAN, callback_on_step_end=stop)
    assert seen.pop() == shift_of(pipe) == 6.5


def test_a_shift_changes_the_steps(folders: dict[str, Path]) -> None:
    for name in (WAN, "hunyuan-video"):
        pipe = load(name, folders)
        first = generate(pipe, name)
        times = pipe.scheduler.timesteps.clone()
        shifted = generate(pipe, name, shift=1.5)
        assert not torch.equal(pipe.scheduler.timesteps, times)
        assert not torch.equal(first, shifted)
        assert torch.equal(first, generate(pipe, name))


# LoRA


@pytest.fixture(scope="session")
def lora(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A LoRA of the CogVideoX checkpoint, in a folder with the usual file name."""
    peft = pytest.importorskip("peft")
    from diffusers import CogVideoXPipeline
    from peft.utils import get_peft_model_state_dict

    pipe = load(COG, folders)
    config = peft.LoraConfig(r=2, lora_alpha=2, target_modules=["to_q", "to_k", "to_v"])
    pipe.transformer.add_adapter(config)
    torch.manual_seed(0)
    for name, weight in pipe.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(weight)
    folder = tmp_path_factory.mktemp("lora")
    layers = get_peft_model_state_dict(pipe.transformer)
    CogVideoXPipeline.save_lora_weights(folder, transformer_lora_layers=layers)
    return folder


def cached_repo(cache: Path, repo: str, files: Path, inside: str = "") -> None:
    """A repository in the layout of the hub's cache."""
    root = cache / f"models--{repo.replace('/', '--')}"
    commit = "0" * 40
    (root / "refs").mkdir(parents=True)
    (root / "refs" / "main").write_text(commit)
    shutil.copytree(files, root / "snapshots" / commit / inside)


def test_lora_from_a_file_a_folder_or_a_repository(
    folders: dict[str, Path], lora: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    cached_repo(tmp_path, "someone/BLADE", lora, "cog-lora")
    file = "pytorch_lora_weights.safetensors"
    plain = generate(load(COG, folders), COG)
    found = [
        generate(load(COG, folders, lora=source), COG)
        for source in (lora / file, str(lora), f"someone/BLADE:cog-lora/{file}")
    ]
    assert not torch.allclose(plain, found[0], atol=1e-4)
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.fixture(scope="session")
def expert_loras(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """LoRAs of the two experts of Wan 2.2, a file each."""
    peft = pytest.importorskip("peft")
    from diffusers import WanPipeline
    from peft.utils import get_peft_model_state_dict

    pipe = load(TWO, folders)
    folder = tmp_path_factory.mktemp("experts")
    files = []
    for seed, expert in enumerate((pipe.transformer, pipe.transformer_2)):
        torch.manual_seed(seed)
        config = peft.LoraConfig(
            r=2, lora_alpha=2, target_modules=["to_q", "to_k"], init_lora_weights=False
        )
        expert.add_adapter(config)
        layers = get_peft_model_state_dict(expert)
        name = f"expert{seed}.safetensors"
        WanPipeline.save_lora_weights(folder, transformer_lora_layers=layers, weight_name=name)
        files.append(folder / name)
    return files[0], files[1]


def lora_weights(module: Any) -> list[torch.Tensor]:
    return [weight for name, weight in module.named_parameters() if "lora_" in name]


def test_both_experts_get_their_lora(
    folders: dict[str, Path], expert_loras: tuple[Path, Path]
) -> None:
    high, low = expert_loras
    plain = generate(load(TWO, folders), TWO, steps=4)
    both = load(TWO, folders, lora=(high, low))
    first, second = (lora_weights(expert) for expert in (both.transformer, both.transformer_2))
    assert len(first) == len(second) > 0
    assert not any(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    same = load(TWO, folders, lora=high)
    pairs = zip(lora_weights(same.transformer), lora_weights(same.transformer_2), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
    only_low = load(TWO, folders, lora=(None, low))
    assert lora_weights(only_low.transformer) == []
    videos = [plain, *(generate(pipe, TWO, steps=4) for pipe in (both, same, only_low))]
    for i, video in enumerate(videos):
        assert video.isfinite().all()
        assert not any(torch.equal(video, other) for other in videos[i + 1 :])
    with sparse_processor_mode(both, 1.0, warmup_frac=0) as run:
        sparse = generate(both, TWO, steps=4)
    assert {row.transformer for row in run.stats().rows} == {"transformer", "transformer_2"}
    assert torch.allclose(sparse, videos[1], atol=1e-4)


def test_loras_and_experts_must_match(
    folders: dict[str, Path], expert_loras: tuple[Path, Path]
) -> None:
    with pytest.raises(ValueError, match=r"has 1 expert, but lora names 2 .*give one LoRA"):
        load(WAN, folders, lora=expert_loras)
    with pytest.raises(ValueError, match=r"has 2 experts, but lora names 1 .*pair \(high, low\)"):
        load(TWO, folders, lora=expert_loras[:1])


def test_a_lora_that_does_not_fit_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    pytest.importorskip("peft")
    from safetensors.torch import save_file

    file = tmp_path / "other.safetensors"
    save_file({f"unet.down.to_q.lora_{x}.weight": torch.ones(2, 2) for x in "AB"}, file)
    with pytest.raises(ValueError, match=r"no weight of the LoRA other.safetensors fits"):
        load(COG, folders, lora=file)


def test_where_a_lora_is(tmp_path: Path) -> None:
    assert lora_source("a/b:c/d/e.safetensors") == LoraSource("a/b", "c/d", "e.safetensors")
    assert lora_source("a/b:e.safetensors") == LoraSource("a/b", None, "e.safetensors")
    assert lora_source("a/b") == LoraSource("a/b")
    with pytest.raises(ValueError, match="names no file"):
        lora_source("a/b:c/")
    with pytest.raises(FileNotFoundError, match="no LoRA at /none/x/y"):
        lora_source("/none/x/y")
    with pytest.raises(ValueError, match=r"should hold one .safetensors file, and holds none"):
        lora_source(tmp_path)


# Where checkpoints are


def test_a_hub_id_from_the_cache(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import huggingface_hub.constants

    assert huggingface_hub.constants.HF_HUB_OFFLINE
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(OSError, match=r"cannot load wan-t2v-1.3b from the hub id Wan-AI/.*path="):
        load_pipeline(WAN, device="cpu")
    cached_repo(tmp_path, model_card(WAN).location, folders[WAN])
    cached_repo(tmp_path, "me/my-wan", folders[WAN])
    expected = load(WAN, folders).transformer.state_dict()
    for pipe in (load_pipeline(WAN, device="cpu"), load_pipeline(WAN, path="me/my-wan")):
        found = pipe.transformer.state_dict()
        assert all(torch.equal(found[key], expected[key]) for key in expected)


def test_checkpoints_of_other_models_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    for asked, given, why in (
        (WAN, COG, "its pipeline is CogVideoXPipeline, not WanPipeline; it looks like"),
        (WAN, "wan2.2-t2v-a14b", "transformer_2: .*looks like wan2.2-t2v-a14b"),
        (WAN, "wan2.2-ti2v-5b", "expand_timesteps: True, .*looks like wan2.2-ti2v-5b"),
        ("wan2.2-t2v-a14b", WAN, "transformer_2: None, .*looks like wan-t2v-1.3b, wan-t2v-14b"),
        (COG, "cogvideox1.5-5b", "patch_size_t: 2, not None; it looks like cogvideox1.5-5b"),
        ("cogvideox1.5-5b", COG, "patch_size_t: None, not 2; it looks like cogvideox-5b"),
    ):
        with pytest.raises(ValueError, match=f"is not {asked}: .*{why}"):
            load_pipeline(asked, path=folders[given], device="cpu")
    with pytest.raises(FileNotFoundError, match="path is a local folder or a hub id"):
        load_pipeline(WAN, path=tmp_path / "none" / "here")
    with pytest.raises(ValueError, match=r"holds no model_index.json"):
        load_pipeline(WAN, path=folders[WAN] / "transformer")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model_index.json").write_text('{"_class_name": "CogVideoXPipeline"}')
    with pytest.raises(FileNotFoundError, match=r"incomplete: it holds no transformer/config.json"):
        load_pipeline(COG, path=broken)
    (broken / "model_index.json").write_text('{"_class_name": "StableDiffusionPipeline"}')
    with pytest.raises(ValueError, match="no model of the registry looks like it"):
        load_pipeline(COG, path=broken)


def test_devices_precisions_and_offload(folders: dict[str, Path]) -> None:
    with pytest.raises(ValueError, match=r"cpu_offload moves parts .* but the device is the CPU"):
        load(WAN, folders, cpu_offload=True)
    with pytest.raises(ValueError, match="cpu_offload is False, True, 'model' or 'sequential'"):
        load(WAN, folders, cpu_offload="disk")
    with pytest.raises(ValueError, match=r"dtype must be one of bf16, .* got 'int8'"):
        load(WAN, folders, dtype="int8")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="torch sees no GPU"):
            load_pipeline(WAN, path=folders[WAN], device="cuda")


def test_what_cannot_be_compiled(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="compile is True or False, got 'yes'"):
        load(WAN, folders, compile="yes")
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(ValueError, match=r"no-such-compiler is not found: install it, .* CXX, or"):
        load(WAN, folders, compile=True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    on_gpu: dict[str, Any] = {"path": folders[WAN], "device": "cuda", "compile": True}
    with pytest.raises(ValueError, match="compile needs the weights in one place, and cpu_offload"):
        load_pipeline(WAN, cpu_offload=True, **on_gpu)
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ValueError, match=r"gcc is not found: .* variable CC, or leave compile out"):
        load_pipeline(WAN, **on_gpu)


@pytest.mark.parametrize("offload", [True, "sequential"])
def test_offload_is_asked_for_on_its_device(
    offload: bool | str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from diffusers import DiffusionPipeline

    asked: list[tuple[str, Any]] = []
    for name in ("enable_model_cpu_offload", "enable_sequential_cpu_offload"):

        def note(_pipe: Any, device: Any, name: str = name) -> None:
            asked.append((name, device))

        monkeypatch.setattr(DiffusionPipeline, name, note)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    load_pipeline(WAN, path=folders[WAN], device="cuda:1", cpu_offload=offload, dtype="fp32")
    kind = "model" if offload is True else "sequential"
    assert asked == [(f"enable_{kind}_cpu_offload", torch.device("cuda:1"))]


# The model of this package


def test_nano_comes_with_the_package(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = model_card("nano")
    assert Path(card.location) == Path(jali.__file__).parent / "nano" / "weights"
    largest = max(file.stat().st_size for file in folders["nano"].rglob("*") if file.is_file())
    assert largest <= 15e6
    monkeypatch.setattr(registry.resources, "files", lambda _package: tmp_path)
    with pytest.raises(FileNotFoundError, match=r"model_index.json is missing: .* nano; install"):
        load_pipeline("nano", device="cpu")
    shutil.copytree(folders["nano"], tmp_path / "nano" / "weights")
    pipe = tiny.quiet(load_pipeline("nano", device="cpu"))
    assert pipe.transformer.dtype == pipe.vae.dtype == torch.float32
    assert torch.equal(generate(pipe, "nano"), generate(load("nano", folders), "nano"))


def test_nano_sizes_are_those_the_pipeline_takes(folders: dict[str, Path]) -> None:
    """Eight pixels a token, but the pipeline of Wan insists on multiples of sixteen."""
    pipe = load("nano", folders)
    with pytest.raises(ValueError, match="multiple of 16 pixels, got 200; the nearest are 192 and"):
        generate(pipe, "nano", height=200)
    with pytest.raises(ValueError, match="got 36; the nearest are 33 and 37"):
        generate(pipe, "nano", num_frames=36)
    with sparse_processor_mode(pipe, 0.5, warmup_frac=0) as run:
        generate(pipe, "nano", height=64, width=96, num_frames=5)
    assert {row.tokens for row in run.stats().rows} == {2 * 8 * 12}


def test_arguments_of_the_card_are_defaults(folders: dict[str, Path]) -> None:
    pipe = load("nano", folders)
    card = dataclasses.replace(model_card("nano"), call={"max_sequence_length": 16})
    plain = generate_video(pipe, "a cat", card, height=16, width=16, num_frames=1, steps=1)
    long = generate(pipe, "nano", height=16, width=16, num_frames=1, steps=1)
    assert torch.equal(plain, long)
    other = generate(
        pipe, "nano", height=16, width=16, num_frames=1, steps=1, max_sequence_length=32
    )
    assert not torch.equal(plain, other)


def test_missing_and_damaged_files_are_named(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(folders["nano"], tmp_path / "nano")
    weights = sorted((folder / "transformer").glob("*.safetensors"))
    assert len(weights) > 1

    def refused(file: Path, change: Callable[[Path], object], match: str) -> None:
        whole = file.read_bytes()
        change(file)
        with pytest.raises((ValueError, OSError), match=f"{file.name}.*{match}"):
            load_pipeline("nano", path=folder, device="cpu")
        file.write_bytes(whole)

    def flipped(file: Path) -> None:
        data = bytearray(file.read_bytes())
        data[-5] ^= 1
        file.write_bytes(data)

    text = folder / "text_encoder" / "model.safetensors"
    index = next((folder / "vae").glob("*.index.json"))
    refused(weights[1], Path.unlink, "is missing")
    refused(text, Path.unlink, "is missing")
    refused(weights[0], lambda file: file.write_bytes(file.read_bytes()[:-9]), "not fully covered")
    refused(weights[0], lambda file: file.write_bytes(b"xyz"), "header")
    refused(weights[0], lambda file: file.write_bytes(b"\x09" + bytes(7) + b"{no json}"), "header")
    refused(index, lambda file: file.write_text("{"), "is not JSON")
    sums = write_checksums(folder)
    load_pipeline("nano", path=folder, device="cpu")
    refused(text, flipped, "bytes are not those")
    refused(folder / "scheduler" / "scheduler_config.json", Path.unlink, "is missing")
    assert sums.name not in json.loads(sums.read_text())
    shutil.rmtree(folder / "tokenizer")
    with pytest.raises(FileNotFoundError, match=r"tokenizer is missing .model_index.json names it"):
        load_pipeline("nano", path=folder, device="cpu")


# What is refused before any work


def test_wrong_calls_are_refused_before_any_work(folders: dict[str, Path]) -> None:
    pipe = load(WAN, folders)
    pipe.text_encoder = None  # whatever gets past the checks fails differently

    def wrong(match: str, error: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=match):
            generate(pipe, WAN, **options)

    wrong(
        "a height that is a multiple of 16 pixels, got 100; the nearest are 96 and 112", height=100
    )
    wrong("width that is a multiple of 16 pixels, got 7; the nearest are 16$", width=7)
    wrong("4·k \\+ 1 frames, got 80; the nearest are 77 and 81", num_frames=80)
    wrong("num_frames must be at least 1, got 0", num_frames=0)
    wrong("height must be at least 1, got 0", height=0)
    wrong("height must be an int, got 16.0", TypeError, height=16.0)
    wrong("steps must be at least 1, got 0", steps=0)
    wrong("steps must be an int, got True", TypeError, steps=True)
    wrong("guidance must be finite and >= 0, got nan", guidance=math.nan)
    wrong("guidance must be a number, got '5'", TypeError, guidance="5")
    wrong("num_inference_steps is steps by another name", TypeError, num_inference_steps=2)
    wrong("guidance_scale is guidance by another name", TypeError, guidance=1.0, guidance_scale=1.0)
    wrong("guidance must be a number, got '5'", TypeError, guidance_scale="5")
    wrong("shift must be finite", shift=math.inf)
    wrong("seed must be an int, got 1.5", TypeError, seed=1.5)
    wrong("has no argument 'eta'", TypeError, eta=1.0)
    wrong("height is set by generate_video|output_type is set by", TypeError, output_type="np")
    with pytest.raises(TypeError, match="prompt is one text"):
        generate_video(pipe, ["a", "b"], WAN, height=16, width=16, num_frames=1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="generated with a CogVideoXPipeline, got a WanPipeline"):
        generate(pipe, COG)


def test_a_negative_prompt_without_effect_is_refused(folders: dict[str, Path]) -> None:
    name = "hunyuan-video"
    pipe = load(name, folders)
    with pytest.raises(ValueError, match="guidance built in, so a negative_prompt has no effect"):
        generate(pipe, name, negative_prompt="blurry")
    guided = generate(pipe, name, negative_prompt="blurry", true_cfg_scale=3.0)
    assert not torch.equal(guided, generate(pipe, name))


def test_sizes_come_from_the_checkpoint(folders: dict[str, Path]) -> None:
    expected = {
        WAN: (16, 16, 4), "wan2.2-ti2v-5b": (32, 32, 4), COG: (16, 16, 4), "nano": (16, 16, 4),
    }  # fmt: skip
    for name, strides in expected.items():
        assert strides_of(load(name, folders), model_card(name)) == Strides(*strides)
    card = model_card("cogvideox1.5-5b")
    strides = strides_of(load(card.name, folders), card)
    assert strides == Strides(16, 16, 4, (128, 128))
    with pytest.raises(ValueError, match=r"at most 128×128 pixels .* got 128×144"):
        check_size(strides, 128, 144, 9, card)


def test_images_have_one_frame() -> None:
    card = model_card("flux.1-dev")
    check_size(Strides(16, 16, 0), 1024, 1024, 1, card)
    with pytest.raises(ValueError, match=r"flux.1-dev makes images: num_frames is 1, got 81"):
        check_size(Strides(16, 16, 0), 1024, 1024, 81, card)


# The registry


def test_the_registry_is_consistent() -> None:
    strides = {"ltx-video": (32, 8), "wan2.2-ti2v-5b": (32, 4), "hunyuan-video-1.5": (16, 4)}
    for name, card in MODELS.items():
        assert model_card(card.hub or name) is model_card(name.upper()) is card
        assert (card.hub is None) == (card.folder is not None)
        assert card.image == (card.frames == 1)
        side, frames = strides.get(name, (16, 4))
        check_size(
            Strides(side, side, 0 if card.image else frames),
            card.height,
            card.width,
            card.frames,
            card,
        )


def test_the_registry_and_the_presets_know_the_same_models() -> None:
    assert {preset.model for preset in presets()} == set(MODELS)
    assert set(model_names().values()) == set(MODELS)
    for alias, name in model_names().items():
        assert model_card(alias) is model_card(alias.upper())
        assert model_card(alias) is MODELS[name] or alias in PSA_MODELS
        assert model_card(alias).name == name
    folder = Path(jali.__file__).parent / "presets" / "data"
    found = [model for file in folder.glob("*.yaml") for model in read_file(file) if model.aliases]
    names = [alias.lower() for model in found for alias in model.aliases]
    assert len(set(names)) == len(names)


def test_psas_names_have_psas_defaults() -> None:
    """Its names are names of the models' presets; only what PSA sets otherwise is otherwise."""
    assert PSA_MODELS.keys() < model_names().keys()
    for name, psa in PSA_MODELS.items():
        card, own = model_card(name), MODELS[psa.model]
        changed = {
            f.name
            for f in dataclasses.fields(card)
            if getattr(card, f.name) != getattr(own, f.name)
        }
        assert changed == {key for key in psa.defaults if psa.defaults[key] != getattr(own, key)}
        check_size(Strides(16, 16, 4), card.height, card.width, card.frames, card)
    small = model_card("wan21_1.3b")
    assert (small.height, small.width, small.frames) == (720, 1280, 69)
    lora = model_card("cogvideo_5b_lora")
    assert (lora.steps, lora.guidance.scale) == (4, 1.0)
    assert load_preset(None, "cogvideo_5b_lora").name == "psa_4steps"
    assert load_preset(None, "cogvideo_5b").name == "psa_balanced"


def test_old_names_and_wrong_names() -> None:
    for old, name in (
        ("cogvideo1.5_5b", "cogvideox1.5-5b"),
        ("wan21_1.3b", WAN),
        ("wan22_a14b", "wan2.2-t2v-a14b"),
        ("THUDM/CogVideoX-5b", COG),
    ):
        assert model_card(old).name == name
    with pytest.raises(
        ValueError, match=r"unknown model 'wan-t2v-1.3'; did you mean 'wan-t2v-1.3b'"
    ):
        load_pipeline("wan-t2v-1.3")
    with pytest.raises(TypeError, match="a model is a name"):
        model_card(3)  # type: ignore[arg-type]


def test_a_checkpoint_written_before_a_key_existed() -> None:
    found = matching({"_class_name": "WanPipeline"}, {})
    assert [card.name for card in found] == [WAN, "wan-t2v-14b"]
