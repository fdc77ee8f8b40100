"""How noisy every step of a run is, as its scheduler says."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def noise_levels(scheduler: Any, steps: int) -> tuple[str, tuple[float, ...]] | None:
    """("sigma" or "timestep", a level for each of the last `steps` steps); None where it does not
    say. Sigmas come with one more, the end of the last step."""
    timesteps = _numbers(getattr(scheduler, "timesteps", None))
    if timesteps is None or len(timesteps) < steps:
        return None
    sigmas = _numbers(getattr(scheduler, "sigmas", None))
    if sigmas is not None and len(sigmas) in (len(timesteps), len(timesteps) + 1):
        # Image to image starts later in the same list.
        return "sigma", sigmas[len(timesteps) - steps : len(timesteps)]
    return "timestep", timesteps[-steps:]


def _numbers(values: Any) -> tuple[float, ...] | None:
    return tuple(values.float().tolist()) if isinstance(values, Tensor) and values.numel() else None
