"""What the contracts run over. A new method, backend or geometry joins by one line."""

from __future__ import annotations

from dataclasses import dataclass, fields

import pytest
import torch

from jali import (
    AdaBsa,
    Box,
    Budget,
    Curve,
    Dense,
    Draft,
    Entropy,
    Gilbert,
    Local,
    Mass,
    Method,
    Psa,
    Radial,
    Random,
    Raster,
    RateDistortion,
    RfV2,
    Schedule,
    Sol,
    Sparge,
    Sta,
    Svg,
    Svg2,
    Text,
    Tiled,
    TokenGrid,
)
from jali.backends import BACKENDS, Task
from jali.methods import METHODS as REGISTERED

ALL = (2, 4, 8, "mean", "skip")
# Small blocks, so that small inputs are really sparse.
VARIANTS: dict[str, Method] = {
    "dense": Dense(),
    "entropy": Entropy(Budget(0.4), q_block=32, k_block=16),
    "entropy_gilbert": Entropy(Budget(0.3), seed=3, q_block=32, k_block=16, order=Gilbert()),
    "entropy_sharp": Entropy(Budget(0.25, 0.1, 0.6), sharpness=3.0, q_block=16, k_block=16),
    "entropy_means": Entropy(Budget(0.3), means=2, q_block=32, k_block=16),
    "entropy_large": Entropy(Budget(0.5)),
    "psa": Psa(q_block=32, k_block=16),
    "psa_levels": Psa(
        {1: (0, 0.2), 2: (0.2, 0.4), 4: (0.4, 0.6), 8: (0.6, 0.8), 0: (0.8, 1)},
        q_block=32, k_block=16,
    ),
    "psa_threshold": Psa(
        {1: (0, 0.5), 2: (0.5, 0.7), 8: (0.7, 0.9), 0: (0.9, 1)},
        mode="thresholdbound", importance="surrogate", q_block=32, k_block=32, order=Raster(),
    ),
    "psa_similar": Psa(
        {1: (0, 0.1), 8: (0.1, 0.9), 0: (0.9, 1)},
        similarity=(0.1, 0.0, -0.1), q_block=32, k_block=16, order=Tiled((2, 4, 4)),
    ),
    "psa_aligned": Psa(
        {1: (0, 0.2), 2: (0.2, 0.4), 4: (0.4, 0.6), 8: (0.6, 0.8), 0: (0.8, 1)},
        q_block=32, k_block=32, aligned=True,
    ),
    "psa_aligned_threshold": Psa(
        {1: (0, 0.3), 2: (0.3, 0.5), 4: (0.5, 0.7), 8: (0.7, 0.9), 0: (0.9, 1)},
        mode="thresholdbound", q_block=16, k_block=32, order=Raster(), aligned=True,
    ),
    "psa_step": Psa({4: (0, 0.5), 0: (0.5, 1)}, axis="step", q_block=16, k_block=16),
    "rf_v2": RfV2(0.7, block_size=32, window=(2, 4, 4)),
    "rf_v2_no_first": RfV2(0.8, block_size=16, window=(1, 4, 4), first_frame=False),
    "rf_v2_first": RfV2(1.0, block_size=16, window=(2, 2, 4), first_frame=True),
    "rf_v2_compat": RfV2(0.6, block_size=32, compat=True),
    "ada_bsa": AdaBsa(0.6, block_size=16),
    "ada_bsa_cdf": AdaBsa(0.2, 0.6, keep_sink=False, keep_recent=False, block_size=16),
    "ada_bsa_compat": AdaBsa(0.5, 0.7, block_size=16, compat=True),
    "rd": RateDistortion(0.3, samples=3, levels=ALL, q_block=32, k_block=16, probes=0),
    "rd_few": RateDistortion(
        0.2, levels=(4, "mean"), q_block=16, k_block=32, order=Tiled((2, 4, 4)), probes=0
    ),
    "rd_price": RateDistortion(
        price=0.01, keep=0, q_block=32, k_block=24, levels=(8, "skip"), probes=0
    ),
    "rd_tail": RateDistortion(
        0.2, levels=(2, "skip"), q_block=32, k_block=16, tail=True, probes=0
    ),
    "rd_probes": RateDistortion(0.3, q_block=32, k_block=16, probes=48),
    "entropy_probes": Entropy(Budget(0.3), q_block=32, k_block=16, probes=64, order=Gilbert()),
    "rd_statistics": RateDistortion(
        0.3, samples=3, levels=ALL, estimate="statistics", q_block=32, k_block=16, probes=0
    ),
    "rd_mixed": RateDistortion(
        0.3, samples=5, levels=ALL, estimate="mixed", costs={2: 0.7, "mean": 0.1}, q_block=32,
        k_block=16, probes=0,
    ),
    "rd_statistics_few": RateDistortion(
        price=0.01, keep=0, estimate="statistics", q_block=16, k_block=20, levels=(4, "skip"),
        order=Gilbert(), probes=0,
    ),
    "sol": Sol(q_block=16, k_block=16),
    "sol_exact": Sol(0.8, "exact", q_block=32, k_block=16, order=Gilbert(), tail=False),
    "sol_budget": Sol(budget=0.3, q_block=16, k_block=24),
    "sparge": Sparge(0.05, 0.8, q_block=32, k_block=16),
    "sparge_budget": Sparge(budget=0.3, q_block=16, k_block=24, order=Tiled((2, 4, 4))),
    "sparge_topk": Sparge(-0.1, topk=0.3, q_block=16, k_block=16, tail=True),
    "draft": Draft(0.6, 4, 4),
    "draft_tail": Draft(0.8, 2, 8, tail=True),
    "mass": Mass(0.8, q_block=32, k_block=16),
    "mass_budget": Mass(budget=0.3, q_block=16, k_block=24, order=Gilbert()),
    "entropy_tail": Entropy(Budget(0.2), q_block=32, k_block=16, tail=True),
    "psa_tail": Psa(q_block=32, k_block=16, tail=True),
    "rf_v2_tail": RfV2(0.8, block_size=48, tail=True),
    "ada_bsa_tail": AdaBsa(0.6, block_size=24, tail=True),
    "radial": Radial(0.5, block_size=16),
    "radial_budget": Radial(first_frame=False, budget=0.3, block_size=16),
    "radial_tail": Radial(budget=0.2, block_size=24, tail=True),
    "sta": Sta((1, 3, 3), (2, 4, 4), block_size=16),
    "sta_budget": Sta(tile_size=(1, 4, 4), budget=0.3, block_size=32),
    "svg": Svg(num_sampled_rows=20, block_size=16),
    "svg_budget": Svg(first_frame=False, budget=0.3, block_size=32),
    "svg2": Svg2(0.6, q_block=32, k_block=16),
    "svg2_budget": Svg2(budget=0.3, q_block=24, k_block=16),
    "svg2_tail": Svg2(budget=0.2, q_block=32, k_block=16, tail=True),
    "random": Random(Budget(0.3), q_block=32, k_block=16),
    "local": Local(Budget(0.3), q_block=32, k_block=16, window=(2, 4, 4)),
    "graded": Schedule(Entropy(q_block=32, k_block=16), curve=Curve(0.5)),
    "graded_flat": Schedule(Entropy(q_block=32, k_block=16), curve=Curve(0.5, "flat")),
    "graded_rd": Schedule(
        RateDistortion(samples=3, q_block=32, k_block=16, probes=0),
        curve=Curve(0.4, "linear", 0.05),
    ),
    "graded_psa_tail": Schedule(
        Psa(q_block=32, k_block=16, tail=True), curve=Curve(0.5, (1.5, 0.8, 0.4))
    ),
    "schedule": Schedule(Entropy(Budget(0.4), q_block=32, k_block=16), min_tokens=2),
}  # fmt: skip


def _small(kind: type[Method]) -> Method:
    """A registered method at 0.4 of the work, on small blocks where it lets them be chosen."""
    blocks = {"q_block": 32, "k_block": 16, "block_size": 16}
    known = {field.name for field in fields(kind)}  # type: ignore[arg-type]
    made = kind(**{name: size for name, size in blocks.items() if name in known})
    return made.with_budget(0.4)


# Whoever is registered joins, also without a line above.
_covered = {type(method) for method in VARIANTS.values()}
METHODS: dict[str, Method] = VARIANTS | {
    name: _small(kind) for name, kind in REGISTERED.items() if kind not in _covered
}

CAUSAL = [name for name, method in METHODS.items() if method.can_be_causal]
CAUSAL = [name for name in CAUSAL if name != "ada_bsa_compat"]  # undefined there, and refused


@dataclass(frozen=True)
class Geometry:
    q: TokenGrid
    k: TokenGrid | None = None
    offset: int | None = None
    B: int = 1
    H: int = 2
    kv: int = 2

    @property
    def square(self) -> bool:
        return self.k is None


def _flat(n: int) -> TokenGrid:
    return TokenGrid.flat(n)


CACHE, CHUNK = TokenGrid.video(11, 10, 10), TokenGrid.video(3, 10, 10)
GEOMETRIES: dict[str, Geometry] = {
    "text_front": Geometry(TokenGrid.video(5, 9, 10, text=7)),
    "text_back": Geometry(TokenGrid.video(5, 9, 10, text=7, text_side="back")),
    "one": Geometry(TokenGrid.video(1, 1, 1)),
    "only_text": Geometry(TokenGrid((Text(37),))),
    "primes": Geometry(TokenGrid.video(3, 7, 11)),
    "flat": Geometry(_flat(257)),
    "several": Geometry(TokenGrid((Box(1, 6, 6), Text(5), Box(3, 5, 7), Text(3), Box(2, 3, 1)))),
    "batch": Geometry(TokenGrid.video(3, 8, 9, text=2), B=3),
    "gqa": Geometry(TokenGrid.video(4, 6, 8), B=2, H=6, kv=2),
    "chunk_start": Geometry(CHUNK, CACHE, 0),
    "chunk": Geometry(CHUNK, CACHE, 437),
    "chunk_end": Geometry(CHUNK, CACHE, 800, B=2, H=4, kv=1),
    "chunk_flat": Geometry(_flat(300), _flat(1100), 123),
    "other_keys": Geometry(TokenGrid.video(2, 5, 7), TokenGrid.video(3, 6, 5, text=4)),
    "few_keys": Geometry(TokenGrid.video(2, 9, 9), TokenGrid((Text(3),))),
    "one_query": Geometry(_flat(1), _flat(300)),
}


def defined(method: str, geometry: Geometry) -> bool:
    """compat only exists where the original is well defined."""
    if method == "rf_v2_compat":
        video = sum(s.tokens for s in geometry.q.segments if isinstance(s, Box))
        aligned = video == geometry.q.tokens or video % 32 == 0
        return geometry.square and geometry.kv == geometry.H and aligned
    if method == "ada_bsa_compat":
        return geometry.square
    return True


def _on_cpu(name: str) -> bool:
    cpu = torch.device("cpu")
    return not BACKENDS[name].why_not(Task(cpu, torch.float32, 64, 2, 2, 256, 256))


# (device, backend): on the CPU those that run there, on CUDA all of them.
PLACES = [
    *(pytest.param("cpu", name, id=f"cpu-{name}") for name in BACKENDS if _on_cpu(name)),
    *(pytest.param("cuda", name, id=f"cuda-{name}", marks=pytest.mark.gpu) for name in BACKENDS),
]

# FlexAttention compiles for some seconds for every new shape: it joins with these only.
FLEX_METHODS = ("entropy", "entropy_large", "rf_v2", "local")
FLEX_GEOMETRIES = ("text_front", "batch", "gqa", "chunk_end", "one_query")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def spoiled(x: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """x [B, H, S, D] with NaN, infinities and huge numbers wherever a key is not `real` [B, S]."""
    found = torch.tensor([torch.nan, torch.inf, -1e30, -torch.inf, 1e30], device=x.device)
    junk = found[torch.arange(x.shape[2], device=x.device) % 5, None].to(x.dtype)
    return torch.where(real[:, None, :, None], x, junk)
