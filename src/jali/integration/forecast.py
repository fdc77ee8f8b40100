"""Will it be faster? A small cost model, its constants taken from measured rows.

`forecast.json` holds the constants, what they were fitted to, and those rows. A device that was
never measured gets no forecast rather than a guess.
"""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any

import torch

SLOWER = "sparse is not expected to be faster"  # how the warning begins


@functools.lru_cache(maxsize=1)
def constants() -> dict[str, Any]:
    text = resources.files("jali.integration").joinpath("forecast.json").read_text("utf-8")
    return dict(json.loads(text))


def device_name(device: torch.device | str) -> str:
    """The name under which a device was measured."""
    device = torch.device(device)
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def attention_times(
    *, heads: int, head_dim: int, tokens: int, cost: float | None, device: str, backend: str
) -> tuple[float, float] | None:
    """(dense, sparse) milliseconds of one attention call, planning included; None if unknown, or
    where only the data can tell the cost.

    `heads` counts those of all samples. Dense is the fastest dense kernel, not the slowest.
    """
    known = constants()["devices"].get(device, {}).get(backend)
    if known is None or cost is None:
        return None
    work = 4.0 * heads * float(tokens) ** 2 * head_dim / 1e9  # in units of a TFLOP/s times a ms
    dense = work / known["dense_tflops"]
    sparse = cost * work / known["sparse_tflops"] + known["fixed_ms"] + known["plan_share"] * dense
    return dense, sparse


def attention_speedup(*, device: torch.device | str, **call: Any) -> float | None:
    """Of one attention call over the fastest dense one; None where nothing was measured. `call` are
    the arguments of `attention_times`."""
    times = attention_times(device=device_name(device), **call)
    return None if times is None else times[0] / times[1]


def model_speedup(
    *, heads: int, head_dim: int, tokens: int, batch: int, cost: float | None, sparse_share: float,
    layers: int, weights: float, device: torch.device | str, backend: str,
) -> float | None:  # fmt: skip
    """Of a whole generation's transformer calls, `sparse_share` of whose attention is sparse."""
    return speedup_on(
        device_name(device), heads=heads, head_dim=head_dim, tokens=tokens, batch=batch, cost=cost,
        sparse_share=sparse_share, layers=layers, weights=weights, backend=backend,
    )  # fmt: skip


def speedup_on(
    name: str, *, heads: int, head_dim: int, tokens: int, batch: int, cost: float | None,
    sparse_share: float, layers: int, weights: float, backend: str,
) -> float | None:  # fmt: skip
    """The same, on a device by the name under which it was measured."""
    times = attention_times(
        heads=batch * heads, head_dim=head_dim, tokens=tokens, cost=cost, device=name,
        backend=backend,
    )  # fmt: skip
    if times is None:
        return None
    dense, sparse = times
    rest = 2.0 * weights * tokens * batch / 1e9 / constants()["devices"][name]["linear_tflops"]
    attention = sparse_share * sparse + (1 - sparse_share) * dense
    return (rest + layers * dense) / (rest + layers * attention)
