"""Block-sparse attention in eight bits beside FlashAttention-4, on a Hopper GPU.

    PYTHONPATH=src python benchmarks/dev/eight_bit_gpu.py [--seconds 80] [--parts roles,triton]

12 heads of 128 at 480p (32,760 tokens) and 720p (75,600), the same lists for all, drawn by lot. A
row measures fa4, quantisation, the product and both together in turn, so that all have the same
clocks, and states the rounding error against fp32 attention over the same lists, the difference
from fa4's output over all heads, and whether two runs agree bit by bit. Each part runs in a process
of its own: one that hangs is ended, noted, and the rest goes on. Writes $OUT/eight-bit-h200.json,
anew after every row. Times are medians of device time in milliseconds, the host being ahead.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

START = time.monotonic()
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
HEADS, DIM, K_BLOCK = 12, 128, 128
SIZES = {"480p": 32760, "720p": 75600}
VARIANTS = {"int8 and e4m3": True, "e4m3": False}
SILENCE = 45.0  # seconds without a word after which a part is taken to hang


class Lists(NamedTuple):
    counts: Tensor  # int32 [1, H, M]
    indices: Tensor  # int32 [1, H, M, count], ascending
    q_block: int


def tokens(length: int, seed: int) -> Tensor:
    """[1, H, S, D] view of BSHD memory: noise over slowly drifting directions, as in real heads."""
    g = torch.Generator(device=DEVICE).manual_seed(seed)
    coarse = torch.randn(1, HEADS * DIM, length // 64 + 2, device=DEVICE, generator=g)
    smooth = torch.nn.functional.interpolate(coarse, length, mode="linear").transpose(1, 2)
    noise = torch.randn(1, length, HEADS * DIM, device=DEVICE, generator=g)
    return (smooth + noise).bfloat16().contiguous().unflatten(2, (HEADS, DIM)).transpose(1, 2)


def drawn(length: int, q_block: int, share: float) -> Lists:
    """`share` of all key blocks for every query block; the last, ragged one for half of them."""
    rows, blocks = -(-length // q_block), -(-length // K_BLOCK)
    g = torch.Generator(device=DEVICE).manual_seed(7)
    lot = torch.rand(1, HEADS, rows, blocks, device=DEVICE, generator=g)
    lot[..., ::2, -1] = 2
    count = max(1, round(share * blocks))
    indices = lot.topk(count, -1).indices.sort(-1).values.int().contiguous()
    return Lists(torch.full_like(indices[..., 0], count).contiguous(), indices, q_block)


def medians(works: dict[str, Callable[[], object]], repeats: int = 11) -> dict[str, float]:
    """Of all works, which take turns."""
    for work in works.values():
        work()
    found: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(repeats if GPU else 1):
        for name, work in works.items():
            if not GPU:
                begun = time.perf_counter()
                work()
                found[name].append((time.perf_counter() - begun) * 1e3)
                continue
            torch.cuda.synchronize()
            torch.cuda._sleep(1_500_000)  # about a millisecond, so that the host is ahead
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            work()
            end.record()
            torch.cuda.synchronize()
            found[name].append(begin.elapsed_time(end))
    return {name: statistics.median(times) for name, times in found.items()}


def error_of(out: Tensor, q: Tensor, k: Tensor, v: Tensor, lists: Lists) -> float:
    """Largest relative error of some query blocks, against fp32."""
    worst, rows = 0.0, lists.counts.shape[2]
    for h, m in ((0, 0), (5, rows // 2), (HEADS - 1, rows - 1), (HEADS - 1, rows - 2)):
        blocks = lists.indices[0, h, m, : int(lists.counts[0, h, m])].long()
        at = (blocks[:, None] * K_BLOCK + torch.arange(K_BLOCK, device=DEVICE)).flatten()
        at = at[at < k.shape[2]]
        part = slice(m * lists.q_block, (m + 1) * lists.q_block)
        logits = q[0, h, part].float() @ k[0, h, at].float().T * DIM**-0.5
        want = logits.softmax(-1) @ v[0, h, at].float()
        worst = max(worst, float((out[0, h, part].float() - want).norm() / want.norm()))
    return worst


def say(**row: Any) -> None:
    print("ROW " + json.dumps(row), flush=True)


class Bench:
    """Inputs of one size, fa4 and jali's own kernel over the same lists."""

    def __init__(self, size: str, length: int) -> None:
        self.size, self.length = size, length
        self.q, self.k, self.v = (tokens(length, seed) for seed in range(3))
        self.qkv = self.q, self.k, self.v
        self.dense_tflop = 4 * length**2 * HEADS * DIM / 1e12
        self.fa4_out: dict[tuple[int, float], Tensor] = {}

    def tflops(self, lists: Lists, ms: float) -> float:
        share = lists.indices.shape[3] / -(-self.length // K_BLOCK)
        return self.dense_tflop * share / ms * 1e3

    def fa4(self, lists: Lists) -> Callable[[], Tensor]:
        from jali.backends.fa4 import sparse
        from jali.kernels.lists import BlockList
        from jali.tokens.layout import Blocks

        listed, blocks = BlockList(lists.counts, lists.indices), Blocks(lists.q_block, K_BLOCK)
        return lambda: sparse(*self.qkv, listed, blocks, DIM**-0.5)[0]

    def triton(self, lists: Lists) -> Callable[[], Tensor]:
        from jali.kernels.attention import block_sparse_attention
        from jali.kernels.lists import BlockList

        listed = {1: BlockList(lists.counts, lists.indices)}
        return lambda: block_sparse_attention(
            *self.qkv, listed, lists.q_block, K_BLOCK, DIM**-0.5
        )[0]  # fmt: skip

    def base_rows(self, shares: tuple[float, ...], blocks: tuple[int, ...], dense: bool) -> None:
        def row(name: str, work: Callable[[], Tensor], lists: Lists | None, **more: Any) -> None:
            try:
                out = work()
                ms = medians({"ms": work})["ms"]
                rate = self.dense_tflop / ms * 1e3 if lists is None else self.tflops(lists, ms)
                if lists is not None:
                    more["error"] = error_of(out, *self.qkv, lists)
                say(size=self.size, kernel=name, ms=ms, tflops=rate, **more)
            except Exception as error:  # the other rows do not depend on this one
                say(size=self.size, kernel=name, **more, failed=failure(error))

        if dense:
            from jali.backends.fa4 import dense as fa4_dense

            row("fa4, dense", lambda: fa4_dense(*self.qkv, DIM**-0.5), None)
        for share in shares:
            for q_block in blocks:
                lists = drawn(self.length, q_block, share)
                more = {"share": share, "q_block": q_block}
                row("fa4", self.fa4(lists), lists, **more)
                row("triton, bf16", self.triton(lists), lists, **more)

    def eight_row(
        self, attend: Callable[..., None], config: Any, name: str, lists: Lists, share: float
    ) -> float | None:
        """Quantisation, product and both beside fa4; the time of both."""
        from eight_bit import quantise

        row: dict[str, Any] = {
            "size": self.size, "kernel": "eight bits", "variant": name, "config": str(config),
            "share": share, "q_block": lists.q_block,
        }  # fmt: skip
        try:
            int8, scale = VARIANTS[name], DIM**-0.5
            out = torch.full_like(self.q, float("nan"))
            lse = torch.empty(self.q.shape[:3], device=DEVICE)
            kept = quantise(*self.qkv, scale, int8)

            def product(eight: Any = kept) -> None:
                attend(eight, out, lse, *lists, self.length, config)

            begun = time.monotonic()
            product()
            if GPU:
                torch.cuda.synchronize()
            row["first_s"] = time.monotonic() - begun
            row["error"] = error_of(out, *self.qkv, lists)
            once = out.clone()
            product()
            row["same_bits"] = bool(torch.equal(once, out))
            works: dict[str, Callable[[], object]] = {
                "quantise": lambda: quantise(*self.qkv, scale, int8),
                "product": product,
                "both": lambda: product(quantise(*self.qkv, scale, int8)),
            }
            if GPU:
                works["fa4"] = self.fa4(lists)
                theirs = works["fa4"]()
                row["from_fa4"] = float((once.float() - theirs.float()).norm() / theirs.norm())
            found = medians(works)
            row |= {f"{work}_ms": ms for work, ms in found.items()}
            row["tflops"] = self.tflops(lists, found["product"])
            if "fa4" in found:
                row["over_fa4"] = found["fa4"] / found["both"]
            say(**row)
            return found["both"]
        except Exception as error:  # the other configurations do not depend on this one
            say(**row, failed=failure(error))
            return None


def failure(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:600]


def sweep(configs: dict[str, list[Any]], attend: Callable[..., None], after: list[str]) -> None:
    """All configurations at 480p and .3, then the fastest of each variant elsewhere."""
    best: dict[str, Any] = {}
    for size, length in SIZES.items():
        bench = Bench(size, length)
        if size == "480p":
            lists = drawn(length, 256, 0.3)
            for name, some in configs.items():
                times = {}
                for config in some:
                    if f"{name} {config}" in after:
                        continue
                    say(next=f"{name} {config}")
                    if (ms := bench.eight_row(attend, config, name, lists, 0.3)) is not None:
                        times[ms] = config
                if times:
                    best[name] = times[min(times)]
        for share, q_block in ((0.3, 256), (0.3, 128), (0.2, 256)):
            if size == "480p" and (share, q_block) == (0.3, 256):
                continue
            for name, config in best.items():
                bench.eight_row(attend, config, name, drawn(length, q_block, share), share)


def part(name: str, after: list[str]) -> None:
    """What a process of its own does."""
    sys.path.insert(0, str(Path(__file__).parent))
    torch.manual_seed(0)
    if GPU:
        warm = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
        for _ in range(600):  # about a second: clocks
            warm @ warm
    if name == "base":
        for size, length in SIZES.items():
            Bench(size, length).base_rows((0.3, 0.2), (256, 128), dense=True)
    elif name == "triton":
        from eight_bit import Config, attend_eight

        both = [
            Config(128, 128, 8, 2), Config(128, 128, 8, 3), Config(128, 128, 8, 3, None, False),
            Config(64, 128, 4, 2), Config(64, 128, 4, 3), Config(64, 128, 4, 3, None, False),
            Config(128, 64, 8, 3, None, False), Config(128, 64, 8, 4),
        ]  # fmt: skip
        sweep(dict.fromkeys(VARIANTS, both), attend_eight, after)
    else:
        from eight_bit_gluon import Roles, attend_with_roles

        roles = [
            Roles(2), Roles(2, two_levels=False), Roles(3), Roles(3, two_levels=False),
            Roles(3, turns=True), Roles(3, two_levels=False, turns=True), Roles(4),
        ]  # fmt: skip
        sweep(dict.fromkeys(VARIANTS, roles), attend_with_roles, after)


def watched(name: str, result: dict[str, Any], target: Path, limit: float) -> None:
    """One part in a process of its own, again without what hung."""
    after: list[str] = []
    while time.monotonic() - START < limit:
        command = [sys.executable, __file__, "--part", name, "--after", json.dumps(after)]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        lines: queue.Queue[str | None] = queue.Queue()

        def listen(child: Any = child, lines: Any = lines) -> None:
            for line in child.stdout:
                lines.put(line)
            lines.put(None)

        threading.Thread(target=listen, daemon=True).start()
        running, why = "", "ended"
        while True:
            left = limit - (time.monotonic() - START)
            try:
                line = lines.get(timeout=max(0.1, min(SILENCE, left)))
            except queue.Empty:
                why = "out of time" if left < SILENCE else f"silent for {SILENCE:.0f} s"
                break
            if line is None:
                break
            if not line.startswith("ROW "):
                print(line, end="", flush=True)
                continue
            row = json.loads(line[4:])
            if "next" in row:
                running = row["next"]
                after.append(running)
                continue
            result["rows"].append({"part": name, **row})
            target.write_text(json.dumps(result, indent=1) + "\n")
            print(f"{time.monotonic() - START:6.1f} s  {name} {row}", flush=True)
        child.kill()
        code = child.wait()
        if why == "ended" and code == 0:
            return
        row = {"part": name, "stopped": running, "why": why if why != "ended" else f"exit {code}"}
        result["rows"].append(row)
        target.write_text(json.dumps(result, indent=1) + "\n")
        print(f"{time.monotonic() - START:6.1f} s  {row}", flush=True)
        if why == "out of time" or not running or len(after) > 30:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=80)
    parser.add_argument("--parts", default="roles,base,triton")
    parser.add_argument("--part", help="for the processes that this starts")
    parser.add_argument("--after", default="[]", help="likewise: what not to try again")
    given = parser.parse_args()
    if given.part:
        part(given.part, json.loads(given.after))
        return
    from jali.evaluation.bench.machine import machine

    target = Path(os.environ.get("OUT", ".")) / "eight-bit-h200.json"
    result: dict[str, Any] = {
        "what": "block-sparse attention in eight bits beside fa4",
        "machine": machine(torch.device(DEVICE)), "heads": HEADS, "head_dim": DIM,
        "sizes": SIZES, "rows": [],
    }  # fmt: skip
    for name in given.parts.split(","):
        watched(name, result, target, given.seconds)
    print(f"done in {time.monotonic() - START:.0f} s", flush=True)


if __name__ == "__main__":
    main()
