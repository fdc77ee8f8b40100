"""q, k and v of chosen attention calls, taken from a pipeline while it generates."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from jali.generation.produce import frames_of
from jali.generation.settings import Settings
from jali.integration.modes import sparse_processor_mode
from jali.integration.transformer import AttentionCall
from jali.methods import FastestDense
from jali.planning.site import Site
from jali.tokens.grid import TokenGrid
from jali.tokens.padding import KeyPadding


@dataclass(frozen=True, eq=False)
class Capture:
    """One attention call: q, k, v [B, H, S, D] in the model's own order."""

    site: Site
    grid: TokenGrid
    q: Tensor
    k: Tensor
    v: Tensor
    padding: KeyPadding | None
    scale: float


class _EnoughError(Exception):
    """All wanted calls have been seen: the rest of the generation is not needed."""


def capture(
    pipe: Any,
    settings: Settings,
    prompt: str,
    layers: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
) -> list[Capture]:
    """The conditional calls of these layers and steps in a dense generation of the prompt.

    Without `layers` three spread over the depth, without `steps` the middle one. The generation
    ends with the last call that is wanted.
    """
    total = int(settings.steps or 1)
    at = sorted(set(steps)) if steps else [total // 2]
    if at[0] < 0 or at[-1] >= total:
        raise ValueError(f"steps count from 0 to {total - 1}, got {', '.join(map(str, at))}")
    found: dict[tuple[int, int], Capture] = {}

    def watch(seen: AttentionCall) -> None:
        site = seen.site
        wanted = sorted(set(layers)) if layers else default_layers(site.layers)
        if wanted[0] < 0 or wanted[-1] >= site.layers:
            raise ValueError(
                f"this model has the layers 0 to {site.layers - 1}, got "
                f"{', '.join(map(str, wanted))}"
            )
        late = (site.step, site.layer) > (at[-1], wanted[-1])
        if site.step in at and site.layer in wanted and site.branch != "uncond":
            if isinstance(seen.grid, str):
                raise ValueError(f"layer {site.layer} cannot be sparse: {seen.grid}")
            scale = seen.q.shape[-1] ** -0.5 if seen.scale is None else seen.scale
            # Copies: a pipeline may go on in the same memory. Where guidance comes as a batch, the
            # conditional sample is the last.
            q, k, v = (x[-1:].detach().clone() for x in (seen.q, seen.k, seen.v))
            padding = seen.padding and seen.padding.last_sample()
            key = site.step, site.layer
            found.setdefault(key, Capture(site, seen.grid, q, k, v, padding, scale))
        if late or len(found) == len(at) * len(wanted):
            raise _EnoughError

    with sparse_processor_mode(pipe, method=FastestDense(), finite="off") as handle:
        handle.run.watch = watch
        with contextlib.suppress(_EnoughError):
            frames_of(pipe, settings, prompt, settings.seed)
    if not found:
        raise ValueError("no self-attention call came by that could be sparse")
    return [found[key] for key in sorted(found)]


def default_layers(layers: int) -> list[int]:
    """A quarter, half and three quarters of the depth."""
    return sorted({layers // 4, layers // 2, (3 * layers) // 4})
