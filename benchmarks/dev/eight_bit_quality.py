"""What eight bits cost on nano's clips: PSNR against dense clips, for the same method and totals.

    PYTHONPATH=src python benchmarks/dev/eight_bit_quality.py [--prompts 8] [--kernel]

192x320x37, 12 steps. Dense calls stay as they are; sparse ones run in bf16 (on a CPU fp32), and
with q·k in int8 or e4m3 and p·v in e4m3, emulated in torch or, with --kernel, by the kernel itself.
"on dense" compares with the dense run, as a user would; "on sparse" with the clips of the same
method without eight bits. Writes $OUT/eight-bit-quality.json, anew after every row.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jali import BlockPlan, generate_video, load_pipeline, sparse_processor_mode
from jali.backends import BACKENDS
from jali.backends.reference import token_levels
from jali.evaluation.bench.machine import machine
from jali.evaluation.quality.metric import psnr
from jali.files import write_json
from jali.generation.prompts import default_prompts
from jali.methods import Entropy, Method, RateDistortion

SIZE = {"height": 192, "width": 320, "num_frames": 37}
METHODS: dict[str, Method] = {
    "entropy": Entropy(q_block=128, k_block=128),
    "rd, read or skip": RateDistortion(levels=("skip",), q_block=128, k_block=128),
}
Attend = Callable[..., tuple[Tensor, Tensor]]
E4M3 = torch.float8_e4m3fn


def scaled(x: Tensor, int8: bool) -> Tensor:
    """What is left of x [B, H, S, D] after eight bits with one scale per 128 rows."""
    length = x.shape[2]
    whole = torch.nn.functional.pad(x, (0, 0, 0, -length % 128)).unflatten(2, (-1, 128))
    top = whole.abs().amax((3, 4), keepdim=True).clamp_min(1e-10)
    unit = top / (127 if int8 else 448)
    kept = (whole / unit).round() if int8 else (whole / unit).to(E4M3).float()
    return (kept * unit).flatten(2, 3)[:, :, :length]


def emulated(int8: bool) -> Attend:
    """The same arithmetic in torch, but for the order of sums."""

    def attend(
        _: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, *__: Any, **___: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert plan.ratios == (1,), plan.ratios
        dtype = q.dtype
        q, k, v = q.float(), k.float(), v.float()
        k = scaled(k - k[:, :, ::8].mean(2, keepdim=True), int8)
        mean = v[:, :, ::8].mean(2, keepdim=True)
        unit = (v - mean)[:, :, ::8].abs().amax(2, keepdim=True) / 64
        values = ((v - mean) / unit).clamp(-448, 448).to(E4M3).float()
        logits = (scaled(q, int8) @ k.transpose(-1, -2)) * scale
        logits = logits.masked_fill(token_levels(plan) != 1, -torch.inf)
        weights = (logits - logits.amax(-1, keepdim=True)).exp() * 448
        out = weights.to(E4M3).float() @ values / weights.sum(-1, keepdim=True)
        return (out * unit + mean).to(dtype), logits.logsumexp(-1)

    return attend


def by_kernel(int8: bool) -> Attend:
    from eight_bit import Config, attend_eight, quantise

    def attend(
        _: Any, q: Tensor, k: Tensor, v: Tensor, plan: BlockPlan, scale: float, *__: Any, **___: Any
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        assert plan.ratios == (1,), plan.ratios
        out, lse = torch.empty_like(q), torch.empty(q.shape[:3], device=q.device)
        eight = quantise(q, k, v, scale, int8)
        attend_eight(eight, out, lse, *plan.lists[1], plan.blocks.q, k.shape[2], Config())
        return out, lse

    return attend


@contextlib.contextmanager
def replaced(name: str, attend: Attend | None) -> Iterator[None]:
    kind = type(BACKENDS[name])
    before = kind.attend
    if attend is not None:
        kind.attend = attend  # type: ignore[method-assign]
    try:
        yield
    finally:
        kind.attend = before  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--total", type=float, default=0.4)
    parser.add_argument("--kernel", action="store_true")
    given = parser.parse_args()
    start, gpu = time.monotonic(), torch.cuda.is_available()
    device, dtype = ("cuda", torch.bfloat16) if gpu else ("cpu", torch.float32)
    backend = "triton" if gpu else "torch"
    pipe = load_pipeline("nano", device=device, dtype=dtype)
    pipe.set_progress_bar_config(disable=True)
    texts = default_prompts("nano")[: given.prompts]
    result: dict[str, Any] = {
        "what": "eight bits on nano's clips", "machine": machine(torch.device(device)),
        "size": SIZE, "steps": given.steps, "total": given.total, "prompts": len(texts),
        "by": "kernel" if given.kernel else "emulation", "rows": [],
    }  # fmt: skip

    def clips(mode: Any) -> tuple[list[Tensor], float]:
        made, costs = [], []
        with mode as handle:
            for i, text in enumerate(texts):
                out = generate_video(pipe, text, "nano", steps=given.steps, seed=1000 + i, **SIZE)
                made.append((out * 255).round().to(torch.uint8))
                costs.append(1.0 if handle is None else handle.stats().cost)
        return made, statistics.mean(costs)

    def compared(a: list[Tensor], b: list[Tensor]) -> list[float]:
        return [round(float(psnr(x, y).mean()), 3) for x, y in zip(a, b, strict=True)]

    dense, _ = clips(contextlib.nullcontext(None))
    make = by_kernel if given.kernel else emulated
    for name, method in METHODS.items():
        plain: list[Tensor] = []
        for bits, attend in (("16", None), ("int8 and e4m3", make(True)), ("e4m3", make(False))):
            row: dict[str, Any] = {"method": name, "bits": bits}
            try:
                with replaced(backend, attend):
                    made, cost = clips(
                        sparse_processor_mode(
                            pipe, method=method, total=given.total, backend=backend
                        )
                    )
                plain = plain or made
                each = compared(dense, made)
                row |= {"cost": cost, "on_dense": statistics.mean(each), "each": each}
                row["on_sparse"] = compared(plain, made) if attend else None
            except Exception as error:  # one row must not stop the others
                row["error"] = f"{type(error).__name__}: {error}"[:600]
            result["rows"].append(row)
            print(f"{time.monotonic() - start:6.1f} s  {row}", flush=True)
            target = Path(os.environ.get("OUT", ".")) / "eight-bit-quality.json"
            write_json(target, result, sort_keys=False)


if __name__ == "__main__":
    main()
