"""Tile sizes and small launch arithmetic shared by the score kernels. Pure functions, no state."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .launch import TensorSpec

LOG2E = 1.4426950408889634
# Largest scratch one launch may own; more heads than fit are scored in several launches.
SCRATCH_BYTES = 104 * 1024 * 1024
# Where no device is at hand to ask (the interpreter), assume a mid-sized one.
_UNKNOWN_PROCESSORS = 64
_UNKNOWN_SHARED = 99 * 1024


@dataclass(frozen=True, slots=True)
class Tile:
    """One kernel configuration: a `rows` x `keys` tile of logits, `depth` elements deep per step.

    All three are powers of two, at least 16. `depth` matters only to kernels that split the inner
    dimension. `registers` caps them per thread, so that a second program fits on a multiprocessor.
    """

    rows: int = 128
    keys: int = 128
    warps: int = 8
    stages: int = 3
    depth: int = 64
    registers: int | None = None

    def __post_init__(self) -> None:
        for name in ("rows", "keys", "depth"):
            value = getattr(self, name)
            if value < 16 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two of at least 16, got {value}")

    @property
    def options(self) -> dict[str, int]:
        """What a launch of this tile asks of the compiler."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else {**options, "maxnreg": self.registers}


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least `n` (and at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def cdiv(a: int, b: int) -> int:
    """Ceiling of a / b for positive ints."""
    return -(-a // b)


def padded_dim(head_dim: int) -> int:
    """The power of two (at least 16) that holds one head vector inside a tile."""
    return max(16, power_of_two(head_dim))


def processors(device: torch.device) -> int:
    """Streaming multiprocessors of `device`: read from cached properties, never from the device."""
    if device.type != "cuda":
        return _UNKNOWN_PROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_bytes(device: torch.device) -> int:
    """Shared memory one program may use on `device`."""
    if device.type != "cuda":
        return _UNKNOWN_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _UNKNOWN_SHARED))


def operand_bytes(dtype: torch.dtype, depth: int) -> int:
    """Shared memory one operand row of `depth` elements takes; fp32 is split for accuracy."""
    return depth * dtype.itemsize * (2 if dtype == torch.float32 else 1)


def precision(dtype: torch.dtype) -> str:
    """How tensor cores multiply: fp32 in three passes, so that it stays fp32."""
    return "tf32x3" if dtype == torch.float32 else "tf32"


def fit(tile: Tile, row_bytes: int, limit: int, *, resident: bool, least_keys: int = 16) -> Tile:
    """Shrink `tile` until its operands fit in `limit` bytes of shared memory.

    `row_bytes` is one row of an operand. With `resident` the row operand is held once and only keys
    are buffered `stages` times; otherwise both are. Fewer stages go first (never below two), then
    the larger side of the tile is halved, keys never below `least_keys`.
    """
    rows, keys, stages = tile.rows, max(tile.keys, least_keys), tile.stages

    def used() -> int:
        buffers = rows + stages * keys if resident else stages * (rows + keys)
        return buffers * row_bytes

    while used() > limit - 4096 and (stages > 2 or rows > 16 or keys > least_keys):
        if stages > 2:
            stages -= 1
        elif rows > 16 and (rows >= keys or keys <= least_keys):
            rows //= 2
        else:
            keys //= 2
    return Tile(rows, keys, tile.warps if rows >= 64 else 4, stages, tile.depth, tile.registers)


def even_splits(tiles: int, programs: int, slots: int, overhead: int = 3) -> int:
    """Tiles per program when `programs` runs of `tiles` tiles each are cut for `slots` at a time.

    A last, mostly idle wave costs as much as a full one, and every program pays `overhead` tiles to
    start: weigh the two.
    """

    def cost(splits: int) -> int:
        each = cdiv(tiles, splits)
        return cdiv(programs * cdiv(tiles, each), slots) * (each + overhead)

    best = min(range(1, max(2, min(tiles // 4, 64) + 1)), key=cost)
    return cdiv(tiles, best)


def positive_scale(scale: float) -> float:
    """Logit scale in units of log2; the kernels take maxima before scaling, so it must be > 0."""
    if not scale > 0 or not math.isfinite(scale):
        raise ValueError(f"scale must be positive and finite, got {scale}")
    return scale * LOG2E


def check_queries_keys(q: TensorSpec, k: TensorSpec) -> None:
    """Raise unless q [B,H,Sq,D] and k [B,Hkv,Sk,D] can be scored against each other."""
    if len(q.shape) != 4 or len(k.shape) != 4:
        raise ValueError(f"need q and k of rank 4, got {tuple(q.shape)} and {tuple(k.shape)}")
    if q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"q {tuple(q.shape)} and k {tuple(k.shape)} do not belong together")
    if q.dtype != k.dtype or q.device != k.device:
        raise ValueError("q and k must share dtype and device")
    if q.stride[3] != 1 or k.stride[3] != 1:
        raise ValueError("the head dimension of q and k must be contiguous")
    if min(q.shape[2], k.shape[2]) < 1:
        raise ValueError("q and k must hold at least one token")


def head_ranges(total: int, bytes_each: int) -> list[tuple[int, int]]:
    """Cut `total` heads into even half-open ranges whose scratch stays within SCRATCH_BYTES."""
    per_launch = max(1, min(total, SCRATCH_BYTES // max(1, bytes_each)))
    launches = cdiv(total, per_launch)
    size = cdiv(total, launches)
    return [(start, min(total, start + size)) for start in range(0, total, size)]
