"""Slow, plain re-statements of the specifications. They share no code with jali."""

from __future__ import annotations

import functools
import math
import subprocess
import sys
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from jali import TokenGrid


def sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, **more: object) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(
        q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1], **more
    )


@functools.cache
def stock_bf16_runs() -> bool:
    """Whether PyTorch's own bf16 attention survives on this CPU. (Where a sandbox hides AMX that
    the CPU announces, PyTorch 2.13 dies of an illegal instruction, which no test can catch.)"""
    code = (
        "import torch; x = torch.ones(1, 2, 130, 64).bfloat16();"
        "torch.nn.functional.scaled_dot_product_attention(x, x, x)"
    )
    return subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0


def tensors(
    grid: TokenGrid | int,
    key_grid: TokenGrid | int | None = None,
    *,
    B: int = 1,
    H: int = 2,
    kv: int | None = None,
    D: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    spread: float = 2.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v with peaked attention, so that which blocks are read really matters."""
    Sq = grid if isinstance(grid, int) else grid.tokens
    key_grid = grid if key_grid is None else key_grid
    Sk = key_grid if isinstance(key_grid, int) else key_grid.tokens
    make = torch.Generator().manual_seed(seed)
    q = torch.randn(B, H, Sq, D, generator=make, dtype=torch.float64) * spread
    k, v = (torch.randn(B, kv or H, Sk, D, generator=make, dtype=torch.float64) for _ in "kv")
    return q.to(device, dtype), k.to(device, dtype), v.to(device, dtype)


def relative(out: Tensor, wanted: Tensor) -> float:
    """‖out − wanted‖ / ‖wanted‖, and 0 where both are zero."""
    out, wanted = out.double().cpu(), wanted.double().cpu()
    error, size = (out - wanted).norm().item(), wanted.norm().item()
    if math.isnan(error):
        return math.inf
    return error / size if size else error


def blocks_of(tokens: int, block: int) -> list[range]:
    return [range(a, min(a + block, tokens)) for a in range(0, tokens, block)]


def pooled_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    levels: Tensor,
    q_block: int,
    k_block: int,
    scale: float,
    real: Tensor | None = None,
) -> Tensor:
    """One head at a time: a dense softmax over explicit pooled keys with ln(count).

    q, k, v [B, H, S, D], levels [B, H, M, N], real bool [B, Sk].
    """
    out = torch.zeros_like(q)
    for b in range(q.shape[0]):
        alive = range(k.shape[2]) if real is None else real[b].nonzero().flatten().tolist()
        alive_set = set(alive)
        for h in range(q.shape[1]):
            for m, rows in enumerate(blocks_of(q.shape[2], q_block)):
                keys, values, bias = [], [], []
                for n, columns in enumerate(blocks_of(k.shape[2], k_block)):
                    ratio = int(levels[b, h, m, n])
                    if ratio == 0:
                        continue
                    for start in range(columns.start, columns.stop, ratio):
                        group = range(start, min(start + ratio, columns.stop))
                        group = [t for t in group if t in alive_set]
                        if not group:
                            continue
                        keys.append(k[b, h, group].mean(0))
                        values.append(v[b, h, group].mean(0))
                        bias.append(math.log(len(group)))
                if not keys:
                    continue
                logits = q[b, h, list(rows)] @ torch.stack(keys).T * scale + q.new_tensor(bias)
                out[b, h, list(rows)] = logits.softmax(-1) @ torch.stack(values)
    return out


def rf_v2_order(t: int, h: int, w: int, text: int = 0) -> list[int]:
    """Section 2.2 of the rf_v2 specification, text (first in the input) moved behind."""
    out: list[int] = []
    h8, w8 = 8 * (h // 8), 8 * (w // 8)

    def at(f: int, y: int, x: int) -> int:
        return text + (f * h + y) * w + x

    for f in range(t):
        if f == 0 and (h8, w8) != (h, w):
            out += [at(f, y, x) for y in range(h) for x in range(w)]
            continue
        for wy in range(0, h8, 8):
            for wx in range(0, w8, 8):
                out += [at(f, wy + y, wx + x) for y in range(8) for x in range(8)]
        out += [at(f, y, x) for y in range(h8, h) for x in range(w)]
        out += [at(f, y, x) for y in range(h8) for x in range(w8, w)]
    return out + list(range(text))


def rf_v2_original(
    q: Tensor, k: Tensor, shape: tuple[int, int, int], text: int, sparsity: float, block: int = 128,
    first_frame: bool = True,
) -> np.ndarray:  # fmt: skip
    """Sections 2.3 to 2.5 for one batch and head: q, k [S, D] in input order. bool [nb, nb]."""
    order = rf_v2_order(*shape, text)
    q, k = q[order], k[order]
    means = [torch.stack([x[list(r)].mean(0) for r in blocks_of(len(x), block)]) for x in (q, k)]
    wide = [x if x.dtype == torch.float64 else x.float() for x in means]
    scores = ((wide[0] @ wide[1].T).to(q.dtype) * q.shape[1] ** -0.5).softmax(-1)
    nb = scores.shape[1]
    keep = math.ceil(nb * (1 - sparsity))
    threshold = scores.sort(-1, descending=True).values[:, keep - 1 : keep]
    kept = (scores >= threshold).numpy().copy()
    first, last = -(-shape[1] * shape[2] // block), -(-text // block)
    if first_frame:
        kept[:first] = True
        kept[:, :first] = True
    if last:
        kept[-last:] = True
        kept[:, -last:] = True
    return kept


def hex_rows(kept: Tensor | np.ndarray) -> list[str]:
    """One hex word per row, the most significant bit being key block 0."""
    return [format(int("".join(str(int(x)) for x in row), 2), "x") for row in kept]


def golden_qk(S: int, D: int = 16) -> tuple[Tensor, Tensor]:
    """The formula of section 2.6, fp64 [1, 1, S, D]."""
    s = torch.arange(1, S + 1, dtype=torch.float64)[:, None]
    d = torch.arange(1, D + 1, dtype=torch.float64)[None]
    q, k = 3 * torch.sin(0.013 * s * d), 3 * torch.cos(0.017 * s * d)
    return q[None, None], k[None, None]


def antidiagonal(q: Tensor, k: Tensor, block: int, scale: float) -> np.ndarray:
    """ada_bsa's block masses for one head, by loops over groups of 8; rows sum to 1.

    The short last query group repeats its last token; a short last key group is averaged over the
    keys it has and weighs by their number.
    """
    g = 8
    Sq, Sk = len(q), len(k)
    logits = np.full((-(-Sq // g), -(-Sk // g)), -np.inf)
    for a in range(logits.shape[0]):
        rows = [min(a * g + g - 1 - i, Sq - 1) for i in range(g)]
        for b in range(logits.shape[1]):
            columns = [b * g + i for i in range(g)]
            products = [float(q[r] @ k[c]) for r, c in zip(rows, columns, strict=True) if c < Sk]
            n = len(products)
            logits[a, b] = sum(products) / n * scale + math.log(n / g)
    p = np.exp(logits - logits.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    per = block // g
    rows = blocks_of(p.shape[0], per)
    return np.array(
        [[p[r.start : r.stop, c.start : c.stop].sum() / len(r) for c in blocks_of(p.shape[1], per)]
         for r in rows]
    )  # fmt: skip


def best_first(scores: Sequence[float], forced: Sequence[bool]) -> list[int]:
    """Block numbers: forced ones first, then by falling score, ties to the lower number."""
    return sorted(range(len(scores)), key=lambda j: (not forced[j], -scores[j], j))


def entropy_importance(q: Tensor, k: Tensor, q_block: int, k_block: int, scale: float) -> Tensor:
    """Section 1.2 of the entropy specification for one head: q, k [S, D]. [M, N]."""
    rows = []
    for block in blocks_of(len(q), q_block):
        n = len(block)
        picks = [block.start + math.floor((i + 0.5) * n / 4) for i in range(4)]
        p = (q[picks] @ k.T * scale).softmax(-1)
        rows.append(
            torch.stack([p[:, c.start : c.stop].sum(-1).mean() for c in blocks_of(len(k), k_block)])
        )
    return torch.stack(rows)


def peak_importance(
    q: Tensor,
    k: Tensor,
    q_picks: Sequence[Sequence[int]],
    k_picks: Sequence[Sequence[int]],
    scale: float,
    normalised: bool,
) -> Tensor:
    """PSA's importance for one head: largest weight between sampled queries and keys. [M, N]."""
    columns = [c for picks in k_picks for c in picks]
    out = torch.zeros(len(q_picks), len(k_picks), dtype=q.dtype)
    for m, rows in enumerate(q_picks):
        for r in rows:
            s = torch.stack([q[r] @ k[c] for c in columns]) * scale
            base = s.logsumexp(0) if normalised else s.max()
            weight = (s - base).exp()
            at = 0
            for n, picks in enumerate(k_picks):
                out[m, n] = max(float(out[m, n]), float(weight[at : at + len(picks)].max()))
                at += len(picks)
    return out / out.sum(-1, keepdim=True)


def _whole_tiles(blocks: int, left: int, rows: int) -> int:
    """So many blocks of `rows` pooled keys, or more until they fill tiles of 32; fewer again if
    there are not so many `left`."""
    while blocks * rows % 32:
        blocks += 1
    if blocks >= left:
        blocks = left
        while blocks * rows % 32:
            blocks -= 1
    return blocks


def psa_levels(
    importance: Sequence[float],
    forced: Sequence[bool],
    ranges: dict[int, tuple[float, float]],
    mode: str,
    floor: float,
    aligned_to: int | None = None,
) -> list[int]:
    """One row of section 2.5: levels by rank, or by cumulative importance. `aligned_to` is the key
    block of levels that fill whole tiles of 32 keys, as in the original."""
    n = len(importance)
    order = best_first(importance, forced)
    total = sum(importance)
    levels = [0] * n
    start = 0
    for ratio in sorted(r for r in ranges if r):
        upper = ranges[ratio][1]
        if mode == "topk":
            end = math.floor(n * upper + 1e-9) if aligned_to is None else int(n * upper)
        else:
            mass, inside = 0.0, 0
            for j in order:
                mass += importance[j]
                inside += mass / total <= upper + 1e-6
            end = min(n, inside + 1) if inside else 0
            if ratio == 1:
                end = max(end, min(n, math.floor(floor * n) + 1))
            if aligned_to is not None:
                end = max(end, sum(forced))  # they are of the first level, in no order
        end = max(end, start)
        if aligned_to is not None:
            end = start + _whole_tiles(end - start, n - start, aligned_to // ratio)
        for j in order[start:end]:
            levels[j] = ratio
        start = end
    return [1 if f else level for f, level in zip(forced, levels, strict=True)]
