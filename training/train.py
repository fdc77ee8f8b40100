"""How nano was trained: autoencoder, text encoder, latents once, then flow matching.

    python -m training.train --state RUN --export src/jali/nano/weights

Every stage ends with a file in `RUN`, and is skipped when that file is there, so a run that was cut
off goes on with the stage it was in. Learning rates fall with the clock, not with a step count: the
same recipe fits a faster or slower machine.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from jali.integration.models.integrity import write_checksums
from training import config
from training.autoencoder import decode_whole, encode_whole
from training.film import film
from training.flow import Model, train_flow
from training.latents import CLIPS, WIDE_CLIPS, Set, channels, load_latents, save_statistics
from training.reader import Reader, lesson
from training.scene import sample_scenes
from training.trainer import Clock, Trainer, adam, say

# Seconds on one H200; `--pace 0.1` tries the whole recipe at a tenth of the length.
SECONDS = {"autoencoder": 272.0, "text": 25.0, "flow": 760.0}

CROP = 64
HEIGHTS = (128, 192)  # of the pictures that crops are taken from


# The autoencoder


def crops(count: int, frames: int, seed: int, device: torch.device) -> Tensor:
    """Windows of random scenes: fp32 [count, 3, frames, CROP, CROP]."""
    height = HEIGHTS[seed % 3 == 0]
    aspect = 1.0 if height == HEIGHTS[0] else 5 / 3
    scenes = sample_scenes(count, seed, aspect).to(device)
    dice = torch.Generator().manual_seed(seed)
    room = torch.tensor([height * aspect - CROP, float(height - CROP)])
    # Crops near the object: the edges of the picture are mostly background.
    centre = (scenes.centre + scenes.velocity / 2).cpu() * height - CROP / 2
    corner = centre + (torch.rand(count, 2, generator=dice) - 0.5) * 1.6 * CROP
    corner = corner.clamp(min=0).minimum(room)
    start = torch.randint(0, 33 - frames + 1, (count,), generator=dice)
    return film(
        scenes, frames, CROP, CROP, pixels_per_unit=height, corner=corner.to(device),
        start=start.to(device),
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


def train_autoencoder(
    vae: Any, frames: int, batch: int, rate: float, clock: Clock, seed: int, compiled: bool
) -> list[tuple[float, float]]:
    device = next(vae.parameters()).device
    trainer = Trainer(vae, [adam(vae.parameters(), rate)], clock, decay=0.998)
    loss_of = torch.compile(autoencoder_loss, dynamic=False) if compiled else autoencoder_loss
    while clock.progress < 1:
        # Filming many at once is as quick as filming few.
        for clips in crops(8 * batch, frames, seed + trainer.steps, device).split(batch):
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = loss_of(vae, clips)
            trainer.step(loss)
            if trainer.steps == 1:
                clock.restart()
            trainer.note(loss, 400, "autoencoder")
    trainer.average.apply()
    say(f"autoencoder: {trainer.steps} steps")
    return trainer.losses


@torch.no_grad()
def reconstruction(vae: Any, size: Set, count: int, seed: int) -> float:
    """PSNR in dB on clips that were never trained on, whole and through the stock class."""
    device = next(vae.parameters()).device
    scenes = sample_scenes(count, seed, size.width / size.height, unseen=True).to(device)
    errors = []
    for i in range(count):
        clip = film(scenes[slice(i, i + 1)], size.frames, size.height, size.width)
        mean = vae.encode(clip.to(vae.dtype)).latent_dist.mode()
        back = vae.decode(mean).sample.float()
        errors.append(float(((back - clip) / 2).pow(2).mean()))
    return sum(-10 * math.log10(e) for e in errors) / count


# The text encoder


def train_text(encoder: Any, clock: Clock, seed: int) -> list[tuple[float, float]]:
    device = next(encoder.parameters()).device
    reader = Reader(encoder).to(device)
    trainer = Trainer(reader, [adam(reader.parameters(), 2e-3)], clock, decay=0.99)
    tokens, said = (x.to(device) for x in lesson(30_000, seed, config.tokenizer()))
    clock.restart()
    while clock.progress < 1:
        rows = torch.randint(len(tokens), (512,), device=device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = reader(tokens[rows], said[rows])
        trainer.step(loss)
        trainer.note(loss, 100, "text")
    trainer.average.apply()
    return trainer.losses


# Stages


STAGES = ("autoencoder", "text", "latents", "flow")


def train(
    state: Path,
    pace: float,
    device: torch.device,
    compiled: bool,
    seed: int,
    until: str,
    trained: Path | None = None,
) -> None:
    state.mkdir(parents=True, exist_ok=True)
    if trained is not None:
        adopt_autoencoder(trained, state)
    torch.manual_seed(seed)
    clocks = {name: Clock(seconds * pace) for name, seconds in SECONDS.items()}
    vae = config.autoencoder().to(device)
    if device.type == "cuda":
        channels_last(vae)
    model = Model().to(device)

    def autoencoder() -> list[tuple[float, float]]:
        return train_autoencoder(vae, 17, 12, 2e-3, clocks["autoencoder"], seed, compiled)

    def text() -> list[tuple[float, float]]:
        return train_text(model.text_encoder, clocks["text"], seed + 10**6)

    def flow() -> list[tuple[float, float]]:
        sets = load_latents(state, vae, pace, seed, device)
        if not (state / "statistics.pt").exists():
            save_statistics([sets[CLIPS], sets[WIDE_CLIPS]], state / "statistics.pt")
        numbers = torch.load(state / "statistics.pt", weights_only=True, map_location=device)
        mean, std = numbers["mean"], numbers["std"]
        if until == "latents":
            raise SystemExit(0)
        return train_flow(model, sets, mean, std, clocks["flow"], compiled)

    parts = (("autoencoder", vae, autoencoder), ("text", model.text_encoder, text),
             ("flow", model, flow))  # fmt: skip
    for name, module, run in parts:
        stage(state / f"{name}.pt", module, run)
        if name == until:
            return


def stage(file: Path, module: nn.Module, run: Callable[[], list[tuple[float, float]]]) -> None:
    """Train a module, or load what a finished stage left; its file is written when it is over."""
    if file.exists():
        module.load_state_dict(torch.load(file, weights_only=True)["weights"])
        say(f"{file.stem}: found")
        return
    began = time.monotonic()
    losses = run()
    say(f"{file.stem}: {time.monotonic() - began:.0f} s in all")
    weights = {name.replace("_orig_mod.", ""): t for name, t in module.state_dict().items()}
    part = file.with_suffix(".part")
    torch.save({"weights": weights, "losses": losses}, part)
    part.rename(file)


def adopt_autoencoder(folder: Path, state: Path) -> None:
    """Take a trained autoencoder, and what it says about its latents, as the finished stage."""
    from diffusers import AutoencoderKLWan

    vae = AutoencoderKLWan.from_pretrained(str(folder), torch_dtype=torch.float32)
    torch.save({"weights": vae.state_dict(), "losses": []}, state / "autoencoder.pt")
    mean, std = torch.tensor(vae.config.latents_mean), torch.tensor(vae.config.latents_std)
    torch.save({"mean": channels(mean), "std": channels(std)}, state / "statistics.pt")


def export(state: Path, folder: Path) -> None:
    """The trained parts as a diffusers folder in bf16, in files of at most 12 MB."""
    numbers = torch.load(state / "statistics.pt", weights_only=True, map_location="cpu")
    vae = config.autoencoder(
        latents_mean=[round(x, 5) for x in numbers["mean"].flatten().tolist()],
        latents_std=[round(x, 5) for x in numbers["std"].flatten().tolist()],
    )
    saved = {
        name: torch.load(state / f"{name}.pt", weights_only=True, map_location="cpu")
        for name in ("autoencoder", "text", "flow")
    }
    vae.load_state_dict(saved["autoencoder"]["weights"])
    with torch.no_grad():  # the posterior's deviation, as trained
        vae.quant_conv.weight[vae.config.z_dim :] = 0
        vae.quant_conv.bias[vae.config.z_dim :] = 2 * math.log(config.DEVIATION)
    model = Model()
    model.load_state_dict(saved["flow"]["weights"])
    pipe = config.pipeline(vae, model.transformer, model.text_encoder).to(torch.bfloat16)
    pipe.transformer.to(torch.bfloat16)
    pipe.save_pretrained(folder, max_shard_size="12MB")
    write_checksums(folder)
    losses = {name: part["losses"] for name, part in saved.items()}
    (state / "losses.json").write_text(json.dumps(losses) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--state", type=Path, required=True, help="where stages leave their files")
    parser.add_argument("--pace", type=float, default=1.0, help="share of the recipe's length")
    parser.add_argument("--export", type=Path, help="write the pipeline's folder here")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--autoencoder", type=Path, help="a trained one, instead of that stage")
    parser.add_argument("--until", choices=STAGES, default="flow", help="the last stage to run")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda":
        torch.backends.cudnn.benchmark = True
        torch.set_float32_matmul_precision("high")
    compiled = not asked.no_compile
    train(asked.state, asked.pace, device, compiled, asked.seed, asked.until, asked.autoencoder)
    if asked.export:
        export(asked.state, asked.export)


if __name__ == "__main__":
    main()
