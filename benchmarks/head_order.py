"""What orders of single heads take, and what clusters of one block hold beside unequal ones.

    python -m benchmarks.head_order --output benchmarks/results/head-order-cpu.json
    python -m benchmarks.head_order --device cuda --tokens 32760 --heads 12 --dim 128 --output …

Times are medians of whole operations: moving q, k and v into the orders of heads, moving the result
back, clustering queries and keys, deciding between two orders (svg), and dense attention beside
them. Masses are shares of exact attention of sampled rows on captured q, k, v of nano (`--captures`
keeps them), at an equal share of keys in every row: blocks of equal size, halved by products (as
svg2 does) or by distance; k-means clusters cut into blocks; windows of places; and k-means clusters
as SVG2 has them.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import platform
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.captured import GRID, captured
from jali import Svg, Svg2, Tiled, __version__
from jali.attend import prepare
from jali.checks import check_call
from jali.evaluation.bench.measure import median_ms
from jali.evaluation.inspection import Capture
from jali.files import write_json
from jali.planning.cluster import balanced_order, second_moment
from jali.planning.scoring import block_means
from jali.planning.site import Site
from jali.tokens.head_order import HeadOrders, put_back

SHARES = (0.3, 0.15)
Q_BLOCK, K_BLOCK, EVERY = 128, 64, 37  # of rows one in so many is looked at
ROUNDS = 20  # of k-means: more than theirs has between steps, fewer than at its first


def times(
    device: torch.device, tokens: int, heads: int, dim: int, repeats: int
) -> dict[str, float]:
    """Milliseconds of one call's parts."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, tokens, heads, dim, generator=make) for _ in range(3))
    q, k, v = (x.to(device, dtype).transpose(1, 2) for x in (q, k, v))
    order = torch.rand(1, heads, tokens, generator=make).argsort(-1).to(device)
    orders = HeadOrders(order, order.flip(-1))

    def ms(call: Any) -> float:
        return median_ms(lambda: call(), [()], device=device, repeats=repeats)

    def made(method: Svg | Svg2) -> float:
        call = prepare(check_call(q, k, v, method, (1, 1, tokens)), method, "auto")
        arranged, key, value = call.layout.arrange(q, k, v)
        seen = call.query(q, k, v, Site())[0]._replace(q=arranged, k=key, v=value(), orders=None)
        return ms(lambda: method.head_orders(seen))

    return {
        "gather q, k, v": ms(lambda: orders.take(q, k, v)),
        "put the result back": ms(lambda: put_back(q, order)),
        "clusters of svg2": made(Svg2()),
        "decision of svg": made(Svg()),
        "dense attention": ms(lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v)),
    }


def means(x: Tensor, order: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Labels of every token [H, S] and means [H, C, D] of equal blocks in an order."""
    sorted_x = x.gather(1, order[..., None].expand_as(x))
    slots = torch.arange(x.shape[1], device=x.device).expand_as(order)
    labels = torch.empty_like(order).scatter_(1, order, slots // block)
    return labels, block_means(sorted_x[None], block)[0]


def kmeans(x: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The same of k-means clusters, from evenly spaced tokens."""
    at = (2 * torch.arange(count, device=x.device) + 1) * x.shape[1] // (2 * count)
    centres = x[:, at]
    for _ in range(ROUNDS):
        labels = (2 * x @ centres.mT - centres.square().sum(-1)[:, None]).argmax(-1)
        size = torch.zeros_like(centres[..., 0]).scatter_add_(1, labels, torch.ones_like(x[..., 0]))
        sums = torch.zeros_like(centres).scatter_add_(1, labels[..., None].expand_as(x), x)
        centres = torch.where(size[..., None] > 0, sums / size[..., None].clamp_min(1), centres)
    return labels, centres


def mass(
    call: Capture, rows: tuple[Tensor, Tensor], keys: tuple[Tensor, Tensor], share: float
) -> tuple[float, float]:
    """The exact mass in the best clusters of every row that hold no more than a share of the keys,
    by the products of means; and the share that they do hold."""
    q, k, scale = call.q[0], call.k[0], call.scale
    (q_label, q_mean), (k_label, k_mean) = rows, keys
    H, S, _ = q.shape
    size = torch.zeros_like(k_mean[..., 0]).scatter_add_(1, k_label, torch.ones_like(k[..., 0]))
    best = (q_mean @ k_mean.mT).masked_fill((size == 0)[:, None], -torch.inf)
    best = best.argsort(dim=-1, descending=True)
    held = size[:, None].expand_as(best).gather(2, best).cumsum(-1) <= share * S + 1e-6
    read = torch.zeros_like(held).scatter_(2, best, held).float()
    at = torch.arange(0, S, EVERY, device=q.device)
    weight = (q[:, at] @ k.mT * scale).softmax(-1)
    found = torch.zeros(H, len(at), size.shape[1], device=q.device)
    found.scatter_add_(2, k_label[:, None].expand(-1, len(at), -1), weight)
    read = read.gather(1, q_label[:, at, None].expand_as(found))
    return float((found * read).sum(-1).mean()), float((read * size[:, None]).sum(-1).mean() / S)


def masses(call: Capture) -> dict[str, dict[str, tuple[float, float]]]:
    """Of every way to make clusters, at every share: mass, and keys that are held."""
    q, k = call.q[0], call.k[0]
    S = q.shape[1]
    place = torch.from_numpy(Tiled().positions(GRID)).to(q.device).expand(q.shape[:2])

    def halved(x: Tensor, other: Tensor | None, block: int) -> tuple[Tensor, Tensor]:
        metric = None if other is None else second_moment(other[None], len(other))
        return means(x, balanced_order(x[None], metric, S, block)[0], block)

    def filled(x: Tensor, clusters: tuple[Tensor, Tensor], block: int) -> tuple[Tensor, Tensor]:
        labels, centres = clusters
        beside = balanced_order(centres[None], None, centres.shape[1], 1)[0]  # like ones together
        place = torch.empty_like(beside).scatter_(
            1, beside, torch.arange(beside.shape[1], device=x.device).expand_as(beside)
        )
        return means(x, place.gather(1, labels).argsort(dim=1, stable=True), block)

    unequal = kmeans(q, S // Q_BLOCK), kmeans(k, S // K_BLOCK)
    ways = {
        "equal, by products": (halved(q, k, Q_BLOCK), halved(k, q, K_BLOCK)),
        "equal, by distance": (halved(q, None, Q_BLOCK), halved(k, None, K_BLOCK)),
        "equal, k-means filled up": (
            filled(q, unequal[0], Q_BLOCK),
            filled(k, unequal[1], K_BLOCK),
        ),
        "windows of 2×8×8": (means(q, place, Q_BLOCK), means(k, place, K_BLOCK)),
        "k-means, unequal": unequal,
    }
    return {
        name: {str(share): mass(call, *both, share) for share in SHARES}
        for name, both in ways.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=9600)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=1)
    parser.add_argument("--every", type=int, default=1, help="of the calls, look at one in so many")
    parser.add_argument("--captures", type=Path, help="folder of captured q, k, v")
    asked = parser.parse_args()
    device = torch.device(asked.device)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    calls = 0
    with tempfile.TemporaryDirectory() as scratch:
        folder = asked.captures or Path(scratch)
        for call in itertools.islice(captured(folder, asked.prompts, (3, 7)), 0, None, asked.every):
            calls += 1
            q, k, v = (x.to(device) for x in (call.q, call.k, call.v))
            call = replace(call, q=q, k=k, v=v)
            for name, shares in masses(call).items():
                for share, pair in shares.items():
                    found.setdefault(name, {}).setdefault(share, []).append(pair)
    load = os.getloadavg()[0]  # before the times: how busy others keep the machine
    timed = times(device, asked.tokens, asked.heads, asked.dim, asked.repeats)
    write_json(asked.output, {
        "date": datetime.date.today().isoformat(),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(), "torch": torch.__version__, "jali": __version__,
        "shape": {"tokens": asked.tokens, "heads": asked.heads, "dim": asked.dim},
        "load": load, "cores": os.cpu_count(), "ms": timed,
        "clusters": {
            "model": "nano", "grid": str(GRID), "calls": calls, "prompts": asked.prompts,
            "blocks": [Q_BLOCK, K_BLOCK], "kmeans_rounds": ROUNDS,
            "rows": [
                {
                    "clusters": name, "share": float(share),
                    "held": fmean(held for _, held in pairs), "mass": fmean(m for m, _ in pairs),
                }
                for name, shares in found.items()
                for share, pairs in shares.items()
            ],
        },
    })  # fmt: skip


if __name__ == "__main__":
    main()
