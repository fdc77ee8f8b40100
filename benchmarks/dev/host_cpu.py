"""jali's own Python per attention call, without a GPU.

    PYTHONPATH=src python benchmarks/dev/host_cpu.py                    # µs per call and method
    PYTHONPATH=src python benchmarks/dev/host_cpu.py entropy --profile  # where they go

`Run.attend` goes the way it goes on a Hopper GPU, on tensors in the host's memory: Triton's
launcher and FlashAttention-4's function are replaced by functions that return at once, and what
jali asks of the device is answered as an H200 would. No number comes of it, only time.

`host_us` is a whole call on the host with all launches left out: all Python up to the launcher,
PyTorch's allocations and views. `own_us` is that without the two, which are counted, and taken at
what one of them takes when it is repeated alone. `benchmarks/dev/wan_gpu.py host` measures the
same on a GPU.
"""

from __future__ import annotations

import argparse
import cProfile
import functools
import gc
import json
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jali import apply_sparse_attention
from jali.methods import AdaBsa, Entropy, Method, Psa, RfV2, Schedule
from jali.planning.budget import Budget

GRID = (3, 8, 8)
HEADS, DIM = 2, 16  # few numbers: what is left of an operator is its call
METHODS: dict[str, Method] = {
    "entropy": Entropy(Budget(0.5)),
    "rf_v2": RfV2(sparsity=0.8),
    "ada_bsa": AdaBsa(sparsity=0.8),
    "psa": Psa(),
    "dense": Schedule(Entropy(), min_tokens=2**62),
}


class BlockSparse(NamedTuple):
    """As in the package: what a block-sparse call names."""

    mask_block_cnt: Tensor
    mask_block_idx: Tensor
    full_block_cnt: Tensor | None = None
    full_block_idx: Tensor | None = None
    block_size: tuple[int, int] | None = None


def _flash_attn(results: dict[torch.Size, tuple[Tensor, Tensor]], q: Tensor) -> Any:
    if q.shape not in results:
        batch, seq, heads, _dim = q.shape
        results[q.shape] = torch.empty_like(q), torch.empty(batch, heads, seq, device=q.device)
    return results[q.shape]


@contextmanager
def changed(*changes: tuple[Any, str, Any]) -> Iterator[None]:
    """Attributes of modules and classes, put back at the end."""
    before = [(place, name, vars(place).get(name)) for place, name, _ in changes]
    for place, name, value in changes:
        setattr(place, name, value)
    try:
        yield
    finally:
        for place, name, value in before:
            if value is None:
                delattr(place, name)  # inherited
            else:
                setattr(place, name, value)


@contextmanager
def unlaunched() -> Iterator[None]:
    """Launches of Triton's kernels, FlashAttention-4's function and PyTorch's sum return at once.
    What they would have written is left as it was allocated: nothing may be looked up by it."""
    one = torch.zeros(())
    changes: list[tuple[Any, str, Any]] = [(torch.Tensor, "sum", lambda *_, **__: one)]
    with suppress(ImportError):
        from jali.kernels.launch import Launch

        changes.append((Launch, "__call__", lambda *_: None))
    with suppress(ImportError):
        import flash_attn.cute.interface as interface

        results: dict[torch.Size, tuple[Tensor, Tensor]] = {}
        changes.append((interface, "flash_attn_func", lambda q, *_, **__: _flash_attn(results, q)))
    with changed(*changes):
        yield


@functools.cache
def _install_flash_attn() -> None:
    """A package of that name, of which only names are asked."""
    package, cute, interface, sparsity = (
        ModuleType(f"flash_attn{part}")
        for part in ("", ".cute", ".cute.interface", ".cute.block_sparsity")
    )
    package.cute, cute.interface, cute.block_sparsity = cute, interface, sparsity  # type: ignore[attr-defined]
    interface.flash_attn_func, sparsity.BlockSparseTensorsTorch = None, BlockSparse  # type: ignore[attr-defined]
    sys.modules.update({m.__name__: m for m in (package, cute, interface, sparsity)})


@contextmanager
def pretended() -> Iterator[None]:
    """Tensors are on an H200, FlashAttention-4 is installed, and nothing is launched."""
    from jali import kernels
    from jali.backends import fa4
    from jali.kernels import attention, descriptor

    _install_flash_attn()
    with (
        changed(
            (torch.Tensor, "is_cuda", property(lambda _: True)),
            (kernels, "why_unavailable", lambda _: ()),
            (kernels, "available", lambda _: True),
            (fa4, "why_no_kernel", lambda _: ()),
            (fa4, "_generation", lambda _: 9),
            (attention, "capability", lambda _: (9, 0)),
            (descriptor, "capability", lambda _: (9, 0)),
        ),
        unlaunched(),
    ):
        yield


@contextmanager
def ready(method: Method) -> Iterator[Callable[[], Tensor]]:
    """A call of layer 1 of a model that is in the middle of a step."""
    from diffusers import WanTransformer3DModel

    model = WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=16, num_layers=3,
        ffn_dim=32, text_dim=16, freq_dim=16, in_channels=4, out_channels=4, cross_attn_norm=True,
        qk_norm="rms_norm_across_heads",
    ).eval()  # fmt: skip
    frames, high, wide = GRID
    handle = apply_sparse_attention(model, Schedule(method, dense_layers=(0,)), finite="raise")
    run = handle.run
    q, k, v = (
        torch.empty(1, frames * high * wide, HEADS, DIM, dtype=torch.bfloat16) for _ in range(3)
    )
    with torch.no_grad():
        model(
            hidden_states=torch.zeros(1, 4, frames, 2 * high, 2 * wide),
            encoder_hidden_states=torch.zeros(1, 8, 16), timestep=torch.tensor([900.0]),
        )  # fmt: skip
        with pretended():
            yield lambda: run.attend(1, q, k, v, None, None, 1, 0)
    handle.remove()


def median_us(call: Callable[[], object], calls: int) -> float:
    times = []
    for _ in range(max(1, calls)):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return 1e6 * statistics.median(times)


class Asked(NamedTuple):
    """What a call asks of PyTorch while nothing is launched."""

    allocations: int
    views: int
    launching: tuple[str, ...]  # what would launch all the same: its time is in the call's


def asked_of_torch(call: Callable[[], object]) -> Asked:
    from torch.utils._python_dispatch import TorchDispatchMode

    found: dict[str, list[str]] = {"empty": [], "view": [], "other": []}

    class Counting(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            name = func.__name__.split(".")[0]
            kind = "view" if func.is_view else "empty" if "empty" in name else "other"
            found[kind].append(name)
            return func(*args, **(kwargs or {}))

    with Counting():
        call()
    return Asked(len(found["empty"]), len(found["view"]), tuple(found["other"]))


def shares(call_us: float, asked: Asked, allocation_us: float, view_us: float) -> dict[str, Any]:
    """A call without launches: what of it are PyTorch's allocations and views, and the rest."""
    torch_us = asked.allocations * allocation_us + asked.views * view_us
    return {
        "host_us": round(call_us, 1),
        "own_us": round(call_us - torch_us, 1),
        "allocations": asked.allocations,
        "allocation_us": round(allocation_us, 2),
        "views": asked.views,
        "view_us": round(view_us, 2),
        "not_left_out": list(asked.launching),
    }


def measure(method: Method, calls: int) -> dict[str, Any]:
    with ready(method) as call:
        for _ in range(50):
            call()
        asked = asked_of_torch(call)
        x = torch.empty(2, 3, 4)
        gc.collect()
        gc.disable()
        works: tuple[Callable[[], object], ...] = (
            call,
            lambda: torch.empty(2, 3, 4, dtype=x.dtype, device=x.device),
            lambda: x.transpose(1, 2),
        )
        rounds = [[median_us(work, calls // 20) for work in works] for _ in range(20)]
        gc.enable()
    # A machine has other things to do, too: all three are taken at its fastest.
    host, allocation, view = (min(times) for times in zip(*rounds, strict=True))
    return shares(host, asked, allocation, view)


def profile(method: Method, calls: int) -> None:
    with ready(method) as call:
        for _ in range(50):
            call()
        watch = cProfile.Profile()
        watch.enable()
        for _ in range(calls):
            call()
        watch.disable()
    stats = pstats.Stats(watch)
    stats.sort_stats("tottime").print_stats(45)
    stats.sort_stats("cumulative").print_stats(60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("methods", nargs="*", default=list(METHODS), help=", ".join(METHODS))
    parser.add_argument("--calls", type=int, default=1000)
    parser.add_argument("--profile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for name in given.methods:
        if given.profile:
            profile(METHODS[name], given.calls)
        else:
            print(json.dumps({"method": name, **measure(METHODS[name], given.calls)}), flush=True)


if __name__ == "__main__":
    main()
