"""Models by name: load a pipeline, generate a video or an image."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from jali.integration.models.checkpoint import (
    check_checkpoint,
    check_offload,
    choose_device,
    choose_dtype,
    dtype_argument,
    explain_hub_errors,
    find_checkpoint,
)
from jali.integration.models.compilation import check_compile, compile_blocks
from jali.integration.models.lora import Lora, load_lora, lora_sources
from jali.integration.models.registry import ModelCard, model_card
from jali.integration.models.size import check_size, strides_of
from jali.value import check_amount, check_count

log = logging.getLogger("jali")


def load_pipeline(
    name: str,
    *,
    path: str | os.PathLike[str] | None = None,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    cpu_offload: bool | str = False,
    compile: bool = False,
    lora: Lora | Sequence[Lora | None] | None = None,
    height: int | None = None,
    width: int | None = None,
    vae_tiling: bool = False,
    revision: str | None = None,
    token: str | None = None,
    local_files_only: bool = False,
) -> Any:
    """The diffusers pipeline of a model of the registry, on its device and ready to call.

        pipe = load_pipeline("wan-t2v-1.3b", device="cuda", dtype="bf16")

    The checkpoint's scheduler is kept. Only its flow shift is set where the registry names one:
    that of `height` × `width` (`generate_video` follows the size it is given).

    Args:
        name: of the registry, one of its other names, or the model's hub id.
        path: a local folder or a hub id to use instead of the model's own; either is checked to
            be that model, and the files of a folder to be whole.
        device: a GPU where there is one.
        dtype: of the weights: "bf16", "fp16", "fp32" or a torch dtype; bf16 on a GPU and fp32 on a
            CPU without one. The VAE of Wan is always fp32.
        cpu_offload: True or "model" (whole parts wait in host memory) or "sequential" (layers do:
            slow, least memory).
        compile: the blocks of the transformers. The first call takes much longer, all that follow
            less.
        lora: a file, a folder, a hub id, or REPO:FOLDER/FILE; of two experts both get it, or each
            its own of a pair (high noise, low noise).
        height, width: the size that the flow shift is for; the model's own without them.
        vae_tiling: decode tile by tile, in less memory.
        revision, token, local_files_only: of the hub.

    Raises:
        ValueError: an unknown name or value, another model's checkpoint, or a damaged file.
        FileNotFoundError: a folder or one of its files is missing.
        OSError: the hub cannot be reached, and its cache lacks the model.
    """
    card = model_card(name)
    device = choose_device(device)
    check_offload(cpu_offload, device.type)
    check_compile(compile, cpu_offload, device.type)
    weights = choose_dtype(dtype, device)
    adapters = None if lora is None else lora_sources(lora, card.experts)
    source = find_checkpoint(card, path)
    hub = {"revision": revision, "token": token, "local_files_only": local_files_only}
    check_checkpoint(card, source, hub)

    import diffusers

    loader: Any = diffusers.DiffusionPipeline
    kinds = {"default": weights, "vae": torch.float32} if card.vae_fp32 else weights
    with explain_hub_errors(card, source):
        pipe = loader.from_pretrained(source, **{dtype_argument(diffusers): kinds}, **hub)
    if adapters is not None:
        load_lora(pipe, adapters, {"token": token, "local_files_only": local_files_only})
    if card.shift is not None:
        _set_shift(pipe.scheduler, card.shift.at(height or card.height, width or card.width))
    if vae_tiling:
        pipe.vae.enable_tiling()
    if cpu_offload == "sequential":
        pipe.enable_sequential_cpu_offload(device=device)
    elif cpu_offload:
        pipe.enable_model_cpu_offload(device=device)
    else:
        pipe.to(device)
    if compile:
        compile_blocks(pipe)
    return pipe


@torch.no_grad()
def generate_video(
    pipe: Any,
    prompt: str,
    model_name: str | ModelCard,
    *,
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    guidance_2: float | None = None,
    seed: int = 0,
    negative_prompt: str | None = None,
    shift: float | None = None,
    callback_on_step_end: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Tensor:
    """The frames of one prompt: fp32 [F, H, W, 3] in 0…1 on the CPU; an image is one frame.

        video = generate_video(pipe, "a cat on a beach", "wan-t2v-1.3b", steps=30, seed=1)

    What is not given is the model's default. One seed gives one video.

    Args:
        pipe: of `load_pipeline`, or any other of the model's class.
        prompt: one text.
        model_name: the registry's name, or a card of one's own.
        height, width, num_frames: a size that the model cannot make is refused with the nearest
            ones it can.
        steps: of denoising. It may be called `num_inference_steps`.
        guidance, guidance_2: how strongly the prompt is followed; by the second expert. They may be
            called `guidance_scale` and `guidance_scale_2`.
        seed: of the noise, drawn on the CPU.
        negative_prompt: what is not wanted; refused where it would have no effect.
        shift: the flow shift, for this call only. Without one it follows the size as long as the
            scheduler has one of the model's own; a shift of yours stays.
        callback_on_step_end: the pipeline's own.
        arguments: go to the pipeline as they are (`max_sequence_length`, `latents`, …).

    Raises:
        ValueError, TypeError: whatever the model or its pipeline cannot do, before any work.
    """
    if not isinstance(prompt, str):
        raise TypeError(f"prompt is one text (call once per prompt), got {prompt!r}")
    clips = generate_videos(
        pipe, (prompt,), model_name, seeds=(seed,), height=height, width=width,
        num_frames=num_frames, steps=steps, guidance=guidance, guidance_2=guidance_2,
        negative_prompt=negative_prompt, shift=shift, callback_on_step_end=callback_on_step_end,
        **arguments,
    )  # fmt: skip
    return clips[0].cpu()


@torch.no_grad()
def generate_videos(
    pipe: Any,
    prompts: Sequence[str],
    model_name: str | ModelCard,
    *,
    seeds: Sequence[int],
    height: int | None = None,
    width: int | None = None,
    num_frames: int | None = None,
    steps: int | None = None,
    guidance: float | None = None,
    guidance_2: float | None = None,
    negative_prompt: str | None = None,
    shift: float | None = None,
    callback_on_step_end: Callable[..., Any] | None = None,
    **arguments: Any,
) -> Tensor:
    """The frames of several prompts in one call of the pipeline, each with a seed of its own: fp32
    [n, F, H, W, 3] in 0…1, where they were decoded. Everything else is `generate_video`'s."""
    card = model_card(model_name)
    _check_pipeline(card, pipe)
    steps = _either("steps", steps, "num_inference_steps", arguments)
    if card.guidance.kind != "true_cfg":  # there guidance_scale is something else
        guidance = _either("guidance", guidance, "guidance_scale", arguments)
    guidance_2 = _either("guidance_2", guidance_2, "guidance_scale_2", arguments)
    height = card.height if height is None else height
    width = card.width if width is None else width
    frames = card.frames if num_frames is None else num_frames
    steps = card.steps if steps is None else steps
    check_size(strides_of(pipe, card), height, width, frames, card)
    _check_values(steps, seeds, guidance=guidance, guidance_2=guidance_2, shift=shift)
    dice = [torch.Generator("cpu").manual_seed(seed) for seed in seeds]
    alone = len(prompts) == 1  # as everybody calls it, and as some pipelines must be called
    call = {
        "prompt": prompts[0] if alone else list(prompts),
        "height": height,
        "width": width,
        "num_inference_steps": steps,
        "generator": dice[0] if alone else dice,
        "output_type": "pt",
        **({} if card.image else {"num_frames": frames}),
        **_guidance(card, guidance, guidance_2),
        **_negative(card, negative_prompt, arguments),
        **({"callback_on_step_end": callback_on_step_end} if callback_on_step_end else {}),
    }
    _check_arguments(pipe, card, call, arguments)
    arguments = {**card.call, **arguments}
    if shift is None and card.shift is not None:
        shift = card.shift.at(height, width) if _shift(pipe.scheduler) in card.shift else None
    with _use_shift(pipe.scheduler, shift), _use_guidance(pipe, card, guidance):
        output = pipe(**call, **arguments)
    return _clips(output, card)


# What a call may hold


def _check_pipeline(card: ModelCard, pipe: Any) -> None:
    if type(pipe).__name__ != card.pipeline:
        raise ValueError(
            f"{card.name} is generated with a {card.pipeline}, got a {type(pipe).__name__}; "
            f"name the model that was loaded"
        )


def _either(name: str, value: Any, pipelines: str, arguments: dict[str, Any]) -> Any:
    """An argument under its own name, or taken out of `arguments` under the pipeline's."""
    other = arguments.pop(pipelines, None)
    if value is not None and other is not None:
        raise TypeError(f"{pipelines} is {name} by another name: give one of the two")
    return other if value is None else value


def _check_values(steps: Any, seeds: Sequence[Any], **numbers: float | None) -> None:
    check_count("steps", steps)
    for seed in seeds:
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed must be an int, got {seed!r}")
    for name, value in numbers.items():
        if value is not None:
            check_amount(name, value)


def _guidance(card: ModelCard, scale: float | None, second: float | None) -> dict[str, Any]:
    if second is not None and card.experts == 1:
        raise ValueError(f"guidance_2 is of the second expert, and {card.name} has one only")
    if card.guidance.argument is None:
        return {}
    # A scale of one's own is for both experts, unless the second is given too.
    own = card.guidance.second if scale is None else scale
    second = own if second is None else second
    given = {card.guidance.argument: card.guidance.scale if scale is None else scale}
    return given | ({"guidance_scale_2": second} if card.experts == 2 else {})


def _negative(card: ModelCard, prompt: str | None, arguments: Mapping[str, Any]) -> dict[str, str]:
    if prompt is None:
        # True CFG is off without one.
        return {"negative_prompt": " "} if card.guidance.kind == "true_cfg" else {}
    if card.guidance.kind == "embedded" and not arguments.get("true_cfg_scale", 1) > 1:
        raise ValueError(
            f"{card.name} has its guidance built in, so a negative_prompt has no effect; "
            f"leave it out, or pass true_cfg_scale above 1 (which doubles the work)"
        )
    return {"negative_prompt": prompt}


def _check_arguments(
    pipe: Any, card: ModelCard, call: Mapping[str, Any], arguments: Mapping[str, Any]
) -> None:
    known = inspect.signature(type(pipe).__call__).parameters
    for name in (*call, *arguments):
        if name in call and name in arguments:
            raise TypeError(f"{name} is set by generate_video; it cannot be given twice")
        if name not in known:
            raise TypeError(f"the pipeline of {card.name} has no argument {name!r}")


@contextlib.contextmanager
def _use_guidance(pipe: Any, card: ModelCard, scale: float | None) -> Iterator[None]:
    """Another scale for the checkpoint's own guider, for one call."""
    if card.guidance.kind != "guider" or scale is None:
        yield
        return
    own = pipe.guider
    pipe.guider = own.new(guidance_scale=scale)
    try:
        yield
    finally:
        pipe.guider = own


def _clips(output: Any, card: ModelCard) -> Tensor:
    """[n, F, 3, H, W], or of images [n, 3, H, W], as fp32 [n, F, H, W, 3]."""
    found: Tensor = output.images[:, None] if card.image else output.frames
    return found.permute(0, 1, 3, 4, 2).float().contiguous()


# The flow shift


def _shift_key(scheduler: Any) -> str | None:
    """UniPC and DPM call it flow_shift, the flow-matching schedulers shift; others have none."""
    return next((key for key in ("flow_shift", "shift") if key in scheduler.config), None)


def _shift(scheduler: Any) -> float:
    key = _shift_key(scheduler)
    return math.nan if key is None else float(scheduler.config[key])


def _set_shift(scheduler: Any, shift: float) -> None:
    """In place: whoever watches this scheduler goes on watching the right one."""
    key = _shift_key(scheduler)
    if key is None:
        log.warning("jali: %s has no flow shift to set", type(scheduler).__name__)
        return
    scheduler.register_to_config(**{key: shift})
    if hasattr(scheduler, "set_shift"):
        scheduler.set_shift(shift)


@contextlib.contextmanager
def _use_shift(scheduler: Any, shift: float | None) -> Iterator[None]:
    before = _shift(scheduler)
    if shift is None or shift == before:
        yield
        return
    _set_shift(scheduler, shift)
    try:
        yield
    finally:
        if not math.isnan(before):
            _set_shift(scheduler, before)
