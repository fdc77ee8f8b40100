"""Check and sweep the block-sparse attention kernel on the GPU at hand.

    PYTHONPATH=src OUT=/tmp/out python benchmarks/dev/attention_gpu.py [check] [binary] [pyramid]

Prints one line per configuration and writes $OUT/attention_gpu.json. Without arguments all three
parts run. A configuration that fails is printed and skipped.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from jali.kernels.attention import Config, block_sparse_attention, default_config
from jali.kernels.launch import spec_of
from jali.kernels.list_view import list_views, lists_spec
from jali.kernels.page_table import page_table_launch
from jali.kernels.pooling import pool_launch

DEVICE = "cuda"
Lists = dict[int, tuple[Tensor, Tensor]]
START = time.time()
RESULTS: list[dict[str, object]] = []


def qkv(
    batch: int, heads: int, heads_kv: int, seq_q: int, seq_k: int, dim: int, order: str = "bshd"
):
    """bf16 views [B, H, S, D] whose memory is BSHD (or BHSD)."""

    def make(seq: int, n: int) -> Tensor:
        if order == "bshd":
            return torch.randn(batch, seq, n, dim, device=DEVICE).bfloat16().transpose(1, 2)
        return torch.randn(batch, n, seq, dim, device=DEVICE).bfloat16()

    return make(seq_q, heads), make(seq_k, heads_kv), make(seq_k, heads_kv)


def random_lists(batch: int, heads: int, rows: int, blocks: int, shares: dict[int, float]) -> Lists:
    """Disjoint random blocks, `share` of all for each ratio, ascending."""
    order = torch.rand(batch, heads, rows, blocks, device=DEVICE).argsort(-1)
    lists, start = {}, 0
    for ratio, share in shares.items():
        count = max(1, round(share * blocks))
        part = order[..., start : start + count].sort(-1).values.int().contiguous()
        counts = torch.full((batch, heads, rows), count, dtype=torch.int32, device=DEVICE)
        lists[ratio] = (counts, part)
        start += count
    return lists


def pooled(x: Tensor, ratio: int, length: int) -> tuple[Tensor, Tensor]:
    """fp32 means of the real rows of x [S, D] in groups of `ratio`, and how many there are."""
    groups = -(-x.shape[0] // ratio)
    real = (torch.arange(groups * ratio, device=x.device) < length).float()
    full = torch.zeros(groups * ratio, x.shape[1], device=x.device)
    full[: x.shape[0]] = x.float()
    count = real.view(groups, ratio).sum(1)
    total = (full * real[:, None]).view(groups, ratio, -1).sum(1)
    return total / count.clamp(min=1)[:, None], count


def reference(q, k, v, lists: Lists, q_block, k_block, scale, length, b, h, m):
    """Out and lse in fp32 for one query block."""
    kv = h // (q.shape[1] // k.shape[1])
    rows = q[b, h, m * q_block : (m + 1) * q_block].float()
    logits, values = [], []
    for ratio, (counts, indices) in lists.items():
        bb, hh = b % counts.shape[0], h % counts.shape[1]
        blocks = indices[bb, hh, m, : int(counts[bb, hh, m])].long()
        mean_k, count = pooled(k[b, kv], ratio, length)
        mean_v, _ = pooled(v[b, kv], ratio, length)
        if ratio > 1:  # the kernel stores means in the input dtype
            mean_k, mean_v = mean_k.to(k.dtype).float(), mean_v.to(v.dtype).float()
        per = k_block // ratio
        at = (blocks[:, None] * per + torch.arange(per, device=q.device)).flatten()
        at = at[at < mean_k.shape[0]]
        at = at[count[at] > 0]
        logits.append(rows @ mean_k[at].T * scale + count[at].log())
        values.append(mean_v[at])
    s = torch.cat(logits, 1)
    return s.softmax(-1).nan_to_num(0) @ torch.cat(values), s.logsumexp(-1)


def check(name: str, q, k, v, lists: Lists, q_block, k_block, config=None, lengths=None) -> None:
    scale = q.shape[3] ** -0.5
    key_length = None
    if lengths is not None:
        key_length = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    out, lse = block_sparse_attention(
        q, k, v, lists, q_block, k_block, scale, key_length, config=config
    )
    torch.cuda.synchronize()
    rows = -(-q.shape[2] // q_block)
    worst = worst_lse = 0.0
    samples = [
        (0, 0, 0),
        (q.shape[0] - 1, q.shape[1] - 1, rows - 1),
        (0, q.shape[1] // 2, rows // 2),
    ]
    for b, h, m in samples:
        length = k.shape[2] if lengths is None else lengths[b]
        want, want_lse = reference(q, k, v, lists, q_block, k_block, scale, length, b, h, m)
        part = slice(m * q_block, m * q_block + want.shape[0])
        got, got_lse = out[b, h, part].float(), lse[b, h, part]
        error = ((got - want).norm() / want.norm().clamp(min=1e-9)).item()
        if length == 0:
            error = got.abs().max().item() + (0 if torch.isneginf(got_lse).all() else 1)
        else:
            worst_lse = max(worst_lse, (got_lse - want_lse).abs().max().item())
        worst = max(worst, error if error == error else float("inf"))
    finite = bool(torch.isfinite(out).all())
    ok = worst < 8e-3 and worst_lse < 2e-2 and finite
    print(f"{'ok  ' if ok else 'FAIL'} {name:58s} rel {worst:.1e} lse {worst_lse:.1e}", flush=True)
    RESULTS.append({"check": name, "ok": ok, "rel": worst, "lse": worst_lse})


def attempt(name: str, call: Callable[[], object]) -> None:
    try:
        call()
    except Exception as error:
        print(f"ERR  {name:58s} {type(error).__name__}: {str(error).splitlines()[:1]}", flush=True)
        if os.environ.get("TRACE"):
            traceback.print_exc()
        RESULTS.append({"name": name, "error": f"{type(error).__name__}: {error}"[:500]})


def median_ms(calls: list[Callable[[], object]], repeats: int = 12) -> float:
    """Median of CUDA-event times; `calls` take turns so that no input stays in the caches."""
    for call in calls * 2:
        call()
    torch.cuda.synchronize()
    pairs = []
    for i in range(repeats):
        start = torch.cuda.Event(enable_timing=True)
        stop = torch.cuda.Event(enable_timing=True)
        start.record()
        calls[i % len(calls)]()
        stop.record()
        pairs.append((start, stop))
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairs)


def graph_ms(calls: list[Callable[[], object]]) -> float:
    """The same through a captured CUDA graph: no host time between kernels."""
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return median_ms([graph.replay]) / len(calls)


def report(name: str, ms: float, tflop: float, **more: object) -> None:
    extra = " ".join(f"{key} {value}" for key, value in more.items())
    print(f"     {name:58s} {ms:7.3f} ms {tflop / ms * 1e3:6.0f} TFLOP/s {extra}", flush=True)
    RESULTS.append({"name": name, "ms": ms, "tflops": tflop / ms * 1e3, **more})


def tma(block_n: int, stages: int, **more) -> Config:
    return Config(128, block_n, 64, 8, stages, stages, tma=True, **more)


def pointers(block_n: int, stages: int, **more) -> Config:
    return Config(128, block_n, 64, 8, stages, stages, **more)


BINARY_128 = {
    "default": None,
    "ptr 128x128 s2": pointers(128, 2),
    "ptr 128x128 s3": pointers(128, 3),
    "ptr 128x64 s3": pointers(64, 3),
    "ptr 128x64 s2 r128": pointers(64, 2, max_registers=128),
    "tma 128x128 s2": tma(128, 2),
    "tma 128x128 s3": tma(128, 3),
    "tma 128x64 s2": tma(64, 2),
    "tma 128x64 s3": tma(64, 3),
    "tma 128x64 s4": tma(64, 4),
    "tma 128x64 s5": tma(64, 5),
    "tma 128x64 s2 r128 (2 per SM)": tma(64, 2, max_registers=128),
    "tma 128x32 s3 r128 (2 per SM)": tma(32, 3, max_registers=128),
    "tma 128x32 s4 r128 (2 per SM)": tma(32, 4, max_registers=128),
    "tma 128x64 s2 4 warps (2 per SM)": Config(128, 64, 64, 4, 2, 2, tma=True),
    "tma 128x32 s3 4 warps (2 per SM)": Config(128, 32, 32, 4, 3, 3, tma=True),
    "tma 64x64 s2 4 warps (2 per SM)": Config(64, 64, 64, 4, 2, 2, tma=True),
    "tma 64x32 s3 r128 (3 per SM)": Config(64, 32, 32, 4, 3, 3, tma=True, max_registers=128),
}
BINARY_64 = {
    "default": None,
    "ptr 128x128 s3": pointers(128, 3),
    "ptr 128x64 s3": pointers(64, 3),
    "tma 128x128 s2": tma(128, 2),
    "tma 128x128 s3": tma(128, 3),
    "tma 128x128 s2 r128 (2 per SM)": tma(128, 2, max_registers=128),
    "tma 128x64 s2 (2 per SM)": tma(64, 2),
    "tma 128x64 s3 (2 per SM)": tma(64, 3),
    "tma 128x64 s4 (2 per SM)": tma(64, 4),
    "tma 128x64 s3 4 warps (2 per SM)": Config(128, 64, 64, 4, 3, 3, tma=True),
    "tma 128x32 s4 r80 (3 per SM)": tma(32, 4, max_registers=80),
}
PYRAMID = {
    "default": None,
    "tma n64 s2 | pool 64 s2": Config(128, 64, 64, 8, 2, 2, tma=True),
    "tma n64 s3 | pool 64 s3": Config(128, 64, 64, 8, 3, 3, tma=True),
    "tma n64 s2 | pool 64 s2 r128": Config(128, 64, 64, 8, 2, 2, tma=True, max_registers=128),
    "tma n64 s2 | pool 32 s4 r128": Config(128, 64, 32, 8, 2, 4, tma=True, max_registers=128),
    "tma n64 s2 | pool 32 s3 r128": Config(128, 64, 32, 8, 2, 3, tma=True, max_registers=128),
    "tma n32 s4 | pool 32 s4 r128": Config(128, 32, 32, 8, 4, 4, tma=True, max_registers=128),
    "tma n64 s3 | pool 128 s2": Config(128, 64, 128, 8, 3, 2, tma=True),
    "ptr n128 s2 | pool 64 s2": Config(128, 128, 64, 8, 2, 2),
    "ptr n128 s2 | pool 128 s2": Config(128, 128, 128, 8, 2, 2),
    "ptr n64 s2 | pool 64 s2 r128": Config(128, 64, 64, 8, 2, 2, max_registers=128),
}


def flex(q: Tensor, k: Tensor, lists: Lists, q_block: int, k_block: int):
    """A BlockMask of the same lists: full blocks, the ragged last one as partial."""
    from torch.nn.attention.flex_attention import BlockMask

    counts, indices = lists[1]
    seq_k = k.shape[2]
    blocks = -(-seq_k // k_block)
    wide = torch.zeros(*counts.shape, blocks, dtype=torch.int32, device=DEVICE)
    wide[..., : indices.shape[3]] = indices
    last = torch.zeros_like(counts)
    if seq_k % k_block:
        last = (indices[..., -1] == blocks - 1).int()
    return BlockMask.from_kv_blocks(
        last, torch.full_like(wide, blocks - 1), counts - last, wide,
        BLOCK_SIZE=(q_block, k_block), mask_mod=lambda _b, _h, _i, j: j < seq_k,
        seq_lengths=(q.shape[2], seq_k),
    )  # fmt: skip


def sweep_binary(heads: int, seq: int, dim: int, q_block: int, configs, with_flex: bool) -> None:
    title = f"{heads}x{seq}x{dim} q{q_block} k128 density .3"
    print(f"--- {title}  ({time.time() - START:.0f} s)", flush=True)
    blocks = -(-seq // 128)
    inputs = [qkv(1, heads, heads, seq, seq, dim) for _ in range(2)]
    lists = [random_lists(1, heads, -(-seq // q_block), blocks, {1: 0.3}) for _ in inputs]
    density = lists[0][1][1].shape[3] / blocks
    tflop = 4 * seq**2 * heads * dim * density / 1e12
    want: list[Tensor] = []

    for name, config in configs.items():

        def go(name=name, config=config) -> None:
            calls = [
                lambda i=i: block_sparse_attention(
                    *inputs[i], lists[i], q_block, 128, dim**-0.5, config=config
                )
                for i in range(2)
            ]
            out = calls[0]()[0].float()
            if not want:
                want.append(out)
            error = ((out - want[0]).norm() / want[0].norm()).item()
            report(f"{title[:18]} q{q_block} {name}", median_ms(calls), tflop, diff=f"{error:.0e}")

        attempt(name, go)

    def go_flex() -> None:
        from torch.nn.attention.flex_attention import flex_attention

        compiled = torch.compile(flex_attention, dynamic=False)
        masks = [flex(*inputs[i][:2], lists[i], q_block, 128) for i in range(2)]
        calls = [lambda i=i: compiled(*inputs[i], block_mask=masks[i]) for i in range(2)]
        error = ((calls[0]().float() - want[0]).norm() / want[0].norm()).item()
        report(f"{title[:18]} q{q_block} FLEX", median_ms(calls), tflop, diff=f"{error:.0e}")

    if with_flex:
        attempt("flex", go_flex)


def sweep_pyramid() -> None:
    heads, seq, dim, k_block = 12, 32768, 128, 64
    shares = {1: 0.10, 2: 0.05, 8: 0.20}
    print(f"--- pyramid {heads}x{seq}x{dim} q128 k64 {shares}  ({time.time() - START:.0f} s)")
    blocks = seq // k_block
    inputs = [qkv(1, heads, heads, seq, seq, dim) for _ in range(2)]
    lists = [random_lists(1, heads, seq // 128, blocks, shares) for _ in inputs]
    cost = sum(lists[0][r][1].shape[3] / r for r in shares) / blocks
    tflop = 4 * seq**2 * heads * dim * cost / 1e12
    _, k, v = inputs[0]
    pool_some, pool_all = (
        pool_launch(spec_of(k), spec_of(v), ratios, False) for ratios in ((2, 8), (2, 4, 8))
    )
    pool = graph_ms([lambda i=i: pool_some(*inputs[i][1:], None) for i in range(2)])
    every = graph_ms([lambda i=i: pool_all(*inputs[i][1:], None) for i in range(2)])
    pooled = tuple((r, view) for r, view in list_views(lists_spec(lists[0])).items() if r != 1)
    pages = page_table_launch(pooled, pool_some.sections, 64, 64, seq, None)
    pack = graph_ms([lambda i=i: pages(lists[i], None) for i in range(2)])
    print(f"     pool (2, 8) {pool:.4f} ms, (2, 4, 8) {every:.4f} ms, pack {pack:.4f} ms")
    RESULTS.append({"pool_28": pool, "pool_248": every, "pack": pack})
    for name, config in PYRAMID.items():

        def go(name=name, config=config) -> None:
            def call(i: int) -> tuple[Tensor, Tensor]:
                return block_sparse_attention(
                    *inputs[i], lists[i], 128, k_block, dim**-0.5, config=config
                )

            whole = graph_ms([lambda i=i: call(i) for i in range(2)])
            eager = median_ms([lambda i=i: call(i) for i in range(2)])
            report(f"pyramid {name}", whole, tflop, eager=round(eager, 3))

        attempt(name, go)


def checks() -> None:
    print("--- checks", flush=True)
    wan = qkv(1, 12, 12, 32760, 32760, 128)
    for q_block in (128, 256):
        lists = random_lists(1, 12, -(-32760 // q_block), 256, {1: 0.1})
        lists[1][1][..., -1] = 255  # the ragged block, ascending still
        for name in ("default", "ptr 128x64 s3", "tma 128x64 s2 r128 (2 per SM)"):
            call = lambda q=q_block, n=name, x=lists: check(  # noqa: E731
                f"32760 q{q} {n}", *wan, x, q, 128, BINARY_128[n]
            )
            attempt(name, call)
    lists = random_lists(1, 12, 256, 512, {1: 0.05, 2: 0.05, 4: 0.05, 8: 0.1})
    lists[8][1][..., -1] = 511
    for name in ("default", "tma n64 s2 | pool 64 s2 r128", "ptr n128 s2 | pool 128 s2"):
        attempt(name, lambda n=name: check(f"32760 pyramid {n}", *wan, lists, 128, 64, PYRAMID[n]))
    small = qkv(3, 8, 2, 1000, 2000, 64)
    lists = random_lists(3, 8, 8, 16, {1: 0.4, 2: 0.2, 8: 0.4})
    attempt("gqa", lambda: check("3x8/2 1000x2000x64 lengths", *small, lists, 128, 128, None,
                                 [0, 777, 2000]))  # fmt: skip
    binary = random_lists(3, 8, 8, 16, {1: 0.5})
    attempt("gqa", lambda: check("3x8/2 1000x2000x64 binary", *small, binary, 128, 128))
    for dim, order in ((16, "bhsd"), (80, "bshd"), (96, "bshd"), (128, "bhsd"), (256, "bshd")):
        for q_block, k_block in ((64, 64), (192, 32), (128, 96)):
            case = qkv(2, 4, 4, 700, 700, dim, order)
            lists = random_lists(2, 4, -(-700 // q_block), -(-700 // k_block), {1: 0.4, 4: 0.4})
            name = f"d{dim} {order} q{q_block} k{k_block}"
            attempt(name, lambda n=name, c=case, x=lists, q=q_block, k=k_block: check(
                n, *c, x, q, k))  # fmt: skip


def main() -> None:
    torch.manual_seed(0)
    parts = sys.argv[1:] or ["check", "binary", "pyramid"]
    capability = torch.cuda.get_device_capability()
    print(torch.cuda.get_device_name(), capability, torch.__version__)
    for dim, k_block in ((128, 128), (64, 128), (128, 64)):
        print(f"default d{dim} k{k_block}: {default_config(dim, k_block, capability)}")
    if "check" in parts:
        checks()
    if "pyramid" in parts:
        attempt("pyramid", sweep_pyramid)
    if "binary" in parts:
        sweep_binary(12, 32760, 128, 128, BINARY_128, True)
        sweep_binary(48, 17776, 64, 128, BINARY_64, True)
        sweep_binary(12, 32760, 128, 256, BINARY_128, True)
    out = Path(os.environ.get("OUT", "."))
    out.mkdir(parents=True, exist_ok=True)
    (out / "attention_gpu.json").write_text(json.dumps(RESULTS, indent=1))
    print(f"done in {time.time() - START:.0f} s")


if __name__ == "__main__":
    main()
