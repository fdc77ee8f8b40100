"""Which model a transformer is: its class, its configuration, and a few of its weights."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import torch
from torch import Tensor, nn

from jali.maskbook import Fingerprint

SAMPLED = 8  # parameters that are looked at
VALUES = 4  # numbers of each
# What says where a model came from, not what it is.
_NOT_CONFIG = ("_class_name", "_diffusers_version", "_name_or_path")


def fingerprint(module: nn.Module) -> Fingerprint:
    """Of a transformer; weights that lie elsewhere (offloaded, sharded) are left out."""
    config: Any = getattr(module, "config", {})
    plain = {str(key): config[key] for key in config if key not in _NOT_CONFIG}
    text = json.dumps(plain, sort_keys=True, default=str)
    return Fingerprint(
        kind=type(module).__name__,
        config=hashlib.sha256(text.encode()).hexdigest(),
        weights=_weights(module),
    )


def _weights(module: nn.Module) -> dict[str, tuple[float, ...]]:
    """A few numbers from all over the model. A LoRA adds parameters and leaves these alone."""
    named = [
        (name.replace(".base_layer", ""), p)
        for name, p in module.named_parameters()
        if p.dim() >= 2 and "lora" not in name.lower()
    ]
    chosen = named[:: max(1, len(named) // SAMPLED)][:SAMPLED]
    return {name: _values(p.detach()) for name, p in chosen if _readable(p)}


def _readable(p: Tensor) -> bool:
    return p.dtype.is_floating_point and not p.is_meta and type(p.data) is Tensor


def _values(p: Tensor) -> tuple[float, ...]:
    at = torch.linspace(0, p.numel() - 1, VALUES, device=p.device).long()
    return tuple(p.reshape(-1)[at].float().tolist())
