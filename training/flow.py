"""Flow matching: from noise to latents, by a text. Pictures first, then clips."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from training import config
from training.cross_attention import attend_without_padding
from training.latents import CLIPS, LONGEST, PICTURES, WIDE_CLIPS, WIDE_PICTURES, Latents, Set
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


@dataclass(frozen=True, slots=True)
class Phase:
    """Until this share of the time, steps take these batches by turns."""

    until: float
    batches: tuple[Batch, ...]


# Pictures teach words, colours and shapes at a small part of a clip's price; short clips teach what
# moves; the rest is practice at full length.
CURRICULUM = (
    Phase(0.30, (Batch(PICTURES, 1, 256),) * 3 + (Batch(WIDE_PICTURES, 1, 64),)),
    Phase(0.50, (Batch(CLIPS, 3, 80), Batch(CLIPS, 3, 80), Batch(WIDE_CLIPS, 3, 20))),
    Phase(0.85, (Batch(CLIPS, 9, 32), Batch(CLIPS, 9, 32), Batch(WIDE_CLIPS, 10, 8))),
    Phase(1.00, (Batch(CLIPS, 9, 32), Batch(WIDE_CLIPS, 10, 8))),
)


class Model(nn.Module):
    """Text encoder and transformer as one module with one optimiser."""

    def __init__(self) -> None:
        super().__init__()
        self.text_encoder = config.text_encoder()
        self.transformer = config.transformer()

    def forward(self, noisy: Tensor, timestep: Tensor, tokens: Tensor) -> Tensor:
        text = self.read(tokens)
        return self.transformer(noisy, timestep, text, return_dict=False)[0]

    def read(self, tokens: Tensor) -> Tensor:
        """As WanPipeline does, zeros after the text; but one stands for many."""
        mask = tokens > 0
        states = self.text_encoder(tokens.long(), attention_mask=mask.long()).last_hidden_state
        return states * mask.unsqueeze(-1)


def flow_loss(model: nn.Module, clean: Tensor, tokens: Tensor) -> Tensor:
    noise = torch.randn_like(clean)
    u = torch.sigmoid(torch.randn(len(clean), device=clean.device))
    sigma = config.SHIFT * u / (1 + (config.SHIFT - 1) * u)
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


def block_matrices(transformer: nn.Module) -> list[nn.Parameter]:
    """What Muon steps: the weights inside the blocks."""
    return [p for name, p in transformer.named_parameters() if "blocks." in name and p.dim() == 2]


def train_flow(
    model: Model, sets: dict[Set, Latents], mean: Tensor, std: Tensor, clock: Clock, compiled: bool
) -> list[tuple[float, float]]:
    device = mean.device
    inside = block_matrices(model.transformer)
    known = {id(p) for p in inside}
    others = [p for p in model.transformer.parameters() if id(p) not in known]
    optimisers = [
        Muon(inside, 1.5e-3, weight_decay=0.01),
        adam(others, 1e-3),
        adam(model.text_encoder.parameters(), 2e-4),
    ]
    trainer = Trainer(model, optimisers, clock, decay=0.9985)
    attend_without_padding(model.transformer, LONGEST, config.TEXT_LENGTH)
    if compiled:
        import torch._dynamo.config as dynamo

        dynamo.recompile_limit = 64  # one graph for every kind of batch
        model.transformer.compile_repeated_blocks(fullgraph=True, dynamic=False)
    seen: set[Batch] = set()
    clock.restart()
    while clock.progress < 1:
        batch = due(trainer.steps, clock.progress)
        latents = sets[batch.set]
        began = time.monotonic()
        rows = torch.randint(len(latents.latents), (batch.size,), device=device)
        clean = (latents.latents[rows, :, : batch.frames].float() - mean) / std
        tokens = without_captions(latents.tokens[rows], 0.1)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = flow_loss(model, clean, tokens)
        trainer.step(loss)
        if batch not in seen:  # compiling is not training
            seen.add(batch)
            if device.type == "cuda":
                torch.cuda.synchronize()
            clock.start += time.monotonic() - began
        trainer.note(loss, 101, "flow")  # a prime: every kind of batch is noted
    trainer.average.apply()
    say(f"flow: {trainer.steps} steps")
    return trainer.losses
