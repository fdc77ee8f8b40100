"""Which model a transformer is: its class, its configuration, and a few of its weights."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

SAMPLED = 8  # parameters that are looked at
VALUES = 4  # numbers of each
# What says where a model came from, not what it is.
_NOT_CONFIG = ("_class_name", "_diffusers_version", "_name_or_path")


@dataclass(frozen=True)
class Fingerprint:
    """A transformer: its class, a digest of its configuration, and a few of its weights."""

    kind: str
    config: str
    weights: Mapping[str, tuple[float, ...]] = field(default_factory=dict)

    @classmethod
    def of(cls, module: nn.Module) -> Fingerprint:
        """Of a transformer; weights that lie elsewhere (offloaded, sharded) are left out."""
        config: Any = getattr(module, "config", {})
        plain = {str(key): config[key] for key in config if key not in _NOT_CONFIG}
        text = json.dumps(plain, sort_keys=True, default=str)
        return cls(type(module).__name__, hashlib.sha256(text.encode()).hexdigest(), _some(module))

    def other_model(self, here: Fingerprint, what: str = "book") -> str | None:
        """Why `here` is another model than this one, which `what` is of; None where it is
        the same."""
        if self.kind != here.kind:
            return f"the {what} is of a {self.kind}, this is a {here.kind}"
        if self.config != here.config:
            return (
                f"the {what}'s {self.kind} has the configuration {self.config[:12]}, this one "
                f"{here.config[:12]}"
            )
        return None

    def other_weights(self, here: Fingerprint, what: str = "book") -> str | None:
        """Where the weights differ by more than a change of precision (fp8 is the coarsest) makes
        them."""
        for name, values in self.weights.items():
            found = here.weights.get(name, ())
            if len(found) != len(values):
                continue
            largest = max(map(abs, values), default=0.0)
            for own, other in zip(values, found, strict=True):
                if abs(own - other) > 0.08 * largest + 1e-6:
                    return f"{name} holds {own:.4g} in the {what} and {other:.4g} here"
        return None


def check_same_model(
    what: str,
    known: Mapping[str, Fingerprint],
    transformers: Mapping[str, nn.Module],
    model: str | None,
    other_weights: str | None,
) -> None:
    """Refuse transformers that are not those that a book or a recipe (`what`) was made with, naming
    both. `other_weights` is what to do where only the weights are others; None accepts them."""
    if set(known) - set(transformers):
        raise ValueError(
            f"the {what} is of {', '.join(known)}, this pipeline has {', '.join(transformers)}"
        )
    for name, recorded in known.items():
        here = Fingerprint.of(transformers[name])
        if problem := recorded.other_model(here, what):
            of = f" ({model})" if model else ""
            raise ValueError(f"this is another model than the {what}'s{of}: {problem}")
        problem = recorded.other_weights(here, what)
        if problem and other_weights is not None:
            raise ValueError(
                f"the weights of {name} are not those the {what} was made with: {problem}. "
                f"{other_weights}"
            )


def _some(module: nn.Module) -> dict[str, tuple[float, ...]]:
    """A few numbers from all over the model. A LoRA adds parameters and leaves these alone."""
    named = [
        (name.replace(".base_layer", ""), p.detach())
        for name, p in module.named_parameters()
        if p.dim() >= 2 and "lora" not in name.lower()
    ]
    chosen = named[:: max(1, len(named) // SAMPLED)][:SAMPLED]
    return {name: values_of(p) for name, p in chosen if is_readable(p)}


def is_readable(p: Tensor) -> bool:
    """Whether its numbers lie here, as they are."""
    return p.dtype.is_floating_point and not p.is_meta and type(p.data) is Tensor


def values_of(p: Tensor) -> tuple[float, ...]:
    """A few numbers from all over a parameter."""
    at = torch.linspace(0, p.numel() - 1, VALUES, device=p.device).long()
    return tuple(p.reshape(-1)[at].float().tolist())
