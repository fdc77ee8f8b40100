"""How nano is trained, in stages that may be days and machines apart.

    python -m training.train --start src/jali/nano/weights --state ONE \\
        --seconds 190 15 170 --span 0 0.15
    python -m training.train --start ONE --state TWO --seconds 0 0 500 --span 0.15 1

A call spends the given seconds on autoencoder, text encoder and flow matching, 0 leaving a part
as it is, and leaves a state (`state.py`) that is both a model to use and the start of the next
call. Time decides, not a step count: the same recipe fits a faster or slower machine.
"""

from __future__ import annotations

import argparse
import math
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jali.integration.models.integrity import write_checksums
from training import config, film, scene
from training.autoencoder import decode_whole, encode_whole
from training.flow import Model, sets_of, train_flow
from training.latents import CLIPS, WIDE_CLIPS, Set, channels, load_latents, statistics
from training.reader import Reader, lesson
from training.state import State, load_state, new_state, save_state
from training.trainer import Clock, Trainer, adam, say
from training.world import film as world_film
from training.world import scene as world_scene

CROP = 64
FRAMES = 17
HEIGHTS = (128, 192)  # of the pictures that crops are taken from
FIRST_WORLD = 4  # one batch of windows in so many is of the first world
BATCH = 16  # windows in a step
AT_ONCE = 16  # steps' windows, filmed together
SENTENCES = 512  # in a step


# The autoencoder


def crops(count: int, frames: int, seed: int, device: torch.device) -> Tensor:
    """Windows of random scenes: fp32 [count, 3, frames, CROP, CROP]."""
    height = HEIGHTS[seed % 3 == 0]
    aspect = 1.0 if height == HEIGHTS[0] else 5 / 3
    first = seed % FIRST_WORLD == 0
    sample = scene.sample_scenes if first else world_scene.sample_scenes
    scenes: Any = sample(count, seed, aspect)
    dice = torch.Generator().manual_seed(seed)
    room = torch.tensor([height * aspect - CROP, float(height - CROP)])
    # Crops near the object: the edges of the picture are mostly background.
    centre = (scenes.centre + scenes.velocity / 2) * height - CROP / 2
    corner = centre + (torch.rand(count, 2, generator=dice) - 0.5) * 1.6 * CROP
    corner = corner.clamp(min=0).minimum(room)
    start = torch.randint(0, 33 - frames + 1, (count,), generator=dice)
    shoot: Any = film.film if first else world_film.film
    return shoot(
        scenes.to(device), frames, CROP, CROP, pixels_per_unit=height,
        corner=corner.to(device), start=start.to(device),
    )  # fmt: skip


def channels_last(vae: nn.Module) -> None:
    """The memory order in which small convolutions are fastest on a GPU."""
    for p in vae.parameters():
        if p.dim() == 5:
            p.data = p.data.contiguous(memory_format=torch.channels_last_3d)


def autoencoder_loss(vae: Any, clips: Tensor) -> Tensor:
    """How well clips come back through latents with a little noise on them.

    The noise is the posterior's deviation, the same everywhere: learning it as well makes the start
    slow, since it begins as large as the signal.
    """
    mean = encode_whole(vae, clips).float().chunk(2, 1)[0]
    latents = mean + config.DEVIATION * torch.randn_like(mean)
    difference = decode_whole(vae, latents).float() - clips
    return difference.abs().mean() + 2 * difference.square().mean() + 1e-4 * mean.square().mean()


def train_autoencoder(vae: Any, rate: float, clock: Clock, seed: int, compiled: bool) -> Trainer:
    device = next(vae.parameters()).device
    trainer = Trainer(vae, [adam(vae.parameters(), rate)], clock, decay=0.998, settle=0.7)
    loss_of = torch.compile(autoencoder_loss, dynamic=False) if compiled else autoencoder_loss
    while clock.progress < 1:
        # Filming many at once is as quick as filming few.
        seen = crops(AT_ONCE * BATCH, FRAMES, seed + trainer.steps // AT_ONCE, device)
        for clips in seen.split(BATCH):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(vae, clips)
            trainer.step(loss)
            if trainer.steps == 1:
                say(f"autoencoder: first step after {clock.elapsed:.1f} s")
                clock.restart()
            trainer.note(loss, 200, "autoencoder")
    trainer.average.apply()
    with torch.no_grad():  # the posterior's deviation, as trained
        vae.quant_conv.weight[vae.config.z_dim :] = 0
        vae.quant_conv.bias[vae.config.z_dim :] = 2 * math.log(config.DEVIATION)
    say(f"autoencoder: {trainer.steps} steps")
    return trainer


@torch.no_grad()
def reconstruction(vae: Any, size: Set, which: Any, count: int, seed: int) -> list[float]:
    """PSNR in dB on clips that were never trained on, whole and through the stock class.

    `which` is a world: something with `scene` and `film`.
    """
    first = next(vae.parameters())
    scenes = which.scene.sample_scenes(count, seed, size.aspect, unseen=True).to(first.device)
    found = []
    for i in range(count):
        clip = which.film.film(scenes[slice(i, i + 1)], size.frames, size.height, size.width)
        mean = vae.encode(clip.to(first.dtype)).latent_dist.mode()
        back = vae.decode(mean).sample.float()
        found.append(-10 * math.log10(float(((back - clip) / 2).square().mean())))
    return found


# The text encoder


def train_text(encoder: Any, clock: Clock, seed: int) -> Trainer:
    device = next(encoder.parameters()).device
    reader = Reader(encoder).to(device)
    tokens, said = (x.to(device) for x in lesson(20_000, seed, config.tokenizer()))
    trainer = Trainer(reader, [adam(reader.parameters(), 1e-3)], clock, decay=0.99, settle=0.7)
    clock.restart()
    while clock.progress < 1:
        rows = torch.randint(len(tokens), (SENTENCES,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = reader(tokens[rows], said[rows])
        trainer.step(loss)
        trainer.note(loss, 100, "text")
    trainer.average.apply()
    return trainer


# A call


def train(
    state: State,
    seconds: tuple[float, float, float],
    out: Path,
    latents: Path,
    device: torch.device,
    *,
    span: tuple[float, float] = (0.0, 1.0),
    rate: float = 1.0,
    settle: float = 0.3,
    pace: float = 1.0,
    seed: int = 0,
    limit: float = math.inf,
    compiled: bool = False,
) -> None:
    """Spend the seconds on autoencoder, text encoder and flow matching; `limit` is for all of it,
    and the flow gets no more than is left."""
    start = time.monotonic()
    torch.manual_seed(seed)
    state.to(device)
    save_state(state, out)  # there is one however early the call ends
    if device.type == "cuda":
        channels_last(state.autoencoder)
    times = dict(zip(("autoencoder", "text", "flow"), seconds, strict=True))

    def done(name: str, trainer: Trainer, began: float) -> None:
        state.log.append({
            "part": name, "seconds": round(times[name], 1), "steps": trainer.steps, "seed": seed,
            "seconds_in_all": round(time.monotonic() - began, 1), "losses": trainer.losses,
        })  # fmt: skip
        save_state(state, out)
        say(f"{name}: {state.log[-1]['seconds_in_all']} s in all")

    if times["autoencoder"]:
        began = time.monotonic()
        clock = Clock(times["autoencoder"])
        done(
            "autoencoder",
            train_autoencoder(state.autoencoder, 1e-3 * rate, clock, seed, compiled),
            began,
        )
    if times["text"]:
        began = time.monotonic()
        done("text", train_text(state.text_encoder, Clock(times["text"]), seed + 10**6), began)
    if times["flow"]:
        began = time.monotonic()
        wanted = sets_of(span) | ({CLIPS, WIDE_CLIPS} if times["autoencoder"] else set())
        sets = load_latents(latents, state.autoencoder, wanted, pace, seed, device)
        if times["autoencoder"]:
            state.mean, state.std = statistics([sets[CLIPS], sets[WIDE_CLIPS]])
        say(f"latents: {time.monotonic() - began:.1f} s")
        times["flow"] = max(1.0, min(times["flow"], limit - (time.monotonic() - start)))
        trainer = train_flow(
            Model(state.text_encoder, state.transformer), sets, channels(state.mean, device),
            channels(state.std, device), Clock(times["flow"]), span=span, rate=rate,
            settle=settle, compiled=compiled, keep=lambda: save_state(state, out),
        )  # fmt: skip
        done("flow", trainer, began)


def export(state: State, folder: Path) -> None:
    """The trained parts as a diffusers folder in bf16, in files of at most 12 MB."""
    vae = config.autoencoder(latents_mean=state.mean, latents_std=state.std)
    vae.load_state_dict(state.autoencoder.state_dict())
    pipe = config.pipeline(vae, state.transformer, state.text_encoder).to(torch.bfloat16)
    pipe.transformer.to(torch.bfloat16)
    pipe.save_pretrained(folder, max_shard_size="12MB")
    write_checksums(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--start", type=Path, help="a state or a pipeline to go on from")
    parser.add_argument("--state", type=Path, required=True, help="where to leave the state")
    parser.add_argument(
        "--seconds", type=float, nargs=3, default=(0.0, 0.0, 0.0),
        metavar=("AUTOENCODER", "TEXT", "FLOW"), help="for each part",
    )  # fmt: skip
    parser.add_argument(
        "--span", type=float, nargs=2, default=(0.0, 1.0), metavar=("FROM", "TO"),
        help="of the flow's curriculum",
    )  # fmt: skip
    parser.add_argument("--rate", type=float, default=1.0, help="share of all learning rates")
    parser.add_argument("--settle", type=float, default=0.3, help="share in which rates fall")
    parser.add_argument("--limit", type=float, default=math.inf, help="seconds for all of it")
    parser.add_argument("--pace", type=float, default=1.0, help="share of the latents' number")
    parser.add_argument("--latents", type=Path, default=Path("latents"), help="kept for next time")
    parser.add_argument("--export", type=Path, help="write the pipeline's folder here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    state = load_state(asked.start) if asked.start else new_state()
    train(
        state, tuple(asked.seconds), asked.state, asked.latents, device, span=tuple(asked.span),
        rate=asked.rate, settle=asked.settle, pace=asked.pace, seed=asked.seed, limit=asked.limit,
        compiled=not asked.no_compile,
    )  # fmt: skip
    if asked.export:
        export(load_state(asked.state), asked.export)


if __name__ == "__main__":
    main()
