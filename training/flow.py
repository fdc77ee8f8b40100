"""Flow matching: from noise to latents, by a text. Pictures first, then clips."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from training import config
from training.cross_attention import attend_without_padding
from training.latents import (
    CLIPS,
    LONG_CLIPS,
    LONGEST,
    PICTURES,
    WIDE_CLIPS,
    WIDE_PICTURES,
    Latents,
    Set,
)
from training.muon import Muon
from training.trainer import Clock, Trainer, adam, say


@dataclass(frozen=True, slots=True)
class Batch:
    """What one step sees: so many samples of a set, cut to so many latent frames.

    Latents are causal in time, so the first ones of a long clip are those of a short one.
    """

    set: Set
    frames: int
    size: int

    @property
    def shift(self) -> float:
        """Of the noise levels. On a larger grid the same noise hides less: where things are is
        decided at higher levels, and a model that has seldom seen them decides it twice."""
        tokens = self.frames * (self.set.height // 8) * (self.set.width // 8)
        return config.SHIFT * max(1.0, (tokens / 2304) ** 0.5)


@dataclass(frozen=True, slots=True)
class Phase:
    """Until this share of the whole training, steps take these batches by turns."""

    until: float
    batches: tuple[Batch, ...]


# Pictures teach words, textures and shapes at a small part of a clip's price; the rest is practice
# at full length, with some pictures among it: where things are, and how many, is seen in one of
# them, and a step holds nine times as many as clips.
WHOLE = (Batch(CLIPS, 9, 32), Batch(WIDE_CLIPS, 10, 8))
STILL = (Batch(PICTURES, 1, 256), Batch(WIDE_PICTURES, 1, 72))
CURRICULUM = (
    Phase(0.06, STILL),
    Phase(0.35, (*WHOLE, *WHOLE, Batch(LONG_CLIPS, 21, 9))),
    Phase(1.00, (*WHOLE, *WHOLE, Batch(LONG_CLIPS, 21, 9), *STILL)),
)


class Model(nn.Module):
    """Text encoder and transformer as one module with one optimiser."""

    def __init__(self, text_encoder: Any, transformer: Any) -> None:
        super().__init__()
        self.text_encoder = text_encoder
        self.transformer = transformer

    def forward(self, noisy: Tensor, timestep: Tensor, tokens: Tensor) -> Tensor:
        text = self.read(tokens)
        return self.transformer(noisy, timestep, text, return_dict=False)[0]

    def read(self, tokens: Tensor) -> Tensor:
        """As WanPipeline does, zeros after the text; but one stands for many."""
        mask = tokens > 0
        states = self.text_encoder(tokens.long(), attention_mask=mask.long()).last_hidden_state
        return states * mask.unsqueeze(-1)


def flow_loss(model: nn.Module, clean: Tensor, tokens: Tensor, shift: float) -> Tensor:
    noise = torch.randn_like(clean)
    u = torch.sigmoid(1.2 * torch.randn(len(clean), device=clean.device))
    sigma = shift * u / (1 + (shift - 1) * u)
    # Some of any level: fine texture is made at the low ones, which are rare otherwise.
    even = torch.rand(len(clean), 2, device=clean.device)
    sigma = torch.where(even[:, 0] < 0.25, even[:, 1], sigma)
    level = sigma.view(-1, 1, 1, 1, 1)
    noisy = (1 - level) * clean + level * noise
    velocity = model(noisy, sigma * 1000, tokens)
    return (velocity.float() - (noise - clean)).pow(2).mean()


def without_captions(tokens: Tensor, share: float) -> Tensor:
    """Empty sentences here and there, so that the model can be guided."""
    empty = torch.zeros_like(tokens)
    empty[:, 0] = 1  # the end of a text
    drop = torch.rand(len(tokens), 1, device=tokens.device) < share
    return torch.where(drop, empty, tokens)


def due(step: int, progress: float) -> Batch:
    """The batch whose turn it is."""
    phase = next((phase for phase in CURRICULUM if progress < phase.until), CURRICULUM[-1])
    return phase.batches[step % len(phase.batches)]


def sets_of(span: tuple[float, float]) -> set[Set]:
    """What is seen in a span of the curriculum."""
    begins = [0.0, *(phase.until for phase in CURRICULUM)]
    return {
        batch.set
        for begin, phase in zip(begins, CURRICULUM, strict=False)
        if begin < span[1] and phase.until > span[0]
        for batch in phase.batches
    }


def block_matrices(transformer: nn.Module) -> list[nn.Parameter]:
    """What Muon steps: the weights inside the blocks."""
    return [p for name, p in transformer.named_parameters() if "blocks." in name and p.dim() == 2]


def train_flow(
    model: Model,
    sets: dict[Set, Latents],
    mean: Tensor,
    std: Tensor,
    clock: Clock,
    *,
    span: tuple[float, float] = (0.0, 1.0),
    rate: float = 1.0,
    settle: float = 0.3,
    compiled: bool = False,
    keep: Callable[[], None] = lambda: None,
) -> Trainer:
    """Go through a span of the curriculum; `keep` is called with averaged weights now and then."""
    device = mean.device
    inside = block_matrices(model.transformer)
    known = {id(p) for p in inside}
    others = [p for p in model.transformer.parameters() if id(p) not in known]
    optimisers = [
        Muon(inside, 1.5e-3 * rate, weight_decay=0.01),
        adam(others, 1e-3 * rate),
        adam(model.text_encoder.parameters(), 2e-4 * rate),
    ]
    trainer = Trainer(model, optimisers, clock, decay=0.999, settle=settle)
    attend_without_padding(model.transformer, LONGEST, config.TEXT_LENGTH)
    if compiled:
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = 64  # one graph for every kind of batch
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    seen: set[Batch] = set()
    clock.restart()
    kept = 0.0
    while clock.progress < 1:
        batch = due(trainer.steps, span[0] + (span[1] - span[0]) * clock.progress)
        latents = sets[batch.set]
        began = time.monotonic()
        rows = torch.randint(len(latents.latents), (batch.size,), device=device)
        clean = (latents.latents[rows, :, : batch.frames].float() - mean) / std
        tokens = without_captions(latents.tokens[rows], 0.1)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = flow_loss(model, clean, tokens, batch.shift)
        trainer.step(loss)
        if batch not in seen:  # compiling is not training
            seen.add(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            lost = time.monotonic() - began
            clock.start += lost
            say(f"flow: first batch of {batch.set.name}, {batch.frames} frames: {lost:.1f} s")
        trainer.note(loss, 101, f"flow {batch.set.name}/{batch.frames}")  # a prime: every kind
        if clock.elapsed > kept + 100:
            kept = clock.elapsed
            with trainer.average.applied():
                keep()
    trainer.average.apply()
    say(f"flow: {trainer.steps} steps")
    return trainer
