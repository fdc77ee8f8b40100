"""What one stage of training leaves for the next: all weights in half precision, and a log.

A stage may run days later on another machine, so nothing else is kept: films and latents are made
anew, and optimisers start afresh with a warm-up. Weights are averages over the last steps, which
are both the model to use and the place to go on from.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from training import config

FILE_LIMIT = 16 * 2**20
TOTAL_LIMIT = 36 * 10**6
PIECE = 12 * 10**6  # bytes of one file of weights
PARTS = ("autoencoder", "text_encoder", "transformer")


@dataclass
class State:
    """Three modules in fp32, the statistics of latents, and what has been done so far."""

    autoencoder: Any
    text_encoder: Any
    transformer: Any
    mean: list[float]
    std: list[float]
    log: list[dict[str, Any]] = field(default_factory=list)

    def to(self, device: torch.device) -> State:
        for name in PARTS:
            getattr(self, name).to(device)
        return self


def new_state() -> State:
    """Untrained."""
    zeros, ones = [0.0] * config.AUTOENCODER["z_dim"], [1.0] * config.AUTOENCODER["z_dim"]
    return State(config.autoencoder(), config.text_encoder(), config.transformer(), zeros, ones)


def load_state(folder: Path) -> State:
    """From what a stage left, or from a pipeline's folder."""
    if (folder / "model_index.json").exists():
        return _from_pipeline(folder)
    facts = json.loads((folder / "state.json").read_text(encoding="utf-8"))
    state = new_state()
    for name in PARTS:
        weights: dict[str, Tensor] = {}
        for file in facts["files"][name]:
            weights |= load_file(folder / file)
        getattr(state, name).load_state_dict({k: w.float() for k, w in weights.items()})
    state.mean, state.std, state.log = facts["mean"], facts["std"], facts["log"]
    return state


def _from_pipeline(folder: Path) -> State:
    from diffusers import WanPipeline

    pipe = WanPipeline.from_pretrained(str(folder), torch_dtype=torch.float32)
    said = pipe.vae.config
    state = new_state()
    parts = (pipe.vae, pipe.text_encoder, pipe.transformer)
    for name, part in zip(PARTS, parts, strict=True):
        getattr(state, name).load_state_dict(part.state_dict())
    state.mean, state.std = list(said.latents_mean), list(said.latents_std)
    return state


def save_state(state: State, folder: Path) -> None:
    """Files of at most 16 MiB, 36 MB together; `state.json` comes last and names the others."""
    folder.mkdir(parents=True, exist_ok=True)
    files: dict[str, list[str]] = {}
    for name in PARTS:
        pieces = _pieces(weights_of(getattr(state, name)))
        files[name] = [f"{name}-{i}.safetensors" for i in range(1, len(pieces) + 1)]
        for file, piece in zip(files[name], pieces, strict=True):
            save_file(piece, folder / file)
    facts = {"files": files, "mean": state.mean, "std": state.std, "log": state.log}
    (folder / "state.json").write_text(json.dumps(facts) + "\n", encoding="utf-8")
    sizes = [(folder / file).stat().st_size for some in files.values() for file in some]
    if max(sizes) > FILE_LIMIT or sum(sizes) > TOTAL_LIMIT:
        raise ValueError(f"the state's files have {sizes} bytes, more than they may")


def weights_of(module: nn.Module) -> dict[str, Tensor]:
    """In half precision, under the names they have before compiling."""
    found = {}
    for name, weight in module.state_dict().items():
        half = weight.detach().to("cpu", torch.float16).contiguous()
        if not torch.isfinite(half).all():
            raise ValueError(f"{name} holds values that half precision cannot")
        found[name.replace("_orig_mod.", "")] = half
    return found


def _pieces(weights: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    pieces: list[dict[str, Tensor]] = [{}]
    room = PIECE
    for name, weight in weights.items():
        if weight.nbytes > room and pieces[-1]:
            pieces.append({})
            room = PIECE
        pieces[-1][name] = weight
        room -= weight.nbytes
    return pieces
